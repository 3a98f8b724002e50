"""What CUB's radix sort takes for itself: PyTorch sorts the places that a gradient is scattered to.

CUB's `dispatch_radix_sort.cuh` (`InvokeSingleTile`, `InvokeOnesweep`) and `tuning_radix_sort.cuh`, as of CUDA 12.8, by
way of `ATen/cuda/cub-RadixSortPairs.cuh`. What one block sorts at once needs no memory, and CUB asks for one byte.
"""

from __future__ import annotations

from typing import Final

from .. import gpus
from ..units import round_up

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
