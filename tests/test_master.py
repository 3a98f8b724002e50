"""Master weights: 16 bytes a parameter to the byte, and the same updates as AdamW in single precision."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
import torch
from torch import nn

import everybyte as eb
from everybyte.models.gpt import GPT, GPTConfig
from everybyte.models.master import MasterWeights
from everybyte.run import Run

SMALL = GPTConfig(vocabulary=96, context=16, layers=2, hidden=48, heads=4)
READ = torch.arange(32).view(2, 16)


def a_step(run: Run, foreach: bool | None, zero_grad: bool = False) -> tuple[eb.Timeline, GPT, MasterWeights]:
    torch.manual_seed(0)
    with run:
        model = GPT(SMALL)
        optimizer = MasterWeights(model.parameters(), foreach=foreach)
        for _ in run.steps(1):
            read = run.to_device(READ)
            model(read, read).backward()
            optimizer.step()
            if zero_grad:
                optimizer.zero_grad()
    return run.timeline.without("scratch"), model, optimizer


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("foreach", [False, None])
def test_after_a_step_16_bytes_a_parameter_are_live_and_14_without_gradients(foreach, zero_grad):
    timeline, model, _ = a_step(eb.measure(device="cpu"), foreach, zero_grad)
    sizes = [parameter.numel() for parameter in model.parameters()]
    live = (14 if zero_grad else 16) * sum(sizes) + 4 * len(sizes) + READ.nbytes
    assert timeline.live_bytes[-1] == live


@pytest.mark.parametrize("foreach", [False, True])
def test_a_traced_step_allocates_what_a_measured_one_does(foreach):
    traced, *_ = a_step(eb.trace(rules="cpu"), foreach)
    measured, *_ = a_step(eb.measure(device="cpu"), foreach)
    assert traced.peak_bytes == measured.peak_bytes
    pd.testing.assert_series_equal(traced.allocations(1), measured.allocations(1))


def test_copies_and_moments_are_optimizer_state():
    timeline, model, _ = a_step(eb.trace(rules="cpu"), False)
    frame = timeline.frame()
    made = frame[(frame["action"] == "alloc") & ~frame["storage"].isin(frame[frame["action"] == "free"]["storage"])]
    live = made.groupby("category", observed=True)["nbytes"].sum()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert live["parameter"] == live["gradient"] == 2 * sum(sizes)
    assert live["optimizer state"] == 12 * sum(sizes) + 4 * len(sizes)


def test_one_tensor_at_a_time_needs_no_second_set_of_gradients():
    peaks = {}
    for foreach in (False, True):
        timeline, model, _ = a_step(eb.measure(device="cpu"), foreach)
        peaks[foreach] = timeline.peak_bytes - 16 * sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert peaks[True] > 4 * sum(parameter.numel() for parameter in model.parameters())
    assert peaks[False] < 6 * 4 * largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [False, True])
def test_the_copies_take_the_steps_of_adamw_in_single_precision(foreach, dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype)
    single = copy.deepcopy(model).float()
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = MasterWeights(model.parameters(), foreach=foreach, **settings)
    adamw = torch.optim.AdamW(single.parameters(), foreach=foreach, **settings)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=dtype)).square().sum().backward()
        for own, other in zip(model.parameters(), single.parameters(), strict=True):
            other.grad = own.grad.float()
        optimizer.step()
        adamw.step()
    for own, other in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["master"], other)
        assert torch.equal(own, other.to(dtype))


def test_small_updates_add_up_where_half_precision_alone_loses_them():
    kept, lost = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2))
    settings = {"lr": 1e-3, "weight_decay": 0.0}  # half the distance of 1 to the next smaller number is 2^-9 = 0.00195
    for parameter, kind in ((kept, MasterWeights), (lost, torch.optim.AdamW)):
        optimizer = kind([parameter], **settings)
        for _ in range(50):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert lost == 1
    assert kept == torch.tensor(0.95, dtype=torch.bfloat16)


def test_a_parameter_without_a_gradient_stays():
    still, moved = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeights([still, moved], lr=0.1)
    optimizer.step()
    moved.grad = torch.ones_like(moved)
    optimizer.step()
    assert (still == 1).all() and (moved < 1).all()
    assert still not in optimizer.state


def test_single_precision_is_refused():
    with pytest.raises(ValueError, match=r"a parameter of torch.float32 needs no copy in float32: give it to torch\."):
        MasterWeights(nn.Linear(2, 2).parameters())
