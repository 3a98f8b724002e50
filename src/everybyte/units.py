"""Units of memory, said once: GB is 1000 MB, GiB is 1024 MiB, and bytes come first.

KB, MB, GB     powers of 1000, as disks and most papers count
KiB, MiB, GiB  powers of 1024, as allocators and `nvidia-smi` count
"""

from __future__ import annotations

import re
from typing import Final

KB: Final = 10**3
MB: Final = 10**6
GB: Final = 10**9
KiB: Final = 2**10
MiB: Final = 2**20
GiB: Final = 2**30
TiB: Final = 2**40

LARGEST: Final = 2**63 - 1
"""The most bytes that PyTorch, NumPy and Arrow can count: they keep sizes as signed 64-bit integers."""

_BY_NAME: Final = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_SIZE: Final = re.compile(r"\s*(\d[\d,_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def format_bytes(nbytes: int) -> str:
    """One number in the book's notation: bytes, then the decimal and the binary unit of its size.

        >>> eb.format_bytes(1_357_143_968)
        '1,357,143,968 B (1.357 GB, 1.264 GiB)'

    Args:
        nbytes: An exact count of bytes; negative for a difference. Below 1,000 it stands alone.

    Raises:
        TypeError: If `nbytes` is not an integer. A fraction of a byte is always a mistake upstream.
    """
    if isinstance(nbytes, bool) or int(nbytes) != nbytes:
        raise TypeError(f"a count of bytes is a whole number, not {nbytes!r}; round it where it is computed")
    nbytes = int(nbytes)
    for decimal, binary, d, i in ((GB, GiB, "GB", "GiB"), (MB, MiB, "MB", "MiB"), (KB, KiB, "KB", "KiB")):
        if abs(nbytes) >= decimal:
            return f"{nbytes:,} B ({nbytes / decimal:,.3f} {d}, {nbytes / binary:,.3f} {i})"
    return f"{nbytes:,} B"


def parse_bytes(size: int | str) -> int:
    """Reads a size as people write it, or takes a whole number of bytes.

        >>> eb.parse_bytes("16 GB"), eb.parse_bytes("1.5GiB"), eb.parse_bytes("4,096 B")
        (16000000000, 1610612736, 4096)

    Raises:
        ValueError: If the text is no size, or its unit is none of B, KB, MB, GB, KiB, MiB, GiB, TiB.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = _SIZE.fullmatch(str(size))
    if match is None or (match[2] or "B") not in _BY_NAME:
        raise ValueError(f"{size!r} is not a size; write for example '16 GB' (10^9) or '16 GiB' (2^30)")
    number, unit = match[1].replace(",", "").replace("_", ""), _BY_NAME[match[2] or "B"]
    whole, _, fraction = number.partition(".")
    return int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)


def in_the_style_of(size: str, nbytes: int) -> str:
    """Writes a number of bytes as a size is written, in its unit and to its digits.

        >>> eb.units.in_the_style_of("45.9 GB", 45_902_462_976), eb.units.in_the_style_of("233 KB", 233_472)
        ('45.9 GB', '233 KB')

    Raises:
        ValueError: If `size` is no number and unit, as of `parse_bytes`.
    """
    number, _, unit = size.partition(" ")
    width = parse_bytes(f"1 {unit}")
    parse_bytes(size)
    return f"{nbytes / width:.{len(number.partition('.')[2])}f} {unit}"


def round_up(nbytes: int, granularity: int) -> int:
    """The smallest multiple of `granularity` that is at least `nbytes`; 0 stays 0."""
    return -(-nbytes // granularity) * granularity
