"""Cases of the tests of a tied embedding by rows. Rank = 2 · replica + (is the owner), as a pair's groups have it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import check, check_equal, check_ranks_agree, refused
from tied_cases import groups
from torch import Tensor, nn

from thinwire.codecs import Quantize, Transform
from thinwire.data_parallel.tied_embedding import RowEmbedding
from thinwire.data_parallel.tied_rows import TiedRows
from thinwire.distributed.pair import Pair

VOCABULARY, WIDTH, TOKENS, STEPS = 300, 24, 40, 6
ADAM = {"lr": 1e-2, "weight_decay": 0.1}
CODED = Quantize(4)


def table() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))


def batch(step: int, replica: int) -> Tensor:
    """Tokens that come again and again, and now and then new ones; a token stands several times in most batches."""
    drawn = torch.rand(4, TOKENS // 4, generator=torch.Generator().manual_seed(10 * step + replica))
    return (drawn**3 * (VOCABULARY // 2 + 20 * step)).long()


def loss_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """Predict the next token of a row."""
    logits = (hidden[:, :-1].tanh() @ head.T).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Pairs:
    """One tied model over pairs: the first stage looks up, the owner computes the loss and has the optimiser."""

    def __init__(self, **options: Any) -> None:
        self.replica, self.is_owner = divmod(dist.get_rank(), 2)
        self.column, self.pair = groups()
        weight = table()
        self.weight = nn.Parameter(weight)
        self.embedding = RowEmbedding(nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=2))
        self.optimizer = torch.optim.AdamW([self.weight], **ADAM)
        self.rows = TiedRows(self.weight if self.is_owner else self.embedding, self.pair, **options)

    def tell(self, step: int) -> None:
        known = not self.is_owner or not self.rows.tell
        self.rows.announce(batch(step, self.replica) if known else None)

    def step(self, step: int, spoil: bool = False) -> float:
        """One step, whose rows have been announced; the next one's are while it runs."""
        self.weight.grad = None
        self.rows.begin()
        self.rows.fetch()
        self.tell(step + 1)
        loss = self._backward(step, spoil)
        self.rows.send_gradients()
        self.rows.add_gradients()
        good = torch.ones(())
        if self.is_owner:
            dist.all_reduce(self.weight.grad, group=self.column)
            self.weight.grad /= dist.get_world_size() // 2
            good = self.weight.grad.isfinite().all().float()
        dist.broadcast(good, group=self.pair, group_src=1)
        if not good:
            self.rows.rollback()
            return float("nan")
        self.rows.commit()
        if self.is_owner:
            self.optimizer.step()
        return loss

    def _backward(self, step: int, spoil: bool) -> float:
        tokens = batch(step, self.replica)
        passed = torch.empty(*tokens.shape, WIDTH)
        if not self.is_owner:
            hidden = self.embedding(tokens)
            dist.send(hidden.detach(), group=self.pair, group_dst=1)
            dist.recv(passed, group=self.pair, group_src=1)
            hidden.backward(passed * float("nan") if spoil else passed)
            return 0.0
        dist.recv(passed, group=self.pair, group_src=0)
        hidden = passed.requires_grad_()
        loss = loss_of(hidden, self.weight, tokens)
        loss.backward()
        dist.send(hidden.grad, group=self.pair, group_dst=0)
        return float(loss.detach())


def straight(replicas: int, steps: range) -> tuple[Tensor, list[list[float]]]:
    """The same in one process: a tied weight, the mean over replicas, AdamW; the losses by step and replica."""
    weight, losses = nn.Parameter(table()), []
    optimizer = torch.optim.AdamW([weight], **ADAM)
    for step in steps:
        weight.grad = None
        found = []
        for replica in range(replicas):
            tokens = batch(step, replica)
            loss = loss_of(nn.functional.embedding(tokens, weight, padding_idx=2), weight, tokens)
            (loss / replicas).backward()
            found.append(float(loss.detach()))
        optimizer.step()
        losses.append(found)
    return weight.detach(), losses


