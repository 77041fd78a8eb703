"""Compressed pipeline stages on real processes: bitwise neutral with Identity, mirrored, healed, resumable.

Each world size is launched once (the fixtures) and runs all its cases; a test looks at one case's findings.
"""

from __future__ import annotations

import pipeline_cases
import pytest

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
    pytest.mark.timeout(280),
]
PRELOAD = ("torch", "torch.distributed.pipelining", "torch.utils.checkpoint", "thinwire.pipeline.pipeline")
CASES = {
    1: [("alone", ())],
    2: [
        ("identity", ()), ("mirrors", (200,)), ("shapes", ()), ("faults", ()), ("lazy_error", ()), ("auto", ()),
        ("resume", (True,)), ("resume", (False,)), ("evaluation", ()), ("complaints", ()), ("dropout", ()),
        ("file_stores", ()), ("repeats", ()), ("half_precision", ()), ("loss_scale", ()), ("told", ()),
        ("early_receives", ()),
    ],
    4: [
        ("identity", ()), ("mirrors", (16,)), ("shapes", ()), ("lazy_error", ()), ("faults", ()), ("replicas", ()),
        ("unseen", ()), ("overlapped", ()), ("complaints", ()),
    ],
}  # fmt: skip
WORDS = {
    "missing": "give step(ids=…)", "twice": "sample id 1 stands twice", "type": "not 0.5",
    "number": "ids = 8: must be a list or tensor", "text": "ids = 'abcdefgh': must be a list or tensor",
    "length": "shape = 8: must be the batch's, x.shape",
    "few": "micro-batch 0 has 2 rows, but 1 were announced for it", "many": "has 2 rows, but 3 were announced",
    "looped": "micro-batch 0 has 2 rows, but 1 were announced", "after": "0 skips, 0 healed",
    "another": "micro-batch 0 is (2, 8, 16), unlike (8, 9, 16) before: give step(shape=x.shape)",
    "rows": "8 sample ids for a batch of shape (9, 8, 16)",
    "codec": "stage 0 and stage 1 differ in forward.memory.cold", "when": "stage 0 and stage 1 differ in backward.when",
    "shape": "stage 0 sends (2, 8, 16) torch.float32, but stage 1 expects (2, 7, 16)", "bracket": "outside its bracket",
}  # fmt: skip


@pytest.fixture(scope="module")
def findings():
    """size → per rank the findings of every case."""
    done = {}

    def of(size):
        if size not in done:
            with Network(hosts=size, preload=PRELOAD) as net:
                done[size] = list(net.run(pipeline_cases.everything, CASES[size], timeout=240, echo=False))
        return done[size]

    return of


@pytest.mark.parametrize(
    ("size", "case"),
    [(size, f"{name}{arguments or ''}") for size, cases in CASES.items() for name, arguments in cases],
)
def test_case(findings, size, case):
    for rank in findings(size):
        if case == "complaints":
            assert {name: words for name, words in WORDS.items() if words not in rank[case].get(name, "")} == {}
        else:
            assert rank[case] == []
