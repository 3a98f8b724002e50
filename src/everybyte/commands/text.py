"""What commands print: the library's lines, and how long one may be."""

from __future__ import annotations

from typing import Final

from ..lines import LONGEST_TABLE, peaks, table

__all__ = ["LONGEST_LINE", "LONGEST_TABLE", "peaks", "table"]

LONGEST_LINE: Final = 1_000  # characters of an error
