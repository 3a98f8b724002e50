"""What CUDA kernels return and keep where the meta device shows something else.

Nothing here was run on a GPU: every rule is read off PyTorch's source, and names the file and the function. Versions
2.11 to 2.13 were read. Tables as in `cpu`, and two more: `SCRATCH`, what a kernel allocates for itself, and `LEFT_OUT`,
what is known to be allocated and not derived here.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from . import cuda_attention, cuda_dropout
from .base import Function, Rules, stating

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
"""Op -> a function of the same arguments that returns, on the meta device, what the CUDA kernel returns."""

FUNCTIONS: Final[dict[Any, Function]] = {}
"""Function of torch's Python face -> a function of the same arguments that takes the path it takes on CUDA."""

SCRATCH: Final[dict[Any, Function]] = {}
"""Op -> a function of the same arguments: the sizes in bytes of what its kernel allocates for itself."""

LEFT_OUT: Final[dict[Any, str]] = {}
"""Op or function -> what it allocates that no rule derives."""


# -- normalisation -----------------------------------------------------------------------------------------------------


@stating(KERNELS, aten.native_layer_norm.default)
def native_layer_norm(input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Contiguous, the two statistics in the type that sums are kept in, single precision for halves.

    `ATen/native/cuda/layer_norm_kernel.cu`, `layer_norm_cuda`.
    """
    rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
    statistics = (input.new_empty(rows, dtype=accumulate_type(input.dtype)) for _ in range(2))
    return input.new_empty(input.shape), *statistics


@stating(KERNELS, aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    gradient: Any, input: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, needed: Any
) -> Any:
    """All contiguous (`ATen/native/cuda/layer_norm_kernel.cu`, `layer_norm_backward_cuda`)."""
    made = (
        like.new_empty(like.shape) if asked else None for like, asked in zip((input, weight, bias), needed, strict=True)
    )
    return tuple(made)


@stating(SCRATCH, aten.native_layer_norm.default)
def native_layer_norm_scratch(input: Any, *rest: Any) -> list[int]:
    """The kernel reads contiguous memory (`layer_norm_cuda`, `expect_contiguous`)."""
    return copies(input)


@stating(SCRATCH, aten.native_layer_norm_backward.default)
def native_layer_norm_backward_scratch(gradient: Any, input: Any, *rest: Any) -> list[int]:
    """As in the forward pass (`LayerNormBackwardKernelImpl`)."""
    return copies(input, gradient)


# -- indices -----------------------------------------------------------------------------------------------------------


@stating(SCRATCH, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put_scratch(self: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> list[int]:
    """Where values are summed up: the places as single numbers, sorted, beside their numbers before and after.

    `ATen/native/cuda/Indexing.cu`, `computeLinearIndex` and `index_put_with_sort_kernel`. What the sort itself takes is
    CUB's affair.
    """
    given = [index for index in indices if index is not None]
    if not accumulate or not self.numel() or any(index.dtype != torch.int64 for index in given):
        return []
    n = 8 * math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    wrapped_and_scaled = [n, n, -n]
    return [*wrapped_and_scaled, *(len(given) - 1) * [*wrapped_and_scaled, -n], n, n, n]


LEFT_OUT |= dict.fromkeys((aten.index_put.default, aten.embedding_dense_backward.default), "temporary storage of sorts")


# -- common to several -------------------------------------------------------------------------------------------------


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which CUDA kernels sum numbers of a type (`ATen/AccumulateType.h`)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def copies(*tensors: Any) -> list[int]:
    """Bytes of the contiguous copies that a kernel makes of those operands that are not."""
    return [t.numel() * t.element_size() for t in tensors if not t.is_contiguous()]


RULES: Final = Rules(
    name="cuda",
    device=torch.device("cuda:0"),
    kernels={**KERNELS, **cuda_dropout.KERNELS, **cuda_attention.KERNELS},
    functions={**FUNCTIONS, **cuda_dropout.FUNCTIONS, **cuda_attention.FUNCTIONS},
    scratch={**SCRATCH, **cuda_attention.SCRATCH},
    remarks=cuda_attention.REMARKS,
    left_out={**LEFT_OUT, **cuda_attention.LEFT_OUT},
)
