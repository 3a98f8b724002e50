"""Kernels on CUDA that sort, select, count and draw: what they take for themselves, derived or, if it is CUB's, named.

Read were those of `ATen/native/cuda` that ask the allocator for more than their results. Of CUB's own storage that of a
radix sort of pairs of one size is derived, by which PyTorch sorts the places that a gradient is scattered to: CUB's
`dispatch_radix_sort.cuh` (`InvokeSingleTile`, `InvokeOnesweep`) and `tuning_radix_sort.cuh`, as of CUDA 12.8, by
way of `ATen/cuda/cub-RadixSortPairs.cuh`. What one block sorts at once needs no memory, and CUB asks for one byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import gpus
from ..units import round_up
from .base import Function, stating

aten: Final = torch.ops.aten

SCRATCH: Final[dict[Any, Function]] = {}
LEFT_OUT: Final[dict[Any, str | Callable[..., str | None]]] = {}

_DIGIT_BITS: Final = 8  # a pass sorts by so many bits
_DIGITS: Final = 1 << _DIGIT_BITS
_ALIGNMENT: Final = 256
_COUNTER, _OFFSET = 4, 8  # PyTorch counts items in 64 bits


def radix_sort_pairs(n: int, itemsize: int, bits: int) -> int:
    """Bytes of temporary storage to sort `n` pairs of a key and a value of `itemsize` bytes each, 4 or 8.

    Args:
        n: Number of pairs.
        itemsize: Of a key, and of a value.
        bits: Lowest bits of a key that are looked at.
    """
    if n <= 256 * _items_per_thread(19, itemsize):
        return 1
    tile, passes = _tile(itemsize), -(-bits // _DIGIT_BITS)
    portion = (2**28 - 1) // tile * tile
    portions, blocks = -(-n // portion), -(-min(n, portion) // tile)
    double = n * itemsize if passes > 1 else 0
    counts = portions * passes
    parts = (counts * _DIGITS * _OFFSET, blocks * _DIGITS * _COUNTER, double, double, counts * _COUNTER)
    return sum(round_up(nbytes, _ALIGNMENT) for nbytes in parts) + _ALIGNMENT - 1


def _tile(itemsize: int) -> int:
    """Pairs that a block sorts at once, by the GPU's generation (`Policy700`, `Policy800`, `Policy900`)."""
    capability = gpus.followed().capability
    if capability < (8, 0):
        return 256 * _items_per_thread(46 if itemsize == 4 else 23, itemsize)
    if itemsize == 4:
        return 384 * 17
    return 384 * _items_per_thread(21 if capability < (9, 0) else 24, itemsize)


def _items_per_thread(of_four_bytes: int, itemsize: int) -> int:
    return of_four_bytes * 4 // itemsize  # `RegBoundScaling`


def bits_of(highest: int) -> int:
    """Bits of keys up to the highest (`ATen/cuda/cub.h`, `get_num_bits`)."""
    return max(1, highest.bit_length())


# -- ops ---------------------------------------------------------------------------------------------------------------

_SMALL: Final = 4096  # `ATen/native/cuda/Sort.h`, `should_use_small_sort`: rows that are sorted where they lie
_INDEX: Final = 8  # bytes


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Any) -> list[int]:
    return [] if tensor.is_contiguous() else [_bytes(tensor)]


