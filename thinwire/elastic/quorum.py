"""A torchft quorum as a group: members meet before every step, and vote at its end."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist

from thinwire.collectives.groups import ALONE, Group, world
from thinwire.collectives.members import Elastic, Saved
from thinwire.distributed.values import broadcast_json, gather_json
from thinwire.elastic.alarm import Alarm
from thinwire.elastic.alarmed import AlarmedMembers, meet
from thinwire.elastic.fetching import in_url
from thinwire.elastic.healing import Healing
from thinwire.elastic.packing import nbytes
from thinwire.elastic.require import require_torchft
from thinwire.errors import InvalidExchange, RunFailed, UsageError
from thinwire.torch_private.torchft import alarmed_gloo, is_connected, quorum_number

if TYPE_CHECKING:
    from torchft import Manager

log = logging.getLogger("thinwire")
LARGER = 16  # a member's state may be so many times that of a newcomer
SLACK = 1 << 20  # bytes


class Stateful(Protocol):
    """A model, an optimiser, a schedule: what a newcomer takes from a member."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Quorum(AlarmedMembers, Elastic):
    """The members that train now. Taken wherever a process group is by `Reducer`, `LocalSteps` and `tw.all_reduce`.

        quorum = tw.elastic.Quorum({"model": model, "optimizer": optimizer}, lighthouse.address)

    state: what a newcomer takes from a member, by name: weights, moments, schedules. What thinwire itself keeps takes
    care of itself. lighthouse: its address. host: this member's address, by which the others reach it; Gloo's
    connections are of that address too, whatever GLOO_SOCKET_IFNAME says. min_members: with fewer a step does not
    count. timeout: seconds without a byte; a member that lets others wait longer is left out. patience: seconds to wait
    for the others at the beginning of a step: more than a step takes, with local steps more than a round. name: shown
    in logs. slow: with local steps a site whose inner step takes more than so many times the others' median makes fewer
    of them in a round; None: all make as many. inside: the process group of this member's ranks, where it has several,
    as a pipeline has: its rank r meets rank r of the other members, and a step counts on all its ranks or on none. All
    of them make a quorum, with equal arguments but `state` and `host`.

    UsageError where torchft is not installed, or an argument is not allowed, as a host that others cannot reach.
    """

    backends = "gloo"

    def __init__(
        self, state: Mapping[str, Stateful], lighthouse: str, *, host: str = "127.0.0.1", min_members: int = 1,
        timeout: float = 5.0, patience: float = 60.0, name: str = "", slow: float | None = None,
        inside: Group = ALONE,
    ) -> None:  # fmt: skip
        require_torchft()
        from torchft import Manager

        if min_members < 1 or timeout <= 0 or patience <= 0:
            raise UsageError(f"min_members {min_members}, timeout {timeout}, patience {patience}: all must be above 0")
        host = host.strip("[]")  # of IPv6
        self.slow = slow
        self.inside = inside
        ranks, rank = world(inside)
        if rank == 0:
            _check_address(host, lighthouse)
        self.timeout = timedelta(seconds=timeout)
        self.connections = alarmed_gloo(partial(meet, host, self.timeout), host, self.timeout)
        try:
            self.healing = Healing(host, timeout, self._most_bytes)
        except OSError as error:
            raise UsageError(f"host {host}: is no address of this machine: {error.strerror}") from None
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        store = broadcast_json([host, 0 if self.store is None else self.store.port], group=inside)
        self._join = partial(
            Manager, pg=self.connections, load_state_dict=None, state_dict=None, min_replica_size=min_members,
            use_async_quorum=False, timeout=self.timeout, quorum_timeout=timedelta(seconds=patience),
            connect_timeout=self.timeout, rank=rank, world_size=ranks, store_addr=store[0], store_port=store[1],
            lighthouse_addr=lighthouse, hostname=in_url(host), replica_id=name, checkpoint_transport=self.healing,
        )  # fmt: skip
        self.manager: Manager | None = None  # from the first step on: the others wait for whoever has one
        self.told: dict[str, tuple[Callable[[Any], Any], Callable[[], Saved]]] = {}
        self.staged: list[Callable[[bool], None]] = []
        self.undecided: int | None = None  # the quorum of a step that did not count here, and may have for others
        self.torn = False  # ranks of this member have states of different steps
        self._committed = -1
        self._resumed = 0, 0  # steps, batches
        self.register("thinwire members", self._compare, self._about)
        self.register("thinwire quorum", self._load, lambda: {"committed": self._committed})
        for key, part in state.items():
            self.register(key, part.load_state_dict, part.state_dict)

    @property
    def steps(self) -> int:
        """That counted, since the run began."""
        return self._resumed[0] if self.manager is None else int(self.manager.current_step())

    @property
    def batches(self) -> int:
        """Of all members, that counted: a step of three members has three."""
        return self._resumed[1] if self.manager is None else int(self.manager.batches_committed())

    def go_on_from(self, steps: int, batches: int) -> None:
        """Before the first step: this member's state is that after so many steps and batches, from a checkpoint. Where
        another member has made more steps, this one takes its state."""
        if self.manager is not None:
            raise UsageError("Quorum: go_on_from comes before quorum.begin()")
        self._resumed = steps, batches

    @property
    def size(self) -> int:
        """How many members there are in this step."""
        return self.place()[0]

    def place(self) -> tuple[int, int]:
        """(members in this step, this member's number among them), also where its connections are broken."""
        manager = self._begun()
        return manager.num_participants(), manager.participating_rank() or 0

    @property
    def number(self) -> int:
        return -1 if self.manager is None else quorum_number(self.manager)

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def counted(self) -> bool:
        return self.undecided is None

    def process_group(self) -> dist.ProcessGroup:
        self._begun()
        if not is_connected(self.connections):
            raise RuntimeError("the connections to the other members were closed in this step")
        return self.connections.parent

    @property
    def alarm(self) -> Alarm:
        found = self.connections.alarm
        assert isinstance(found, Alarm), "there is no group"
        return found

    # --- a step

    def begin(self) -> None:
        """Meet the others: who is there. A newcomer, and a member that fell behind, takes the state of another.

        RunFailed where there are not enough within `patience`, or the lighthouse cannot be reached.
        """
        if self.manager is None:
            self._most_bytes()  # what cannot be sent is said now, and not when the first newcomer comes
            try:
                self.manager = self._join()
            except (RuntimeError, TimeoutError) as error:
                raise RunFailed(f"the lighthouse cannot be reached: {_reason(error)}") from error
            self.manager.load_state_dict({"step": self._resumed[0], "batches_committed": self._resumed[1]})
            for name, (load, save) in self.told.items():
                self.manager.register_state_dict_fn(name, load, save)
        self._compare_ranks()
        try:
            self.manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise RunFailed(f"no quorum: {_reason(error)}") from error
        self._settle(False)  # where it counted for others, their state has come and said so
        if self.torn and self.manager.errored() is None:
            raise RunFailed(
                "the ranks of this member have states of different steps, and no other member has a newer one"
            )
        failed = self.manager.errored()
        if failed is not None:  # the state did not come, or the connections: take no part
            why = getattr(failed, "original_exception", failed)  # torchft's text of it has the traceback too
            log.warning("thinwire: this member takes no part in a step: %s", why)
            self.connections.shutdown()

    def _compare_ranks(self) -> None:
        """After a step that did not count: a newcomer's state may have come on some ranks and not on others. Then all
        of them take it anew."""
        if not self.counted and world(self.inside)[0] > 1:
            found = gather_json([self.steps, self.torn], self.inside)
            self.torn = any(torn for _, torn in found) or len({steps for steps, _ in found}) > 1
            if self.torn:
                self.fall_behind()

    def stage(self, settle: Callable[[bool], None]) -> None:
        self.staged.append(settle)

    def report(self, error: Exception) -> None:
        """As Elastic says. Where a member was lost the alarm rings, so that nobody waits for this one."""
        manager = self._begun()
        if manager.errored() is None:
            log.warning("thinwire: a step does not count: %s", error)
        manager.report_error(RuntimeError(str(error)))  # without its frames, which hold messages
        if not isinstance(error, InvalidExchange):
            self.connections.shutdown()

    def fall_behind(self) -> None:
        self._begun().load_state_dict({"step": 0, "batches_committed": 0})

    def commit(self) -> bool:
        """The vote that ends the step. True: apply it. False: it does not count; what it wrote has been dropped."""
        try:
            counts = self._begun().should_commit()
        except (RuntimeError, TimeoutError) as error:
            raise RunFailed(f"no vote: a rank of this member is gone: {_reason(error)}") from error
        if counts:
            self._committed = self.number
            self._settle(True)
            return True
        self.undecided = self.number
        return False

    def _settle(self, counts: bool) -> None:
        self.undecided = None
        staged, self.staged = self.staged, []
        for settle in staged:
            settle(counts)

    def _about(self) -> Saved:
        return {"state": ", ".join(sorted(self.told))}

    def _compare(self, told: Saved) -> None:
        mine, theirs = self._about()["state"], told["state"]
        if mine != theirs:
            raise UsageError(f"this member differs from the quorum in state: {mine} against {theirs}")

    def _load(self, told: Saved) -> None:
        self._committed = int(str(told["committed"]))
        self.torn = False
        self._settle(self._committed == self.undecided)

    def register(self, name: str, load: Callable[[Saved], None], save: Callable[[], Saved]) -> None:
        if self.manager is not None:
            raise UsageError(f"Quorum: {name!r} comes too late: what trains in it is made before quorum.begin()")
        if name in self.told:
            raise UsageError(f"Quorum: there is {name!r} already: one adapter of a kind per quorum")
        self.told[name] = load, save

    def _most_bytes(self) -> int:
        """That another member's state may have: an optimiser that has made no step yet has no moments."""
        return SLACK + LARGER * sum(nbytes(save()) for _, save in self.told.values())

    def _begun(self) -> Manager:
        if self.manager is None:
            raise UsageError("quorum.begin() comes before the first exchange of a step")
        return self.manager

    def close(self) -> None:
        """Leave; the others go on."""
        self.connections.leave()
        if self.manager is None:
            self.healing.shutdown()
        else:
            self.manager.shutdown(wait=False)


def _check_address(host: str, lighthouse: str) -> None:
    """UsageError where members of other machines could not reach this one, and no step would count on any member."""
    there = urlsplit(lighthouse).hostname
    if not there or not lighthouse.startswith("http://"):
        raise UsageError(f"lighthouse {lighthouse!r}: must be an address such as http://10.0.0.1:29510")
    if _is_loopback(host) and not _is_loopback(there):
        raise UsageError(
            f"host {host}: members on other machines cannot reach this one there, and the lighthouse is at {there}: "
            "give this machine's own address (host=, or --host)"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "::", "0.0.0.0") or host.startswith("127.")


def _reason(error: Exception) -> str:
    """What torchft's server said, without what surrounds it."""
    found = re.search(r'message: "([^"]+)"', str(error))
    return found[1] if found else str(error)
