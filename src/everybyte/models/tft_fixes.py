"""The memory report's recommendations as ways to take a training step of the TFT: each differs by a few lines.

A way takes a model, its optimizer, a batch (the arguments of `TFT.forward` and the target) and a loss of both, and
takes one step. Afterwards the model is as it was, its parameters apart, so that ways can take turns on one model.

Two recommendations are no such way. Grouped variable selection has other parameters: it is `step` on a model with
`selection_compute="grouped"`. And INT8 does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from everybyte.models.tft import TFT, TemporalAttention, VariableSelection
from everybyte.models.tft_loops import AttentionCache
from everybyte.units import MB

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # static, past, future, target
Loss = Callable[[TFT, Any], Tensor]
Way = Callable[[TFT, torch.optim.Optimizer, Any, Loss], None]

NINE: Mapping[str, tuple[str, int | None]] = {
    "cached": ("1 cache off", 960 * MB),
    "not cleared": ("2 gradients cleared", 15_200 * MB),
    "streamed": ("3 streamed selection", 84_800_000),
    "attention in parts": ("4 attention in parts", None),
    "mixed precision": ("5 mixed precision", 585 * MB),
    "grouped": ("6 grouped selection", 74_800_000),
    "fused attention": ("7 fused attention", None),
    "accumulated": ("8 accumulation", None),
    "INT8": ("9 INT8", 9_150_000),
}
"""By way the recommendation, and the bytes that it is said to save, where it says so: 16.4 GB less 1.17, and so on."""


def step(model, adam, batch, loss, set_to_none=True):
    loss(model, batch).backward()
    adam.step()
    adam.zero_grad(set_to_none)


def cached(model, adam, batch, loss, cache):
    """Recommendation 1 undone: attention's output goes into a cache."""
    hook = model.attention.register_forward_hook(cache.store)
    step(model, adam, batch, loss)
    hook.remove()


def uncleared(model, adam, batch, loss):
    """Recommendation 2 undone."""
    loss(model, batch).backward()
    adam.step()


def sketch(model, adam, batch, loss, recorded=True):
    """Recommendation 3, as the report sketches it."""
    layer = model.historical_selection
    with patch.object(layer, "forward", partial(select_as_sketched, layer, recorded=recorded)):
        step(model, adam, batch, loss)


def streamed(model, adam, batch, loss, keep=0):
    """Recommendation 3, as `tft_selection` does it; of the historical selection alone, as the report asks."""
    with patch.multiple(model.historical_selection, compute="streamed", keep=keep):
        step(model, adam, batch, loss)


def in_parts(model, adam, batch, loss, count=4):
    """Recommendation 4: attention for a part of the batch at a time."""
    layer = model.attention
    run = partial(attend_in_parts, layer.forward, count=count)
    with patch.object(layer, "forward", run):
        step(model, adam, batch, loss)


def mixed(model, adam, batch, loss):
    """Recommendation 5: fp16 with loss scaling on a GPU, bf16 on a CPU."""
    kind = batch[-1].device.type
    scaler = torch.amp.GradScaler(kind, enabled=kind == "cuda")
    with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
        value = loss(model, batch)
    scaler.scale(value).backward()
    scaler.step(adam)
    scaler.update()
    adam.zero_grad()


def fused(model, adam, batch, loss):
    """Recommendation 7: a kernel that never has the scores."""
    fuse_heads(model.attention, True)
    step(model, adam, batch, loss)
    fuse_heads(model.attention, False)


def accumulated(model, adam, batch, loss, count=2):
    """Recommendation 8: a backward pass for each microbatch."""
    for value in losses_of_parts(model, batch, loss, count):
        value.backward()
    adam.step()
    adam.zero_grad()


def summed(model, adam, batch, loss, count=2):
    """Recommendation 8 done wrong: one backward pass for the sum, so all graphs are there."""
    sum(losses_of_parts(model, batch, loss, count)).backward()
    adam.step()
    adam.zero_grad()


def select_as_sketched(
    selection: VariableSelection, variables: list[Tensor], context: Tensor | None, recorded: bool
) -> Tensor:
    """The report's sketch of a streaming selection: outputs go into slices of one buffer, n [b, t, w] -> [b, t, h].

    It puts the variables on the last axis; here they lie side by side as the selection reads them: the same bytes.

    Args:
        selection: Whose networks and weights these are.
        variables: One a network.
        context: [b, 1, h], or None.
        recorded: Whether autograd sees the writes, as PyTorch's does and candle's does not.
    """
    n = len(variables)
    stacked = variables[0].new_zeros(*variables[0].shape[:-1], n, selection.weights.in_features // n)
    for i, x in enumerate(variables):
        output = selection.variables[i](x, context)
        with torch.set_grad_enabled(recorded):
            stacked[..., i, :].copy_(output)
    shares = selection.weights(stacked.flatten(-2)).softmax(-1)
    return (shares.unsqueeze(-2) @ stacked).squeeze(-2)


def attend_in_parts(attend: Callable[[Tensor], Tensor], x: Tensor, count: int = 4) -> Tensor:
    """Attention for so many parts of a batch, one after another: [b, t, h] -> [b, t, h]."""
    return torch.cat([attend(part) for part in x.chunk(count)])


def fuse_heads(attention: TemporalAttention, fused: bool) -> None:
    """Switches each head to PyTorch's fused kernel, or back."""
    for head in attention.heads:
        head.fused = fused


def losses_of_parts(model: nn.Module, batch: Batch, loss: Loss, count: int) -> Iterator[Tensor]:
    """The losses of so many microbatches, each times its share: they sum to the batch's."""
    size = len(batch[-1])
    for part in zip(*(x.chunk(count) for x in batch), strict=True):
        yield loss(model, part) * (len(part[-1]) / size)


def ways(cache: AttentionCache, microbatches: int = 2) -> dict[str, Way]:
    """All ways by name, in an order for one run after another.

    The first makes the optimizer's state and leaves its gradients, as zeros, to the second.

    Args:
        cache: Where `cached` puts attention's outputs.
        microbatches: Parts of a batch where gradients are accumulated.
    """
    return {
        "(first)": partial(step, set_to_none=False),
        "gradients zeroed": step,
        "as it stands": step,
        "sketch": sketch,
        "sketch, unrecorded": partial(sketch, recorded=False),
        "streamed": streamed,
        "attention in parts": in_parts,
        "mixed precision": mixed,
        "fused attention": fused,
        "accumulated": partial(accumulated, count=microbatches),
        "losses summed": partial(summed, count=microbatches),
        "cached": partial(cached, cache=cache),
    }
