"""Recurrent layers on CUDA: one call of cuDNN for all steps, layers and directions.

`ATen/native/cudnn/RNN.cpp`, `_cudnn_impl`, `_cudnn_rnn` and `_cudnn_rnn_backward`, of PyTorch 2.13. What the call keeps
for its backward pass, the *reserve space*, is cuDNN's affair and no formula of it is public. It is estimated, and the
trace says so: as what oneDNN keeps in its own, the gates after their activation and the states of each step. Less than
the gates and the cell no backward pass can do with; more than the gates before and after activation none needs.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch

from ..units import format_bytes
from .base import Function, stating

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
FUNCTIONS: Final[dict[Any, Function]] = {}
SCRATCH: Final[dict[Any, Function]] = {}
REMARKS: Final[dict[Any, Function]] = {}
NOT_COVERED: Final[dict[Any, str]] = {}
LEFT_OUT: Final = {aten._cudnn_rnn.default: "workspace of cuDNN's recurrent layers, and the state of their dropout"}


class _Kept(NamedTuple):
    """Numbers in the reserve space for each step of a sequence, layer, direction and hidden unit."""

    name: str
    least: int
    likely: int
    most: int


_KEPT: Final = (  # by cuDNN's number of the mode (`ATen/native/cudnn/RNNUtils.h`)
    _Kept("RNN", 1, 1, 2),
    _Kept("RNN", 1, 1, 2),
    _Kept("LSTM", 5, 6, 10),  # four gates and the cell; the hidden state; the gates once more
    _Kept("GRU", 4, 5, 8),  # three gates and the candidate's own product; the hidden state; these four once more
)


@stating(KERNELS, aten._cudnn_rnn.default)
def cudnn_rnn(
    input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projection: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Any, state: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Output [s, b, directions x h], states, and the reserve space. The weights lie in one buffer already."""
    directions = 2 if bidirectional else 1
    swapped = batch_first and not sizes
    *steps, _ = input.transpose(0, 1).shape if swapped else input.shape
    output = input.new_empty((*steps, directions * (projection or hidden)))
    cy = hx.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    numbers = _KEPT[mode].likely * math.prod(steps) * layers * directions * hidden if train else 0
    reserve = input.new_empty(numbers * input.element_size(), dtype=torch.uint8)
    return output.transpose(0, 1) if swapped else output, hx.new_empty(hx.shape), cy, reserve, input.new_empty(0)


@stating(SCRATCH, aten._cudnn_rnn.default)
def cudnn_rnn_scratch(input: Any, *rest: Any) -> list[int]:
    """The kernel reads [s, b, ...] without gaps."""
    return _copy(input, batch_first=rest[9] and not rest[13])


@stating(KERNELS, aten._cudnn_rnn_backward.default)
def cudnn_rnn_backward(
    input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, output: Any, *rest: Any
) -> tuple[Any, ...]:
    """Gradients of input and states, and those of all weights in one buffer of which each is a part."""
    batch_first, sizes = rest[7], rest[11]
    swapped = batch_first and not sizes
    d_input = input.new_empty(input.transpose(0, 1).shape if swapped else input.shape)
    states = [state if state is None else state.new_empty(state.shape) for state in (hx, cx)]
    parts = input.new_empty(sum(w.numel() for w in weight)).split([w.numel() for w in weight])
    d_weight = [part.view(w.shape) for part, w in zip(parts, weight, strict=True)]
    return d_input.transpose(0, 1) if swapped else d_input, *states, d_weight


@stating(SCRATCH, aten._cudnn_rnn_backward.default)
def cudnn_rnn_backward_scratch(
    input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, output: Any, *rest: Any
) -> list[int]:
    """Copies without gaps, and zeros for the gradients that do not arrive."""
    given = zip((output, hx, cx), rest[:3], strict=True)
    zeros = [like.numel() * like.element_size() for like, gradient in given if gradient is None and like is not None]
    batch_first = rest[7] and not rest[11]
    arrived = _copy(rest[0], batch_first) if rest[0] is not None else []
    return [*zeros, *_copy(input, batch_first), *arrived]


def _copy(tensor: Any, batch_first: bool) -> list[int]:
    read = tensor.transpose(0, 1) if batch_first else tensor
    return [] if read.is_contiguous() else [tensor.numel() * tensor.element_size()]


def _arguments(mode: int, input: Any, *rest: Any) -> tuple[Any, ...]:
    """Those of `_cudnn_rnn` from those of `torch.lstm` and its like, of a packed sequence or not."""
    packed = isinstance(rest[0 if mode == 2 else 1], torch.Tensor)
    sizes = rest[0].tolist() if packed else []
    states, weights, has_biases, layers, dropout, train, bidirectional, *batch_first = rest[packed:]
    hx, cx = states if mode == 2 else (states, None)
    hidden = hx.shape[-1] if cx is None else cx.shape[-1]
    projection = 0 if hidden == hx.shape[-1] else hx.shape[-1]
    count = (4 if has_biases else 2) + (projection > 0)
    return (
        *(input, weights, count, None, hx, cx, mode, hidden, projection, layers, bool(batch_first and batch_first[0])),
        *(dropout, train, bidirectional, sizes, None),
    )


def _by_cudnn(function: Function, mode: int) -> None:
    kept = _KEPT[mode]

    def run(input: Any, *rest: Any) -> Any:
        """cuDNN's, unless that is switched off (`ATen/native/RNN.cpp`, `use_cudnn`)."""
        if not torch.backends.cudnn.enabled or input.numel() == 0:
            return function(input, *rest)
        output, hy, cy, *_ = torch._cudnn_rnn(*_arguments(mode, input, *rest))
        return (output, hy, cy) if mode == 2 else (output, hy)

    def remark(input: Any, *rest: Any) -> str | None:
        _, _, _, _, hx, _, _, hidden, _, _, _, _, train, *_ = _arguments(mode, input, *rest)
        halved = torch.is_autocast_enabled("cuda") and input.dtype != torch.float64
        each = math.prod(input.shape[:-1]) * hx.shape[0] * hidden * (2 if halved else input.element_size())
        least, likely, most = (format_bytes(n * each) for n in kept[1:])
        return f"cuDNN's {kept.name} keeps about {likely} for backward, between {least} and {most}" if train else None

    FUNCTIONS[function], REMARKS[function] = run, remark
    NOT_COVERED[function] = (
        f"cuDNN's {kept.name}: its reserve space is an estimate, {kept.likely} numbers for each step, sequence, layer, "
        f"direction and hidden unit, at least {kept.least} and at most {kept.most}"
    )


for _mode, _function in enumerate((torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)):
    _by_cudnn(_function, _mode)