def _length(tensor: Any, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


@stating(SCRATCH, aten.sort.default)
def sort_scratch(tensor: Any, dim: int = -1, descending: bool = False) -> list[int]:
    """The places in a short row, for a moment; long rows are sorted beside copies of places and numbers.

    `ATen/native/cuda/Sort.cpp`, `sort_cuda_kernel`, and `SortStable.cu`.
    """
    n, all_places = _length(tensor, dim), tensor.numel() * _INDEX
    if tensor.numel() < 2:
        return []
    if n <= _SMALL:
        return [n * _INDEX, -n * _INDEX]
    in_rows = tensor.stride(dim) == 1 and tensor.is_contiguous()
    made = [] if in_rows else [_bytes(tensor), _bytes(tensor), all_places]
    rows = tensor.numel() // n
    if rows == 1 or n >= 1_000_000:
        return [*made, n * _INDEX]
    return [*made, all_places, all_places, _bytes(tensor)] if rows < 128 else [*made, all_places]


@stating(SCRATCH, aten.sort.stable)
def stable_sort_scratch(tensor: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> list[int]:
    """As any other: all are stable."""
    return sort_scratch(tensor, dim)


@stating(SCRATCH, aten.topk.default)
def topk_scratch(tensor: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[int]:
    """Reads contiguous memory; what it has selected is sorted in place, or if it is long into new tensors.

    `ATen/native/cuda/TensorTopK.cpp`, `topk_out_cuda`, and `TensorTopK.cu`, `launch_gather_topk_kernel`.
    """
    made = _copy(tensor)
    made += [-nbytes for nbytes in made]
    if not sorted or k <= _SMALL:
        return made
    shape = list(tensor.shape)
    shape[dim] = k
    selected = tensor.new_empty(shape)
    places = selected.numel() * _INDEX
    sort = sort_scratch(selected, dim)
    return [*made, places, _bytes(selected), *sort, *(-nbytes for nbytes in reversed(sort)), places]


@stating(SCRATCH, aten.median.default, aten.nanmedian.default)
def median_of_all_scratch(tensor: Any) -> list[int]:
    """All numbers sorted, with their places (`ATen/native/cuda/Sorting.cpp`, `median_impl`)."""
    return [*_copy(tensor), _bytes(tensor), tensor.numel() * _INDEX, *sort_scratch(tensor.new_empty(tensor.numel()))]


@stating(
    SCRATCH, aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.cumsum.default, aten.cumprod.default,
    aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten._cummax_helper.default,
)  # fmt: skip
def contiguous_scratch(tensor: Any, *rest: Any, **options: Any) -> list[int]:
    """Reads contiguous memory (`ATen/native/cuda/Sorting.cpp`, `ScanUtils.cuh`)."""
    return _copy(tensor)


@stating(SCRATCH, aten.multinomial.default)
def multinomial_scratch(weights: Any, count: int, replacement: bool = False, *, generator: Any = None) -> list[int]:
    """Checks, then a random number for each weight; with replacement, the weights as given, normalised, summed up.

    `ATen/native/Distributions.cpp`, `multinomial_out`, and `ATen/native/cuda/MultinomialKernel.cu`.
    """
    rows, each = math.prod(weights.shape[:-1]), weights.element_size()
    if replacement and count > 1:
        return 3 * [_bytes(weights)]
    checks = [each, 1, each, 1, 1], [each * rows, rows, _INDEX]
    made = [nbytes for check in checks for nbytes in (*check, *(-n for n in reversed(check)))]
    return [*made, _bytes(weights), *([rows * count * each] if count > 1 else [])]


@stating(SCRATCH, aten.masked_scatter.default, aten.masked_scatter_.default)
def masked_scatter_scratch(tensor: Any, mask: Any, source: Any) -> list[int]:
    """How many are taken before each (`ATen/native/cuda/IndexKernel.cpp`, `masked_scatter__cuda`)."""
    return [math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)) * _INDEX]


@stating(SCRATCH, aten._pack_padded_sequence.default)
def pack_scratch(padded: Any, lengths: Any, batch_first: bool) -> list[int]:
    """Parts of one batch size, copied where they have gaps (`ATen/native/PackedSequence.cpp`)."""
    steps, begin, made = padded.transpose(0, 1) if batch_first else padded, 0, []
    for shorter, end in enumerate(reversed(lengths.tolist())):
        if end > begin:
            made += _copy(steps[begin:end, : len(lengths) - shorter])
            begin = end
    return made


_LONG: Final = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (math.inf, 400))
"""Rows up to so many, from this length on several blocks select from each (`should_use_multiblock`)."""


def _of_long_rows(tensor: Any, k: int, dim: int = -1, *rest: Any) -> str | None:
    n = _length(tensor, dim)
    rows = tensor.numel() // max(n, 1)
    several = n >= next(length for most, length in _LONG if rows <= most)
    return "counts of several blocks in topk() of long rows" if several or k > _SMALL else None


def _of_long_sorts(tensor: Any, dim: int = -1, *rest: Any, **options: Any) -> str | None:
    return "CUB's storage in sorting rows of over 4,096" if _length(tensor, dim) > _SMALL else None


def _of_scans(tensor: Any, dim: int, *rest: Any, **options: Any) -> str | None:
    return "CUB's storage in summing up one row" if 1 < tensor.numel() == _length(tensor, dim) else None


def _of_masks(tensor: Any, indices: Any, *rest: Any) -> str | None:
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return "where a mask is true, in indexing with it" if masked else None


LEFT_OUT |= {
    aten.topk.default: _of_long_rows,
    aten.sort.default: _of_long_sorts,
    aten.sort.stable: lambda tensor, *, stable, dim=-1, descending=False: _of_long_sorts(tensor, dim),
    aten.median.default: lambda tensor: _of_long_sorts(tensor.flatten()),
    aten.nanmedian.default: lambda tensor: _of_long_sorts(tensor.flatten()),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default), _of_scans),
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default, aten.index_put_.default), _of_masks),
    aten._index_put_impl_.default: _of_masks,
    aten.masked_select.default: "where a mask is true, in indexing with it",
    **dict.fromkeys((aten.masked_scatter.default, aten.masked_scatter_.default), "CUB's storage in masked_scatter()"),
    **{
        getattr(getattr(aten, name), overload): f"what {name.strip('_2')}() takes for itself"
        for name, overload in (
            *(("nonzero", "default"), ("mode", "default"), ("bincount", "default"), ("histc", "default")),
            *(("_unique2", "default"), ("unique_consecutive", "default"), ("unique_dim", "default")),
            *(("randperm", "default"), ("randperm", "generator"), ("repeat_interleave", "Tensor")),
            *(("segment_reduce", "default"), ("embedding_renorm_", "default"), ("put_", "default")),
            *(("_cdist_forward", "default"), ("_cdist_backward", "default"), ("_pdist_backward", "default")),
            *(("_ctc_loss", "Tensor"), ("_ctc_loss_backward", "default"), ("isin", "Tensor_Tensor")),
            ("_embedding_bag_dense_backward", "default"),
        )
    },
}
