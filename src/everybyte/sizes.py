"""Which number of a program is its batch size or its sequence length, and the same program with another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

NAMES: Final = {
    "batch_size": (
        *("batch_size", "per_device_train_batch_size", "train_batch_size", "micro_batch_size", "batchsize"),
        *("batch", "bs", "b"),
    ),
    "sequence": (
        *("sequence", "sequence_length", "seq_length", "seq_len", "seqlen", "max_seq_length", "max_seq_len"),
        *("max_length", "max_len", "block_size", "context_length", "context"),
    ),
}
"""What programs call them, in argparse's options and in functions' parameters."""


@dataclass(frozen=True)
class Size:
    """A number among a program's arguments.

    Attributes:
        kind: "batch_size" or "sequence".
        now: Its value.
        at: Which of the arguments holds it.
        written: That argument, with `{}` in the number's place.
    """

    kind: str
    now: int
    at: int
    written: str

    def to(self, value: int, arguments: Sequence[str]) -> tuple[str, ...]:
        """The arguments with another value."""
        return (*arguments[: self.at], self.written.format(value), *arguments[self.at + 1 :])


def among(arguments: Sequence[str]) -> dict[str, Size]:
    """The sizes in arguments such as `--batch-size 8`, `-b 8`, `--batch_size=8`, `batch_size=8`: of each the last."""
    found = {}
    for at, (name, value, written) in enumerate(_options(arguments)):
        for kind, names in NAMES.items():
            if name in names and value.isdecimal() and int(value) > 0:
                found[kind] = Size(kind, int(value), at if "=" in written else at + 1, written)
    return found


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, equals, value = argument.partition("=")
        plain = re.sub(r"^--?", "", name).replace("-", "_").lower().rpartition(".")[2]
        if equals:
            yield plain, value, f"{name.replace('{', '{{').replace('}', '}}')}={{}}"
        else:
            yield (plain if name.startswith("-") else ""), following, "{}"
