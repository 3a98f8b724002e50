"""How the variable selection is computed where it is not computed one variable after the other: grouped, or streamed.

All three ways compute the same function of the same numbers (arXiv 1912.09363, equations 6-8), with out_i the output
of the network of variable i:

    weights = softmax(sum over i of out_i W_i + bias)        y = sum over i of weights_i out_i

*Grouped* lays the parameters of the n networks on top of each other and computes all outputs in one batched product.
*Streamed* never holds all outputs. It computes them anew, one variable at a time, whenever they are needed.

Shapes: b batch, t steps, n variables, h hidden; w is whatever width arrives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class StackedLinear(nn.Module):
    """``copies`` independent linear layers in one product: [copies, ..., w] -> [copies, ..., width]."""

    def __init__(self, copies: int, width_in: int, width: int, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width_in)
        self.weight = nn.Parameter(torch.empty(copies, width_in, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(copies, width).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1, -2)  # (n, b*t, w)
        y = flat @ self.weight if self.bias is None else torch.baddbmm(self.bias[:, None], flat, self.weight)
        return y.unflatten(1, x.shape[1:-1])


class StackedLayerNorm(nn.Module):
    """``copies`` independent layer normalisations: one set of statistics a vector, one weight and bias a copy."""

    def __init__(self, copies: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(copies, width))
        self.bias = nn.Parameter(torch.zeros(copies, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = F.layer_norm(x, x.shape[-1:]).flatten(1, -2)  # (n, b*t, w)
        return torch.addcmul(self.bias[:, None], flat, self.weight[:, None]).view_as(x)


def grouped_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A looping or streaming model's ``state_dict`` for the grouped model, which has the same numbers in fewer tensors.

    The copy of the networks' parameters is made here, once. To stack the loop's own parameters in each forward pass
    would cost it in each step: as many bytes as the networks have, kept until backward, and again for its gradient.
    """
    grouped: dict[str, Tensor] = {}
    columns: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        if found := re.fullmatch(r"((?:.+\.)?variables)\.\d+\.(.+)", name):
            columns.setdefault(".".join(found.groups()), []).append(value)
        else:
            grouped[name] = value
    for name, values in columns.items():
        stacked = torch.stack(values)  # a matrix of nn.Linear is [width, w]
        grouped[name] = stacked.transpose(1, 2).contiguous() if stacked.dim() == 3 else stacked
    return grouped


def loop_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The grouped model's ``state_dict`` for a looping or streaming model: views of it, so no byte is copied."""
    single: dict[str, Tensor] = {}
    for name, value in state.items():
        if found := re.fullmatch(r"((?:.+\.)?variables)\.(\D.*)", name):
            for i, part in enumerate(value):
                single[f"{found[1]}.{i}.{found[2]}"] = part.T if part.dim() == 2 else part
        else:
            single[name] = value
    return single


def streamed_selection(
    networks: nn.ModuleList, weights: nn.Linear, variables: list[Tensor], context: Tensor | None, keep: int
) -> Tensor:
    """Selects without ever holding more than ``keep`` outputs: n tensors [b, t, w] -> [b, t, h].

    The output needs each out_i twice, for the weights and for the sum. So does the gradient: with g that of y, all of
    g . out_i must be there before that of any one logit is known, and only then does a network get its own. So each
    network runs forward four times in a step, where the loop runs it once; one whose output stays, twice. Dropout draws
    the same numbers each time.

    The parameters' gradients go to their ``.grad`` network by network, as in the loop, and not through the graph.

    Args:
        networks: one a variable; each takes its variable and the context.
        weights: nn.Linear(n * h, n), what reads the outputs side by side.
        variables: one a network.
        context: [b, 1, h], or None.
        keep: outputs that stay from forward to backward, from 0, the least memory, to n, the least time.

    Raises:
        RuntimeError: in backward, if it is `torch.autograd.grad`, or `backward` with ``inputs``.
    """
    anchor = torch.empty(0, requires_grad=True)  # the graph comes here even if the networks alone learn
    return StreamedSelection.apply(networks, keep, anchor, context, weights.weight, weights.bias, *variables)


