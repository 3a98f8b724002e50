"""Dropout on CUDA, which keeps a mask of a byte an element."""

from __future__ import annotations

from typing import Any, Final

import torch

from .base import Function, stating

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
FUNCTIONS: Final[dict[Any, Function]] = {}


@stating(FUNCTIONS, torch.dropout)
def dropout(input: Any, p: float, train: bool) -> Any:
    """Dropout by one kernel that keeps a mask of a byte an element (`ATen/native/Dropout.cpp`, `dropout`).

    It runs in training for 0 < p < 1 (`is_fused_kernel_acceptable`); otherwise, and in place, CUDA composes dropout as
    the meta device does.
    """
    if not (train and 0 < p < 1 and input.numel() > 0):
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


@stating(KERNELS, aten.native_dropout.default)
def native_dropout(input: Any, p: float, train: bool | None) -> Any:
    """Output and mask, a bool an element, laid out as the input (`ATen/native/cuda/Dropout.cu`, `dropout_cuda`)."""
    return torch.empty_like(input), torch.empty_like(input, dtype=torch.bool)


@stating(KERNELS, aten.native_dropout_backward.default)
def native_dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    """Laid out as the incoming gradient suggests (`ATen/native/cuda/Dropout.cu`, `dropout_backward_cuda`)."""
    return torch.empty_like(gradient, memory_format=torch._prims_common.suggest_memory_format(gradient))
