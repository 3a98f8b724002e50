"""Reads a pickle that holds plain data and nothing else: dicts, lists, tuples, numbers, strings, bytes.

A pickle is a program for a small stack machine. This reader first walks over the whole program and refuses it if any
instruction could name or call something, says that it is longer than the file, or asks for a memo larger than the file
could fill (Python's own reader would allocate it). Only then is it run, by an unpickler that also refuses to look
anything up. So neither a hostile nor a broken file costs more than the time to read it.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, Final

# The instructions of protocols 2 to 5 that make plain data, by the number of bytes that follow (Lib/pickletools.py).
_ALONE: Final = rb"[(012N\]ael}ds)u\x88\x89\x94]"
_FOLLOWED: Final = rb"[\x80Khq].|M..|[Jj].{4}|[G\x95].{8}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_PAIR: Final = rb"(?:K.|M..){2}\x86"
_TUPLES: Final = b"t\x85\x86\x87"
MOST_TUPLES: Final = 100
"""Tuples that are no pair of small numbers. Python looks for the hash of nested ones without a limit of its own."""

_COUNTED: Final = {
    **{code: 1 for code in b"\x8a\x8cCU"},  # LONG1, SHORT_BINUNICODE, SHORT_BINBYTES, SHORT_BINSTRING
    **{code: 4 for code in b"\x8bXBT"},  # LONG4, BINUNICODE, BINBYTES, BINSTRING
    **{code: 8 for code in b"\x8d\x8e"},  # BINUNICODE8, BINBYTES8
}
"""Instructions followed by a count, of so many bytes, and as many bytes as it says."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def load(path: str | Path) -> tuple[Any, int]:
    """Reads a pickle of plain data.

    Returns:
        The object and the file's length in bytes.

    Raises:
        ValueError: If the file is no pickle, is cut short, lies about a length, or could run code.
        OSError: If it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a device or a pipe, and no file")
    with open(path, "rb") as file:
        data = file.read(2)
        if data[:1] != pickle.PROTO:
            reason = f"it begins with {data!r}" if data else "it is empty"
            raise ValueError(f"{path} is not a pickle of plain data: {reason}")
        data += file.read()
    try:
        _check(data)
        return _Unpickler(io.BytesIO(data)).load(), len(data)
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a pickle of plain data: {reason}") from None
    except (MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a pickle of plain data: {type(error).__name__}") from None


def _check(data: bytes) -> None:
    largest = len(data)
    memo = rb"r..[\x00-%b][\x00-%b]" % (
        re.escape(bytes([255 if largest >> 24 else largest >> 16])),
        re.escape(bytes([min(largest >> 24, 255)])),
    )  # LONG_BINPUT: numbered by no more than the instructions before it
    plain = re.compile(rb"(?s:%b|%b|%b|%b)*+" % (_PAIR, _ALONE, _FOLLOWED, memo))
    at = tuples = 0
    while True:
        at = plain.match(data, at).end()
        if at >= largest:
            raise ValueError("it is cut short")
        code = data[at]
        if code == pickle.STOP[0]:
            return
        if code in _TUPLES and tuples < MOST_TUPLES:
            at, tuples = at + 1, tuples + 1
            continue
        width = _COUNTED.get(code)
        if width is None:
            raise ValueError(f"instruction {data[at : at + 1]!r} at byte {at} makes no plain data")
        at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
