"""How CPU kernels lay out pictures, [n, c, h, w], where the meta device does otherwise: channels last or not."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from .base import Function, stating

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
"""As in `cpu`."""

FUNCTIONS: Final[dict[Any, Function]] = {}
"""As in `cpu`."""


@stating(KERNELS, aten.convolution.default)
def convolution(input: Any, weight: Any, *rest: Any) -> Any:
    """Channels last if input or weight is (`ATen/native/Convolution.cpp`, `determine_backend_memory_format`)."""
    out = aten.convolution.default(input, weight, *rest)
    formats = {suggest_memory_format(tensor) for tensor in (input, weight)} - {torch.contiguous_format}
    return out.to(memory_format=formats.pop()) if formats else out


@stating(KERNELS, aten.im2col.default, aten.col2im.default)
def unfolded(input: Any, *rest: Any) -> Any:
    """In a storage that was made for the input (`ATen/native/Im2Col.cpp`, `Col2Im.cpp`, and those for CUDA)."""
    out = (aten.im2col if len(rest) == 4 else aten.col2im).default(input, *rest)
    return input.new_empty(input.shape).resize_(out.shape)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input: Any, weight: Any, bias: Any, groups: int, eps: float) -> Any:
        context.sizes = (*input.shape[:2], input.shape[2:].numel(), groups)
        out, mean, rstd = torch.native_group_norm(input, weight, bias, *context.sizes, eps)
        context.save_for_backward(input, weight, mean, rstd)
        return out

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        input, weight, mean, rstd = context.saved_tensors
        gradient = gradient.contiguous(memory_format=suggest_memory_format(input))
        needed = context.needs_input_grad[:3]
        made = aten.native_group_norm_backward(gradient, input, mean, rstd, weight, *context.sizes, needed)
        return *made, None, None


@stating(FUNCTIONS, torch.group_norm)
def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any) -> Any:
    """In the input's own layout, channels last too, there and back; meta makes all contiguous.

    `ATen/native/group_norm.cpp`, and `native_group_norm` in `tools/autograd/derivatives.yaml`.
    """
    layout = suggest_memory_format(input)
    if layout is torch.contiguous_format:
        return torch.group_norm(input, num_groups, weight, bias, eps, *rest)
    return _GroupNorm.apply(input.contiguous(memory_format=layout), weight, bias, num_groups, eps)


def _in_the_input_s_layout(op: Any) -> Function:
    """In the layout that the input suggests, whatever the meta device makes of it."""

    def run(input: Any, *rest: Any, **options: Any) -> Any:
        out = op(input, *rest, **options)
        return torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=suggest_memory_format(input))

    return run


def _in_the_second_s_layout(op: Any) -> Function:
    """The same for a gradient's kernel, whose second argument is the input."""

    def run(gradient: Any, input: Any, *rest: Any) -> Any:
        out = op(gradient, input, *rest)
        return torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=suggest_memory_format(input))

    return run


KERNELS |= {
    op: _in_the_input_s_layout(op)
    for op in (
        *(aten.reflection_pad2d.default, aten.replication_pad2d.default),  # `ATen/native/ReflectionPad.cpp`, ...
        *(aten.reflection_pad3d.default, aten.replication_pad3d.default),  # `ReplicationPadding.cpp`
        *(aten.pixel_shuffle.default, aten.pixel_unshuffle.default),  # `ATen/native/PixelShuffle.cpp`
        *(aten.channel_shuffle.default, aten.native_channel_shuffle.default),  # `ATen/native/ChanelShuffle.cpp`
    )
}
KERNELS |= {
    op: _in_the_second_s_layout(op)
    for op in (aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default)
}


@stating(KERNELS, aten.roll.default)
def roll(input: Any, shifts: Any, dims: Any = ()) -> Any:
    """Laid out as the input (`ATen/native/TensorTransformations.cpp`, `roll`)."""
    return torch.empty_like(input)


@stating(KERNELS, aten.glu_backward.default)
def glu_backward(gradient: Any, input: Any, dim: int) -> Any:
    """Contiguous, whatever the input's layout (`ATen/native/GatedLinearUnit.cpp`)."""
    return input.new_empty(input.shape)


@stating(KERNELS, aten.log_sigmoid_forward.default)
def log_sigmoid_forward(input: Any) -> Any:
    """Contiguous, the buffer too (`ATen/native/Activation.cpp`, `log_sigmoid_forward_cpu`)."""
    return input.new_empty(input.shape), input.new_empty(input.shape)
