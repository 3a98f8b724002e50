"""The commands of `everybyte`, one a module, and what they share: how each answers, and how it ends with a no.

A command is two functions. `add` gives it a parser of its own; the function that this parser names takes the parsed
arguments and returns an `Answer`. It prints nothing: `everybyte.cli` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ..schema import VERSION as SCHEMA

__all__ = ["BAD_INPUT", "CANNOT_SAY", "NO", "SCHEMA", "Answer", "AsModule", "Stop", "new_file", "on_stderr", "written"]

NO, BAD_INPUT, CANNOT_SAY = 1, 2, 3
"""Exit codes: the answer is no; bad input; cannot say."""


class Stop(Exception):
    """Ends the command with an exit code and one line."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


Answer = tuple[dict[str, Any], Iterable[str], BaseException | None]
"""The JSON, the lines for a person, and why it is no plain yes: a `Stop`, or what a script ended with."""


@contextmanager
def on_stderr() -> Iterator[None]:
    """What the code prints, and what programs print that it starts, goes to the error output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def new_file(text: str) -> Path:
    """A path that something can be written to, for argparse."""
    path = Path(text)
    reasons = {
        "it is a folder": path.is_dir(),
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "it is a program": path.suffix == ".py",
    }
    for reason, holds in reasons.items():
        if holds:
            raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}")
    return path.absolute()  # the code that is traced may go to another folder


class AsModule(argparse.Action):
    """`-m MODULE ARGS` in the place of a script and its arguments, as Python itself takes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, nargs=argparse.REMAINDER, metavar=("MODULE", "ARGS"), **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values:
            parser.error("-m needs the name of a module")
        for action in parser._actions:
            action.required = False
        setattr(namespace, self.dest, f"-m {values[0]}")
        namespace.arguments = tuple(values[1:])


def written(path: Path | None, write: Callable[[Path], Any]) -> None:
    """Writes a file that an option names, if it does."""
    try:
        if path is not None:
            write(path)
    except (OSError, ImportError) as error:
        raise Stop(BAD_INPUT, f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
