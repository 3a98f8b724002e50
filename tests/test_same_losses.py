"""What claims to change memory alone changes nothing that is learnt: same weights, same windows, same losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everybyte.data import Batch
from everybyte.models.tft import TFT, TFTConfig, quantile_loss
from everybyte.models.tft_selection import grouped_state
from everybyte.training import one_thread

SMALL = TFTConfig(
    features=12, static_features=2, known_features=3, observed_features=7, history=6, horizon=3, hidden=8, heads=2,
    stack_layers=1, dropout=0.0,
)  # fmt: skip
STEPS, BATCH = 6, 6
TOLERANCE = 1e-9
"""Relative. In double precision another order of summation shows at 1e-15, and Adam's steps multiply it."""


@pytest.fixture(autouse=True, scope="module")
def single() -> Iterator[None]:
    with one_thread():
        yield


def checkpointed(model: TFT, names: tuple[str, ...]) -> TFT:
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    return model


def losses(config: TFTConfig, change: Callable[[TFT], TFT] = lambda model: model, parts: int = 1) -> Tensor:
    """Of each step; a batch is worked off in so many parts, whose gradients add up."""
    torch.manual_seed(0)
    state = TFT(replace(config, selection_compute="loop")).double().state_dict()
    model = TFT(config).double()
    model.load_state_dict(grouped_state(state) if config.selection_compute == "grouped" else state)
    model = change(model)
    adam, found = torch.optim.Adam(model.parameters(), 1e-2), []
    shapes = [config.input_shapes(BATCH)[name] for name in Batch._fields]
    torch.manual_seed(1)
    for _ in range(STEPS):
        batch, total = [torch.randn(shape, dtype=torch.double) for shape in shapes], 0.0
        for static, past, future, target in zip(*(x.chunk(parts) for x in batch), strict=True):
            loss = quantile_loss(model(static, past, future), target, model.quantiles) / parts
            loss.backward()
            total += loss.detach()
        adam.step()
        adam.zero_grad()
        found.append(total)
    return torch.stack(found)


def streamed(keep: int, dropout: float = 0.0) -> TFTConfig:
    return replace(SMALL, selection_compute="streamed", selection_keep=keep, dropout=dropout)


NETWORKS = tuple(f"historical_selection.variables.{i}" for i in range(SMALL.observed_features))
VARIANTS = {
    "grouped": (replace(SMALL, selection_compute="grouped"),),
    "streamed, no output stays": (streamed(0),),
    "streamed, some stay, dropout": (streamed(3, dropout=0.2),),
    "each variable checkpointed": (SMALL, partial(checkpointed, names=NETWORKS)),
    "checkpointed, dropout": (replace(SMALL, dropout=0.2), partial(checkpointed, names=("attention", *NETWORKS))),
    "gradients of two parts": (SMALL, lambda model: model, 2),
    "gradients of three parts, streamed": (streamed(0), lambda model: model, 3),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_plain_model_s_loss_in_every_step(name):
    config, *how = VARIANTS[name]
    plain = losses(replace(SMALL, dropout=config.dropout))
    assert plain.unique().numel() == STEPS  # it does learn
    torch.testing.assert_close(losses(config, *how), plain, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("config", [replace(SMALL, dropout=0.2), streamed(2, 0.2), VARIANTS["grouped"][0]])
def test_rerun_has_the_same_losses_to_the_last_bit(config):
    assert torch.equal(losses(config), losses(config))


def test_a_change_that_does_change_the_result_is_seen():
    def cut(model: TFT) -> TFT:
        model.historical_stack.register_forward_hook(lambda part, given, y: y.detach())
        return model

    plain, detached = losses(SMALL), losses(SMALL, cut)
    assert plain[0] == detached[0]
    assert ((plain - detached).abs() / plain)[1:].max() > 1e6 * TOLERANCE
