"""How candle keeps memory for a gradient: every operand of every recorded operation, until the loss is dropped.

A tensor owns the operation that made it and through it clones of that operation's arguments (`candle-core/src/op.rs`,
`Op`); an operation is recorded if any argument is tracked (`BackpropOp::new1`). What a gradient formula does not need
is held as well, and what PyTorch does in one kernel is several operations here, each with its operands. Views share the
storage; making contiguous, `cat` and `stack` copy. `detach()` lets go, and a backward pass does not.

Not followed: candle has no mode without gradients, so what runs under `torch.no_grad()` is recorded there; its stock
`LayerNorm` and `softmax_last_dim` are kernels without a backward, which record nothing and cut the graph. Those that
can be differentiated are taken here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .base import Function, Rules, stating

FUNCTIONS: Final[dict[Any, Function]] = {}
"""Function of torch's Python face -> a function of the same arguments that is composed as in candle."""


@stating(FUNCTIONS, F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """A product and a sum: the product is an operand of the sum (`candle-nn/src/linear.rs`)."""
    product = input.matmul(weight.t())
    return product if bias is None else product + bias


@stating(FUNCTIONS, torch.layer_norm)
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Any:
    """Five tensors of the input's size and six of its rows are operands (`candle-nn/src/ops.rs`, `layer_norm_slow`)."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.to(torch.float32) if input.dtype in (torch.float16, torch.bfloat16) else input
    centred = x - mean(x, dims, keepdim=True)
    normed = centred / (mean(centred.square(), dims, keepdim=True) + eps).sqrt()
    scaled = normed.to(input.dtype) if weight is None else normed.to(input.dtype) * weight
    return scaled if bias is None else scaled + bias


@stating(FUNCTIONS, torch.softmax, torch.Tensor.softmax)
def softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    """The maximum, the difference, its power and their sum are operands (`candle-nn/src/ops.rs`, `softmax`)."""
    x = input if dtype is None else input.to(dtype)
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


@stating(FUNCTIONS, torch.log_softmax, torch.Tensor.log_softmax)
def log_softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    """Composed (`candle-nn/src/ops.rs`, `log_softmax`)."""
    x = input if dtype is None else input.to(dtype)
    difference = x - x.amax(dim, keepdim=True)
    return difference - difference.exp().sum(dim, keepdim=True).log()


@stating(FUNCTIONS, torch.mean, torch.Tensor.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """A sum, which is an operand of a multiplication by a number (`candle-core/src/tensor.rs`, `mean_all`, `mean`)."""
    total = input.sum(dtype=dtype) if dim is None else input.sum(dim, keepdim, dtype=dtype)
    return total / (input.numel() // max(total.numel(), 1))


@stating(FUNCTIONS, torch.dropout)
def dropout(input: Any, p: float, train: bool) -> Any:
    """A product with a mask in the input's dtype, which is an operand (`candle-nn/src/ops.rs`, `dropout`)."""
    if not (train and 0 < p < 1):
        return torch.dropout(input, p, train)
    return input * (torch.rand_like(input, dtype=torch.float32).ge(p).to(input.dtype) * (1 / (1 - p)))


_COMPOSED_OTHERWISE: Final = {
    function: f"{name} (one operation here, composed of several in candle)"
    for function, name in (
        *((getattr(torch, name), name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "batch_norm", "group_norm")),
        *((getattr(torch, name), name) for name in ("conv1d", "conv2d", "conv3d", "rms_norm", "instance_norm")),
        *((getattr(torch._C._nn, name), name) for name in ("cross_entropy_loss", "scaled_dot_product_attention")),
    )
}


def retaining(rules: Rules) -> Rules:
    """The rules of a device with candle's retention in the place of PyTorch's."""
    not_covered = {**rules.not_covered, **_COMPOSED_OTHERWISE}
    return replace(rules, functions={**rules.functions, **FUNCTIONS}, not_covered=not_covered, keeps_operands=True)


class AsCandle(TorchFunctionMode):
    """Keeps memory as candle does in a run that is really executed, where no rules act.

    Functions are composed as in candle, and each node of PyTorch's graph holds all operands of its operation.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS or func is F.layer_norm:  # which is written in Python, and comes in one piece
            with self:
                return FUNCTIONS.get(func, layer_norm)(*args, **kwargs)
        result = func(*args, **kwargs)
        if (node := getattr(result, "grad_fn", None)) is not None:
            node.metadata.setdefault("operands", []).append(args)
        return result
