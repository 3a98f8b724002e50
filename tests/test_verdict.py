"""Fits, tight, does not fit, cannot say: at each border between them, to the page."""

from dataclasses import replace

import pytest
import torch

import everybyte as eb
from everybyte.units import MiB
from everybyte.verdict import doubts, judge, steps_until

GPU = replace(eb.gpus.find("a4000"), total=1000 * MiB, context=(100 * MiB, 200 * MiB))


def holding(*sizes):
    with eb.trace("cuda", gpu=GPU) as run:
        kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]  # noqa: F841 - lives until the block ends
    return run.timeline


@pytest.mark.parametrize(
    ("pages", "word", "left"),
    [
        (375, "fits", (50, 150)),  # 750 MiB: 1000, less the larger context, less a twentieth
        (376, "tight", (48, 148)),
        (400, "tight", (0, 100)),
        (401, "cannot say", (-2, 98)),
        (450, "cannot say", (-100, 0)),
        (451, "does not fit", (-102, -2)),
    ],
)
def test_every_border_is_where_arithmetic_puts_it(pages, word, left):
    verdict = judge(holding(pages * 2 * MiB), GPU)
    assert verdict.word == word
    assert verdict.left == tuple(mib * MiB for mib in left)
    assert verdict.needs == pages * 2 * MiB
    assert (verdict.failure is None) == (word in ("fits", "tight"))
    assert bool(verdict.why) == (word != "fits")


def test_whatever_is_unsure_makes_no_run_fit():
    verdict = judge(holding(2 * MiB), GPU, ["no rule covers a"])
    assert (verdict.word, verdict.why) == ("cannot say", "cannot say whether it fits: no rule covers a")


def test_bytes_that_are_missing_are_those_of_the_smallest_card_that_would_do():
    with eb.trace("cuda", gpu=GPU) as run:
        first = [torch.empty(300 * MiB, dtype=torch.uint8) for _ in range(2)]
        first.clear()  # their segments are given back before the next one fails
        second = torch.empty(902 * MiB, dtype=torch.uint8)  # noqa: F841
    verdict = judge(run.timeline, GPU)
    assert verdict.replay.peak_reserved == 1502 * MiB
    assert (verdict.needs, verdict.left) == (902 * MiB, (-102 * MiB, -2 * MiB))


@pytest.mark.parametrize(("kept", "word"), [(30 * MiB, "cannot say"), (0, "fits")])
def test_a_run_that_goes_on_and_leaves_something_each_step_does_not_fit_for_long(kept, word):
    left = []
    with eb.trace("cuda", gpu=GPU) as run:
        for _ in run.steps(4):
            left.append(torch.empty(kept, dtype=torch.uint8))
            torch.empty(100 * MiB, dtype=torch.uint8)
    assert judge(run.timeline, GPU).word == "fits"
    verdict = judge(run.timeline, GPU, goes_on=True)
    assert verdict.word == word
    assert steps_until(800 * MiB - verdict.needs, run.timeline) == (
        (800 * MiB - verdict.needs) // kept if kept else None
    )


def test_doubts_are_told_by_kind():
    assert doubts((), ()) == []
    reasons = doubts({"b", "a"}, ["train.py:3"])
    assert reasons[0].startswith("no rule covers a, b:")
    assert reasons[1].startswith("at train.py:3 a value")
