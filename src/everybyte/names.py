"""Names from anywhere, made fit to be shown: nothing in them acts, and those of a list are one."""

from __future__ import annotations

import re
from collections.abc import Iterable


def printable(text: str, most: int = 120) -> str:
    """A text without line breaks, control characters and excess, safe for a terminal."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def of_all(name: str) -> str:
    """A module's name without its numbers: of `blocks.0.mlp`, `blocks.1.mlp`, ... the same `blocks.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def alike(rows: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Rows of bytes, a number and a name, those of alike names (`of_all`) as one, largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for nbytes, count, name in rows:
        pattern = of_all(name)
        before = sums.get(pattern, (0, 0))
        sums[pattern] = before[0] + nbytes, before[1] + count
    return sorted(((*both, name) for name, both in sums.items()), reverse=True)
