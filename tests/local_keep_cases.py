"""Cases of the LocalSteps tests: what was not sent stays in a site's weights (`keep`)."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_cases import _anchors, _residuals, make, run
from local_support import train, trained
from rank_cases import check, check_equal, check_ranks_agree
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from thinwire.collectives.groups import subgroup
from thinwire.local_steps.fragment import Fragment

TENTH = tw.collectives.Gather(tw.codecs.TopK(0.1))


def _flat(fragment: Fragment, values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[n].reshape(-1) for u in fragment.units for n in u.parameters])


def what_is_kept_stays_in_the_weights() -> None:
    """θ = anchor − keep·e after every round, also after NaN and a dropped one; nothing is counted twice or lost."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for keep in (1.0, 0.5):
        model, inner, local = make(TENTH, every=2, keep=keep, outer=lambda a: torch.optim.SGD(a, 1.0))
        (fragment,) = local.fragments
        for step in range(1, 11):
            train(model, inner, step, rank)
            if step == 6 and rank == 1:
                model.layers[0].weight.data[0, 0] = torch.nan
            before, anchor = _residuals(local), _anchors(fragment)
            part = torch.cat(list(fragment.outer_gradient().values())) + before
            local.step()
            if step % 2:
                continue
            after = _residuals(local)
            base = _anchors(fragment) - keep * after
            check(torch.equal(_flat(fragment, fragment.weights()), base), f"weights after step {step}")
            if step == 6:
                check(torch.equal(after, before) == (rank == 1), "the residual of a site with NaN stays")
                continue
            part -= after
            dist.all_reduce(part)
            error = float((anchor - _anchors(fragment) - part / size).abs().max())
            check(error < 1e-6, f"the mean and what was sent differ by {error:.1e}")
        check(bool(after.any()) and local.returns == (rank == 1), "something was kept")
        model.layers[1].weight.data.fill_(-3e38)
        local.steps += 1
        local.step(tokens=1 if rank else 3)
        began = _anchors(fragment) - keep * after
        check(local.skips == 1 and torch.equal(_flat(fragment, fragment.weights()), began), "dropped: back to the base")
        local.close()


def copies_keep_the_same() -> None:
    """Two sites of two copies have the bits of two sites of one, and resume with them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "copy"))
    how = {"group": mesh["site"], "every": 2, "delay": 1, "keep": 1.0}
    results = []
    for copies in (None, mesh["copy"].get_group()):
        model, inner, local = make(TENTH, copies=copies, **how)
        site = mesh["site"].get_local_rank()
        for step in range(1, 8):
            if step == 6:
                saved = local.state_dict()
                local.close()
                model, inner, local = make(TENTH, copies=copies, **how)
                local.load_state_dict(saved)
            train(model, inner, step, site)
            local.step()
        results.append(trained(model))
        check(bool(_residuals(local).any()), "something was kept")
        local.close()
    check_equal("with copies", results[1], results[0])


def other_sites_begin_where_the_mean_left_them(folder: str) -> None:
    """Four sites' state, read by two: all begin at the anchor less what the mean residual keeps."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, inner, local = make(TENTH, every=2, keep=1.0)
    run(model, inner, local, range(1, 6))
    path = os.path.join(folder, "kept")
    dcp.save({"local": local.state_dict()}, checkpoint_id=path)
    left = _residuals(local)
    dist.all_reduce(left)
    half = subgroup([r for r in range(size) if r // 2 == rank // 2], dist.group.WORLD)
    other_model, _, other = make(TENTH, every=2, keep=1.0, group=half)
    other.load_state_dict(other.read_state(path, "local"))
    (fragment,) = other.fragments
    expected = _anchors(local.fragments[0]) - left / size
    found = _flat(fragment, fragment.weights())
    check(bool(left.any()) and torch.allclose(found, expected, atol=1e-7), "weights after another number of sites")
    check_ranks_agree("weights", trained(other_model))
    for one in (local, other):
        one.close()


def all_that_was_kept_is_sent_at_the_end() -> None:
    """finish(last="off") with keep = 1: the anchor is the mean of the sites' weights."""
    model, inner, local = make(TENTH, every=4, keep=1.0)
    run(model, inner, local, range(1, 8))
    mean = torch.cat([w.reshape(-1) for w in trained(model).values()])
    dist.all_reduce(mean)
    local.finish(last="off")
    found = torch.cat([w.reshape(-1) for w in trained(model).values()])
    check(torch.allclose(found, mean / dist.get_world_size(), atol=1e-6), "the mean of all weights")
    check(not bool(_residuals(local).any()), "nothing is left")
    local.close()


def cases(folder: str) -> list[Any]:
    return [
        what_is_kept_stays_in_the_weights, copies_keep_the_same,
        functools.partial(other_sites_begin_where_the_mean_left_them, folder), all_that_was_kept_is_sent_at_the_end,
    ]  # fmt: skip
