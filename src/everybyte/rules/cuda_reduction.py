"""Partial results of reductions on CUDA: what several blocks that share one sum hand over in global memory.

`ATen/native/cuda/Reduce.cuh` of the 2.13.0 package, `setReduceConfig` and `gpu_reduce_kernel`: a reduction is spread
over blocks where there is much to sum for each result and too few results to fill the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from .. import gpus
from .base import Function, stating

aten: Final = torch.ops.aten

SCRATCH: Final[dict[Any, Function]] = {}

_WARP, _MOST_THREADS, _LEAST_VALUES, _MOST_VALUES = 32, 512, 16, 256
_MOST_BYTES: Final = 2**31 - 1
"""Reached by one kernel; more is reduced half by half (`ATen/TensorIterator.cpp`, `can_use_32bit_indexing`)."""


class _Dimension(NamedTuple):
    size: int
    stride: int  # of the input, in elements
    out: int  # stride of the result, 0 where it is reduced


def partial_results(
    shape: Sequence[int],
    strides: Sequence[int],
    over: Sequence[int],
    itemsize: int,
    partial: int,
    *,
    vector: int = 4,
    offset: int = 0,
    apart: bool = False,
) -> list[int]:
    """Bytes that a reduction allocates for itself, in order, -n where they are given back before the next.

    Args:
        shape, strides: Of the input, strides in elements.
        over: The dimensions that it reduces.
        itemsize: Bytes of an element.
        partial: Bytes of a partial result.
        vector: How many elements a thread loads at once where they lie side by side.
        offset: Of the input in its storage, in elements.
        apart: Whether the result's type is too narrow to sum in it from one kernel to the next.
    """
    if 0 in shape:
        return []
    parts = list(_in_32_bits(_iterated(shape, strides, over), itemsize))
    outputs = math.prod(size for i, size in enumerate(shape) if i not in over)
    made, live = [partial * outputs] if apart and len(parts) > 1 else [], []
    for part in parts:
        made += [-nbytes for nbytes in reversed(live)]
        live = _partial_results(part, partial, vector, offset)
        made += live
    return made


def _iterated(shape: Sequence[int], strides: Sequence[int], over: Sequence[int]) -> list[_Dimension]:
    """The dimensions as the iterator walks them, from the innermost out: reduced ones first, what can be merged merged.

    `ATen/TensorIterator.cpp`, `reorder_dimensions` and `coalesce_dimensions`. The result lies in the order of its
    dimensions, which decides that of the dimensions that stay.
    """
    dimensions, out = [], 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] > 1:
            dimensions.append(_Dimension(shape[i], strides[i], 0 if i in over else out))
        out *= 1 if i in over else shape[i]
    reduced = [d for d in dimensions if not d.out]
    if all(d.stride for d in reduced):  # one that is repeated says nothing
        reduced.sort(key=lambda d: d.stride)
    merged: list[_Dimension] = []
    for d in (*reduced, *(d for d in dimensions if d.out)):
        last = merged[-1] if merged else None
        if last and (last.size * last.stride, last.size * last.out) == (d.stride, d.out):
            merged[-1] = last._replace(size=last.size * d.size)
        else:
            merged.append(d)
    return merged


def _in_32_bits(dimensions: list[_Dimension], itemsize: int) -> Iterator[list[_Dimension]]:
    """Halves of the longest dimension, until 32 bits suffice for their offsets (`TensorIterator.cpp`, `split`)."""
    extents = [(d.size - 1) * d.stride for d in dimensions]
    if math.prod(d.size for d in dimensions) <= _MOST_BYTES and itemsize * sum(extents) < _MOST_BYTES:
        yield dimensions
        return
    at = extents.index(max(extents))
    half = dimensions[at].size // 2
    for size in (half, dimensions[at].size - half):
        yield from _in_32_bits([*dimensions[:at], dimensions[at]._replace(size=size), *dimensions[at + 1 :]], itemsize)


def _partial_results(dimensions: list[_Dimension], partial: int, vector: int, offset: int) -> list[int]:
    """`setReduceConfig`: the partial results and, for each group of results, a counter of the blocks that are done."""
    reduced, kept = [d for d in dimensions if not d.out], [d for d in dimensions if d.out]
    if not reduced:
        return []
    inputs, outputs = (math.prod(d.size for d in part) for part in (reduced, kept))
    along_inputs = not kept or reduced[0].stride < kept[0].stride
    across, down = (inputs, outputs) if along_inputs else (outputs, inputs)
    side_by_side = 1  # results that one thread makes
    if (reduced if along_inputs else kept)[0].stride == 1:
        if not along_inputs:
            others = [d.stride for d in dimensions if d is not kept[0]]
            side_by_side = math.gcd(4, offset, kept[0].size, *others)
            across //= side_by_side
        elif across >= 128 and len(reduced) == 1:
            across //= vector
    most = _MOST_THREADS // side_by_side
    across, down = (min(most, 1 << n.bit_length() - 1) for n in (across, down))
    height = min(down, most // min(across, _WARP))
    width = min(across, most // height)
    inputs_at_once, outputs_at_once = (width, 1) if along_inputs else (1, width)
    split = _ceil(inputs, inputs_at_once) >= min(height * _LEAST_VALUES, _MOST_VALUES)
    if not split:
        return []
    values = _ceil(inputs, inputs_at_once * height)
    groups = _ceil(outputs // side_by_side, outputs_at_once)
    gpu = gpus.followed()
    fill = gpu.processors * (gpu.threads // (width * height))
    if values < _MOST_VALUES or groups > fill:
        return []
    blocks = max(min(_ceil(fill, groups), _ceil(values, _LEAST_VALUES)), _ceil(values, _MOST_VALUES))
    if blocks == 1:
        return []
    return [partial * outputs * blocks * (1 if along_inputs else width * side_by_side), 4 * groups]


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


# -- ops ---------------------------------------------------------------------------------------------------------------

_HALVES: Final = (torch.float16, torch.bfloat16)


def _dimensions(tensor: Any, over: Any) -> list[int]:
    """Dimensions as counted from the first; none given are all of them."""
    if over is None or over == []:
        return list(range(tensor.dim()))
    return [i % max(1, tensor.dim()) for i in (over if isinstance(over, (list, tuple)) else [over])]


def _reduced(tensor: Any, over: Any, partial: int, **options: Any) -> list[int]:
    return partial_results(
        tensor.shape,
        tensor.stride(),
        _dimensions(tensor, over),
        tensor.element_size(),
        partial,
        offset=tensor.storage_offset(),
        **options,
    )


def _accumulated(tensor: Any, over: Any, dtype: torch.dtype | None, vector: int = 4) -> list[int]:
    """A reduction that sums in the type in which sums are kept, of a copy if that is not what the kernel reads.

    `ATen/native/ReduceOpsUtils.h`, `make_reduction_from_out_ty`: halves are summed to single precision as they are, and
    all else is brought into the result's dtype first.
    """
    integral = not (tensor.is_floating_point() or tensor.is_complex())
    dtype = dtype or (torch.int64 if integral else tensor.dtype)
    copied = tensor.dtype != dtype and not (tensor.dtype in _HALVES and dtype == torch.float32)
    made = [tensor.numel() * dtype.itemsize] if copied else []
    tensor = torch.empty_like(tensor, dtype=dtype) if copied else tensor
    partial = 4 if tensor.dtype in _HALVES else dtype.itemsize
    loaded = vector if tensor.dtype in _HALVES else 4
    return made + _reduced(tensor, over, partial, vector=loaded, apart=dtype in _HALVES)


@stating(SCRATCH, aten.sum.default, aten.mean.default)
def sum_of_all_scratch(tensor: Any, *, dtype: torch.dtype | None = None) -> list[int]:
    """`ATen/native/cuda/ReduceSumProdKernel.cu`, `ReduceMomentKernel.cu`: halves are loaded eight at once."""
    return _accumulated(tensor, None, dtype, vector=8)


@stating(SCRATCH, aten.sum.dim_IntList, aten.mean.dim)
def sum_scratch(tensor: Any, over: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> list[int]:
    """As the sum of all."""
    return _accumulated(tensor, over, dtype, vector=8)


@stating(SCRATCH, aten.prod.default)
def product_of_all_scratch(tensor: Any, *, dtype: torch.dtype | None = None) -> list[int]:
    """`ATen/native/cuda/ReduceSumProdKernel.cu`, `prod_functor`."""
    return _accumulated(tensor, None, dtype)


@stating(SCRATCH, aten.prod.dim_int)
def product_scratch(tensor: Any, over: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> list[int]:
    """As the product of all."""
    return _accumulated(tensor, over, dtype)


@stating(SCRATCH, aten.linalg_vector_norm.default)
def norm_scratch(
    tensor: Any, order: float = 2, over: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> list[int]:
    """`ATen/native/cuda/ReduceNormKernel.cu`."""
    return _accumulated(tensor, over, dtype)


@stating(SCRATCH, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def highest_scratch(tensor: Any, over: Any = None, keepdim: bool = False) -> list[int]:
    """`ATen/native/cuda/ReduceMaxValuesKernel.cu`: partial results are elements."""
    return _reduced(tensor, over, tensor.element_size())


@stating(SCRATCH, aten.max.dim, aten.min.dim)
def highest_and_where_scratch(tensor: Any, over: int, keepdim: bool = False) -> list[int]:
    """`max_launch_kernel`: partial results are pairs of an element and its place, 16 B for each dtype."""
    return _reduced(tensor, over, 16)
