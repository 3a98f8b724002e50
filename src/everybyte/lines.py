"""Lines for a terminal: sizes in columns, long tables cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from .names import printable
from .units import format_bytes

LONGEST_TABLE: Final = 12  # rows
LONGEST_NAME: Final = 200  # characters in a table
LONGEST_LINE: Final = 1_000  # characters of an error or a note


def peaks(figures: Mapping[str, int]) -> Iterator[str]:
    """The three peaks and what was reserved, each with what it means; they are never mixed."""
    for name, meaning in (
        ("allocated", "whole blocks, as torch.cuda.max_memory_allocated reports"),
        ("rounded", "each request rounded to 512 B"),
        ("requested", "what was asked for"),
        ("reserved", "segments, as torch.cuda.max_memory_reserved reports"),
    ):
        yield f"peak {name:9}  {format_bytes(figures[f'peak_{name}']):>46}  {meaning}"


def table(rows: Iterable[tuple[int, int, str]], most: int = LONGEST_TABLE) -> Iterator[str]:
    """Bytes, share, number of storages and name, largest first; what is beyond `most` rows as one."""
    rows = list(rows)
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows = [*rows[: most - 1], (sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest):,} others")]
    total = sum(nbytes for nbytes, *_ in rows) or 1
    for nbytes, count, name in rows:
        yield f"  {format_bytes(nbytes):>46}  {nbytes / total:6.1%}  {count:>7,} ×  {printable(name, LONGEST_NAME)}"
