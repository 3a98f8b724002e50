"""Training steps recorded on a GPU, against the same steps traced without one.

One step of the model ran in single precision, one with 1,024 tokens a sequence under autocast, and one forward pass
without autograd.
"""

import math

import pytest
import torch

import everybyte as eb
from everybyte.models.lm import LM, AdamW, LMConfig, learn

BATCH = 4


def training(length, half):
    """Two training steps, traced: in the second the optimizer's state is there."""
    with eb.trace(rules="cuda") as run:
        model = LM(LMConfig(length))
        optimizer = AdamW(model.parameters())
        tokens, targets = (torch.empty(BATCH, length, dtype=torch.int64) for _ in range(2))
        for _ in run.steps(2):
            learn(model, optimizer, tokens, targets, half)
    return run


@pytest.fixture(scope="module")
def run():
    return training(128, half=False)


def allocated(run):
    """Bytes of whole blocks at the peak, with what lies beside the tensors."""
    return eb.Allocator().replay(run.timeline.with_workspaces()).peak_allocated


def second_step(run):
    frame = run.timeline.frame().query("step == 1")
    return frame["nbytes"].where(frame["action"] == "alloc", -frame["nbytes"]).tolist()


def rounded(size):
    return math.copysign(-(-abs(size) // 512) * 512, size)


def peak(events):
    live = highest = 0
    for size in events:
        live += rounded(size)
        highest = max(highest, live)
    return int(highest)


def test_the_traced_peak_above_the_start_is_the_recorded_one(run, recorded_events):
    recorded = recorded_events("lm-medium-ctx128-train-fp32")
    assert peak(recorded) == 1_918_013_952
    assert peak(second_step(run)) == peak(recorded)


def test_with_the_workspaces_the_allocator_s_peak_is_the_recorded_one_to_a_thousandth(run):
    assert allocated(run) == pytest.approx(7_026_606_592, rel=1e-3)


def test_each_allocation_and_each_release_is_there_in_its_place(run, recorded_events):
    recorded = recorded_events("lm-medium-ctx128-train-fp32")
    assert sum(size > 0 for size in recorded) == 6526
    assert second_step(run)[: len(recorded)] == recorded  # which ends before the gradients are dropped


def test_under_autocast_too(recorded_events):
    recorded, run = recorded_events("lm-medium-ctx1024-train-amp"), training(1024, half=True)
    traced = second_step(run)
    assert peak(recorded) == 19_111_273_472
    assert peak(traced) == peak(recorded)
    assert allocated(run) == pytest.approx(24_213_918_720, rel=1e-3)
    assert sum(size > 0 for size in recorded) == 7591
    assert traced[: len(recorded)] == recorded
    assert run.not_covered == set()


@pytest.mark.parametrize("half, nbytes", [(False, 4 + 4), (True, 4 + 2)])
def test_between_the_recorded_lengths_the_peak_grows_by_what_attention_keeps_for_each_pair_of_tokens(half, nbytes):
    # In each layer and head the exponentials, in single precision, and the weights in the type in which they are
    # multiplied; in each layer a mask of one byte. All else is as long as the sequence, or constant.
    short, middle, long = (peak(second_step(training(length, half))) for length in (256, 384, 512))
    assert long - 2 * middle + short == 2 * 128**2 * 24 * (BATCH * 16 * nbytes + 1)


def test_without_autograd_each_allocation_and_each_release_is_there_in_its_place(recorded_events):
    with eb.trace(rules="cuda") as run, torch.inference_mode():
        model = LM(LMConfig(128))
        tokens = torch.empty(BATCH, 128, dtype=torch.int64)
        for _ in run.steps(1):
            model(tokens)
    frame = run.timeline.frame().query("step == 0")
    traced = frame["nbytes"].where(frame["action"] == "alloc", -frame["nbytes"]).tolist()
    assert traced == recorded_events("lm-medium-ctx128-inference")
