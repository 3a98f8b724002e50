"""A TFT whose parts run in another way: inside a checkpoint, detached, streamed. The model's code stays as it is.

Each function changes a model in place and returns it. Parts are named as in `named_modules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everybyte.models.tft import TFT, VariableSelection

Change = Callable[[TFT], TFT]

STACKS: Final = ("static_encoder.stack", "historical_stack", "future_stack")
PLACES: Final = (*STACKS, "recurrence", "attention")
"""The three encoders, the layers behind them, and attention."""


def checkpointed(model: TFT, names: Iterable[str], **options: Any) -> TFT:
    """Each of these parts runs inside a checkpoint; `options` go to `torch.utils.checkpoint.checkpoint`."""
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, **options)
    return model


def detached(model: TFT, names: Iterable[str] = PLACES[:4]) -> TFT:
    """What these parts give out has no graph."""
    for name in names:
        model.get_submodule(name).register_forward_hook(_without_graph)
    return model


def normed_as_in_candle(model: TFT) -> TFT:
    """No LayerNorm's result has a graph, as from `apply_op3_no_bwd` (candle-nn/src/layer_norm.rs)."""
    return detached(model, [name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm)])


def streamed(model: TFT, keep: int = 0) -> TFT:
    """Each selection streams its variables, and keeps the outputs of the last `keep` of them."""
    for part in model.modules():
        if isinstance(part, VariableSelection):
            part.compute, part.keep = "streamed", keep
    return model


def in_turn(*changes: Change) -> Change:
    """The change that makes these, one after another."""

    def change(model: TFT) -> TFT:
        for each in changes:
            model = each(model)
        return model

    return change


def gradients(model: nn.Module) -> list[Tensor]:
    """Those that the parameters have, in the order of `parameters`."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def _without_graph(part: nn.Module, given: tuple[Any, ...], result: Tensor) -> Tensor:
    return result.detach()