def exact_rows_train_as_one_process(tell: bool) -> None:
    """AdamW with decay, repeated tokens, rows old and new: losses and weight to 1e-5; bytes as computed; the owners'
    weights equal to the bit."""
    pairs = Pairs(tell=tell)
    pairs.tell(0)
    losses = [pairs.step(step) for step in range(STEPS)]
    weight, expected = straight(dist.get_world_size() // 2, range(STEPS))
    if pairs.is_owner:
        check_equal("the weight", {"weight": pairs.weight.detach()}, {"weight": weight}, 1e-5)
        off = max(abs(a - b[pairs.replica]) for a, b in zip(losses, expected))
        check(off < 1e-5, f"a loss is off by {off:.1e}")
        check_ranks_agree("the owners", {"weight": pairs.weight.detach()}, pairs.column)
    used = [len(batch(step, pairs.replica).unique()) for step in range(STEPS)]
    told = (STEPS + 1) * (16 + (VOCABULARY + 7) // 8) if tell and not pairs.is_owner else 0
    frames = sum(16 + rows * WIDTH * 4 for rows in used)
    check(pairs.rows.sent == frames + told, f"sent {pairs.rows.sent} bytes, {frames} + {told} were computed")
    check(
        len(pairs.embedding.weight) == (VOCABULARY if pairs.is_owner else used[-1]), "the first stage holds more rows"
    )
    check(pairs.is_owner == bool(pairs.optimizer.state), "moments are elsewhere than at the owner")


def coded_rows_follow_one_process() -> None:
    """Four bits each way: nearer to one process' weight than the weight has moved by far; both ends remember the same;
    fewer bytes."""
    pairs = Pairs(codec=CODED, tell=False, seed=3)
    pairs.tell(0)
    for step in range(STEPS):
        pairs.step(step)
    weight, _ = straight(dist.get_world_size() // 2, range(STEPS))
    check_ranks_agree("the mirrors", {"mirror": pairs.rows.mirror}, pairs.pair)
    if pairs.is_owner:
        moved, off = (weight - table()).norm(), (pairs.weight.detach() - weight).norm()
        check(off < 0.2 * moved, f"off by {off:.3f}, moved by {moved:.3f}")
        seen = batch(STEPS - 1, pairs.replica).unique()
        stale = (pairs.rows.mirror - pairs.weight.detach())[seen].norm() / (table() - pairs.weight.detach())[
            seen
        ].norm()
        check(0 < stale < 0.5, f"the first stage's rows lag by {stale:.2f} of their way")
    used = sum(len(batch(step, pairs.replica).unique()) for step in range(STEPS))
    check(pairs.rows.sent < used * WIDTH * 4 / 5, f"sent {pairs.rows.sent} bytes for {used} rows")


def step_with_nan_leaves_no_trace(coded: bool) -> None:
    """NaN in one first stage's gradient: no end changes, and the next steps are as if it had not been."""
    pairs, other = (Pairs(codec=CODED if coded else None, tell=False) for _ in range(2))
    for one in (pairs, other):
        one.tell(0)
        one.step(0)
    before = {name: v.clone() for name, v in pairs.rows.state_dict().items() if name != "step"}
    loss = pairs.step(1, spoil=dist.get_rank() == 0)
    check(loss != loss, f"the step counts, with a loss of {loss}")
    check_equal("mirrors", before, pairs.rows.state_dict())
    other.rows.step += 1  # numbers stay used, and seeds with them
    other.tell(2)
    for one in (pairs, other):
        one.step(2)
    check_equal("weights", {"weight": pairs.weight.detach()}, {"weight": other.weight.detach()})
    check_ranks_agree("the rows", {"rows": pairs.rows.ids.float()}, pairs.pair)


def damaged_message_drops_the_step(way: str) -> None:
    """A bit is flipped on the way; with a codec, both ends then go on with equal mirrors."""
    pairs = Pairs(codec=CODED, tell=False)
    pairs.tell(0)
    pairs.step(0)
    sends = pairs.is_owner == (way == "down") and pairs.replica == 0
    send = Pair.send

    def spoilt(self: Pair, frame: Tensor, tag: int) -> Any:
        return send(self, torch.cat((frame[:20], frame[20:21] ^ 4, frame[21:])), tag)

    with mock.patch.object(Pair, "send", spoilt if sends else send):
        loss = pairs.step(1)
    check(loss != loss, f"the step counts, with a loss of {loss}")
    check_ranks_agree("the mirrors", {"mirror": pairs.rows.mirror}, pairs.pair)
    loss = pairs.step(2)
    check(loss == loss, "the next step is dropped too")


def mirrors_that_differ_are_found_and_healed() -> None:
    """A bit of a remembered row changes at the first stage: one step is dropped, then the owner's weight is taken."""
    pairs = Pairs(codec=CODED, tell=False)
    pairs.tell(0)
    pairs.step(0)
    if not pairs.is_owner:
        pairs.rows.mirror[batch(1, pairs.replica)[0, 0]] += 1
    lost, next_one = pairs.step(1), pairs.step(2)
    check(lost != lost and next_one == next_one, f"losses {lost} and {next_one}")
    check_ranks_agree("the mirrors", {"mirror": pairs.rows.mirror}, pairs.pair)


def resuming_is_bitwise(coded: bool) -> None:
    """After three steps, with the fourth's rows sent already: state taken, and loaded by ends made anew."""
    options = {"codec": CODED if coded else None, "tell": False, "seed": 5}
    pairs = Pairs(**options)
    pairs.tell(0)
    for step in range(3):
        pairs.step(step)
    pairs.rows.begin()
    saved = copy.deepcopy((pairs.rows.state_dict(), pairs.weight.detach(), pairs.optimizer.state_dict()))
    pairs.rows.close()
    whole = Pairs(**options)
    whole.tell(0)
    for step in range(5):
        whole.step(step)
    again = Pairs(**options)
    with torch.no_grad():
        again.weight.copy_(saved[1])
    again.optimizer.load_state_dict(saved[2])
    again.rows.load_state_dict(saved[0])
    again.tell(3)
    for step in range(3, 5):
        again.step(step)
    check_equal("weights", {"weight": again.weight.detach()}, {"weight": whole.weight.detach()})
    check_equal("state", again.rows.state_dict(), whole.rows.state_dict())
    lost = Pairs(**options)
    with torch.no_grad():
        lost.weight.copy_(saved[1])
    lost.rows.load_state_dict({})
    if coded:
        check_ranks_agree("the mirrors", {"mirror": lost.rows.mirror}, lost.pair)
        check(not lost.is_owner or torch.equal(lost.rows.mirror, lost.weight), "the mirror is not the owner's weight")


def evaluation_borrows_rows() -> None:
    """Exact rows of other tokens, in the midst of a step, which goes on as if nothing had been."""
    pairs = Pairs(codec=CODED, tell=True)
    pairs.tell(0)
    pairs.step(0)
    pairs.rows.begin()
    pairs.rows.fetch()
    held, state = pairs.embedding.weight, pairs.rows.state_dict()
    tokens = torch.arange(7, VOCABULARY, 3)
    current = pairs.weight.detach().clone()
    dist.broadcast(current, group=pairs.pair, group_src=1)
    with pairs.rows.lend(None if pairs.is_owner else tokens):
        if not pairs.is_owner:
            check(torch.equal(pairs.embedding(tokens), current[tokens]), "the rows are not the owner's")
            with refused("out of range", IndexError):
                pairs.embedding(torch.tensor([8]))
            with torch.no_grad():
                asked = pairs.embedding(torch.zeros(2, 3, dtype=torch.int64))  # as torch 2.11 asks for shapes
                check(asked.shape == (2, 3, WIDTH) and bool(asked.isnan().all()), "token 0 has a row")
                with refused("out of range", IndexError):
                    pairs.embedding(torch.tensor([0, 8]))
    check(pairs.embedding.weight is held, "the step's rows are not back")
    check_equal("state", pairs.rows.state_dict(), state)
    with refused("pair is the first stage's rank"):
        TiedRows(pairs.embedding if pairs.is_owner else pairs.weight, pairs.pair)


def ends_with_unlike_codecs_are_refused() -> None:
    last = dist.get_rank() % 2
    for codec, words in (
        (Quantize(4 + last), "rank 1 differs from rank 0 in codec.bits: 5 against 4"),
        (None if last else CODED, "in codec: None against Quantize"),
        (Transform(2), "in codec: Transform, revision 1 against Transform, revision 2"),
    ):
        with mock.patch.object(Transform, "revision", 2 - last), refused(words):
            Pairs(codec=codec)
