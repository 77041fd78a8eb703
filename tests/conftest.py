"""Shared test settings: no deadlines (compilation is slow once), reproducible examples, small thread pools; a world."""

import importlib
import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

import thinwire  # noqa: F401 before torch multiplies: where a processor's AMX is broken, it must be told
from thinwire.lab import Network

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton takes its interpreter, or not, when it is imported, and torch's pipelining imports it.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")

settings.register_profile(
    "thinwire", deadline=None, derandomize=True, max_examples=60, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
settings.register_profile("long", parent=settings.get_profile("thinwire"), max_examples=1000, derandomize=False)
settings.register_profile("quick", parent=settings.get_profile("thinwire"), max_examples=10)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "thinwire"))
THREADS = 2
torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def threads():
    """What is run in this process may have set another number, as benchmarks do."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def one_thread():
    """As ranks have: products of several threads add up in another order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kept():
    """A network that tests share, as long as it is sound."""
    networks: list[Network] = []
    yield networks
    for net in networks:
        net.close()


@pytest.fixture
def four_hosts(kept):
    """Four hosts for ranks of trainings, forked from one process that has imported what they need."""
    if not kept:
        kept.append(Network(hosts=4, preload=("train_warm",)).__enter__())
    (net,) = kept
    yield net
    if net._job is not None and not net._job.done:  # of a test that failed
        kept.pop().close()


@pytest.fixture
def alone():
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
