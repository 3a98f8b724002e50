"""TFT-225 at full width: two Adam steps, traced and measured, must be one and the same stream of allocations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

import everybyte as eb
from everybyte.data import tft_windows
from everybyte.models.tft import TFT, TFTConfig, VariableSelection, quantile_loss
from everybyte.run import Run
from everybyte.training import train_step

BARS = Path(__file__).parent.parent / "notebooks" / "data" / "sp500_small_features.parquet"
CASES = {
    "default, batch 8": (TFTConfig(), 8),
    "default, batch 4": (TFTConfig(), 4),
    "published, batch 4": (TFTConfig.published(), 4),
}


@dataclass(frozen=True)
class Pair:
    """One training, traced and measured."""

    traced: eb.Timeline
    measured: eb.Timeline


def two_steps(run: Run, config: TFTConfig, batch_size: int) -> eb.Timeline:
    """Two training steps on the book's own bars; `run` says whether anything is computed."""
    batches = tft_windows(BARS, config).train.batches(batch_size)
    with run:
        model = TFT(config)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)  # 1e-3 makes denormal, slow numbers
        for _ in run.steps(2):
            train_step(model, optimizer, run.to_device(next(batches)))
    return run.timeline


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    case = CASES[request.param]
    return Pair(two_steps(eb.trace(rules="cpu"), *case), two_steps(eb.measure(device="cpu"), *case))


def test_traced_peak_is_the_measured_peak_to_the_byte(pair: Pair) -> None:
    traced, measured = pair.traced.without("scratch"), pair.measured.without("scratch")
    assert traced.start_bytes == measured.start_bytes
    assert traced.peak_above_start == measured.peak_above_start


def test_traced_and_measured_runs_allocate_the_same_sizes_equally_often(pair: Pair) -> None:
    traced, measured = (t.without("scratch").allocations(1024) for t in (pair.traced, pair.measured))
    pd.testing.assert_series_equal(traced, measured)


# Others measured two Adam steps of a replica of their own, without dropout, on a CPU; these are their numbers. It has
# the parameters of our default, keeps the variables' outputs twice (side by side for the selection layer, stacked for
# the sum), gives the context to the stacks alone, and brings one batch to the device before the first step.
MEASURED_ELSEWHERE = {8: 1_357_143_968, 4: 927_797_432}


def mix_two_copies(self: VariableSelection, variables: list[Tensor], context: Tensor | None = None) -> Tensor:
    outputs = [network(x) for network, x in zip(self.variables, variables, strict=True)]
    weights = self.weights(torch.cat(outputs, dim=-1)).softmax(-1)
    return (torch.stack(outputs, dim=-2) * weights.unsqueeze(-1)).sum(-2)


def select_then_encode(self: TFT, static: Tensor, past: Tensor, future: Tensor) -> Tensor:
    static = self.static_selection(self.static_variables(static))
    past = self.historical_selection(self.observed_variables(past))
    future = self.future_selection(self.known_variables(future))
    context = self.static_encoder(static).selection
    past, future = self.historical_stack(past, context), self.future_stack(future, context)
    return self.head(self.attention(self.position(self.recurrence(past, future, context, context))))


@pytest.mark.parametrize("batch_size", MEASURED_ELSEWHERE)
def test_trace_gives_the_peak_that_others_measured_on_their_replica(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VariableSelection, "forward", mix_two_copies)
    monkeypatch.setattr(TFT, "forward", select_then_encode)
    config = replace(TFTConfig(), dropout=0.0)
    with eb.trace(rules="cpu") as run:
        model = TFT(config)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        batch = run.to_device(next(tft_windows(BARS, config).train.batches(batch_size)))
        for _ in run.steps(2):
            loss = quantile_loss(model(batch.static, batch.past, batch.future), batch.target, model.quantiles)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum(parameter.numel() for parameter in model.parameters()) == 74_203_195
    assert run.timeline.without("scratch").peak_above_start == MEASURED_ELSEWHERE[batch_size]