class StreamedSelection(torch.autograd.Function):
    """What `streamed_selection` puts into the graph: one node, whatever the number of variables."""

    @staticmethod
    def forward(
        ctx: Any, networks: nn.ModuleList, keep: int, anchor: Tensor, context: Tensor | None, weight: Tensor,
        bias: Tensor | None, *variables: Tensor,
    ) -> Tensor:  # fmt: skip
        n, autocast = len(networks), _autocast(weight)
        start = _random_state(weight) if _draws(networks) else None
        kept: list[Tensor] = []
        logits = weight.new_zeros(n) if bias is None else bias
        for i, block in enumerate(weight.chunk(n, dim=1)):  # (n, h)
            with autocast:
                out = networks[i](variables[i], context)  # (b, t, h)
            logits = logits + F.linear(out, block)  # (b, t, n)
            if i >= n - keep:
                kept.append(out)
        shares = logits.softmax(-1)  # (b, t, n)
        y = torch.zeros_like(out, dtype=shares.dtype)  # (b, t, h), a sum in single precision under autocast too
        with _drawing_from(start, weight):
            outputs = _outputs(networks, variables, context, kept, autocast)
            for out, share in zip(outputs, shares.split(1, -1), strict=True):
                y.addcmul_(out, share)
        ctx.networks, ctx.autocast = networks, autocast
        ctx.save_for_backward(context, weight, shares, start, *variables, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a streamed selection fills .grad: call backward() without inputs, not autograd.grad()")
        networks, n = ctx.networks, len(ctx.networks)
        context, weight, shares, start, *rest = ctx.saved_tensors
        variables, kept = rest[:n], rest[n:]
        with _drawing_from(start, weight):
            outputs = _outputs(networks, variables, context, kept, ctx.autocast)
            d_shares = torch.stack([(out * g).sum(-1) for out in outputs], dim=-1)  # (b, t, n)
        d_logits = shares * (d_shares - (shares * d_shares).sum(-1, keepdim=True))
        rows = d_logits.flatten(0, -2)  # (b*t, n)
        d_weight = torch.empty_like(weight)

        _, _, _, needs_context, _, needs_bias, *needs = ctx.needs_input_grad
        context = None if context is None else context.detach().requires_grad_(needs_context)
        inputs = [x.detach().requires_grad_(need) for x, need in zip(variables, needs, strict=True)]
        with _drawing_from(start, weight):
            parts = zip(shares.split(1, -1), weight.chunk(n, dim=1), d_weight.chunk(n, dim=1), strict=True)
            for i, (share, block, d_block) in enumerate(parts):
                with torch.enable_grad(), ctx.autocast:
                    out = networks[i](inputs[i], context)
                d_block.copy_(rows.T @ out.detach().flatten(0, -2).to(rows.dtype))
                if out.requires_grad:
                    torch.autograd.backward(out, (d_logits @ block).addcmul_(g, share))
        d_context = None if context is None else context.grad
        d_bias = rows.sum(0) if needs_bias else None
        return None, None, None, d_context, d_weight, d_bias, *(x.grad for x in inputs)


def _outputs(
    networks: nn.ModuleList, variables: Sequence[Tensor], context: Tensor | None, kept: Sequence[Tensor],
    autocast: AbstractContextManager,
) -> Iterator[Tensor]:  # fmt: skip
    """All outputs in order: computed anew, up to the last ones, which are there."""
    for i in range(len(networks) - len(kept)):
        with autocast:
            out = networks[i](variables[i], context)
        yield out
    yield from kept


def _autocast(x: Tensor) -> AbstractContextManager:
    """Autocast as it is now, to be entered later; without its cache, for a network casts each weight only once."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)


def _draws(networks: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.training and module.p for module in networks.modules())


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


def _set_random_state(state: Tensor, x: Tensor) -> None:
    torch.cuda.set_rng_state(state, x.device) if x.is_cuda else torch.set_rng_state(state)


@contextmanager
def _drawing_from(state: Tensor | None, x: Tensor) -> Iterator[None]:
    """Inside, the generator of a tensor's device draws what it drew from this state on; afterwards it is as before."""
    if state is None:
        yield
        return
    now = _random_state(x)
    _set_random_state(state, x)
    try:
        yield
    finally:
        _set_random_state(now, x)
