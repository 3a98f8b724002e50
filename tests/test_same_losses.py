"""What claims to change memory alone changes nothing that is learned: same weights, same windows, same losses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everybyte import training
from everybyte.data import Batch
from everybyte.models.tft import TFT, TFTConfig

SMALL = TFTConfig(
    features=12, static_features=2, known_features=3, observed_features=7, history=6, horizon=3, hidden=8, heads=2,
    stack_layers=1, dropout=0.0,
)  # fmt: skip
STEPS, BATCH = 6, 7
TOLERANCE = 1e-9
"""Relative. In double precision another order of summation shows at 1e-15, and Adam's steps multiply it."""


def checkpointed(model: TFT, names: tuple[str, ...]) -> TFT:
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    return model


def losses(config: TFTConfig, **how: Any) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    shapes = [config.input_shapes(BATCH)[name] for name in Batch._fields]
    batches = [Batch(*(torch.randn(shape, generator=drawn) for shape in shapes)) for _ in range(STEPS)]
    return training.losses(config, batches, learning_rate=1e-2, **how)


def streamed(keep: int, dropout: float = 0.0) -> TFTConfig:
    return replace(SMALL, selection_compute="streamed", selection_keep=keep, dropout=dropout)


NETWORKS = tuple(f"historical_selection.variables.{i}" for i in range(SMALL.observed_features))
VARIANTS = {
    "grouped": (replace(SMALL, selection_compute="grouped"), {}),
    "streamed, no output stays": (streamed(0), {}),
    "streamed, some stay, dropout": (streamed(3, dropout=0.2), {}),
    "each variable checkpointed": (SMALL, {"change": partial(checkpointed, names=NETWORKS)}),
    "checkpointed, dropout": (
        replace(SMALL, dropout=0.2),
        {"change": partial(checkpointed, names=("attention", *NETWORKS))},
    ),
    "gradients of two parts": (SMALL, {"parts": 2}),
    "gradients of parts of 3, 3 and 1, streamed": (streamed(0), {"parts": 3}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_plain_model_s_loss_in_every_step(name):
    config, how = VARIANTS[name]
    plain = losses(replace(SMALL, dropout=config.dropout))
    assert plain.unique().numel() == STEPS  # it does learn
    torch.testing.assert_close(losses(config, **how), plain, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("config", [replace(SMALL, dropout=0.2), streamed(2, 0.2), VARIANTS["grouped"][0]])
def test_rerun_has_the_same_losses_to_the_last_bit(config):
    assert torch.equal(losses(config), losses(config))


def test_a_change_that_does_change_the_result_is_seen():
    def cut(model: TFT) -> TFT:
        model.historical_stack.register_forward_hook(lambda part, given, y: y.detach())
        return model

    plain, detached = losses(SMALL), losses(SMALL, change=cut)
    assert plain[0] == detached[0]
    assert ((plain - detached).abs() / plain)[1:].max() > 1e6 * TOLERANCE
