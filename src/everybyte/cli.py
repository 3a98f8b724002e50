"""The command line: `everybyte trace MODULE:FUNCTION`, `snapshot FILE`, `audit [LEDGER ...]`, `sweep`, `record`.

A thin face of the library; the book's page `cli` says what its JSON holds. Exit codes: 0 done, 1 the answer is no, 2
bad input, 3 cannot say; any but 0 comes with one line on stderr that says what is wrong and how to mend it. What each
command does is in its module of `everybyte.commands`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .commands import BAD_INPUT, Stop, audit, record, snapshot, sweep, trace
from .commands.text import LONGEST_LINE
from .names import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: The arguments; those of the process unless given.
    """
    stop = None
    try:
        args = _parser().parse_args(argv)
        answer, lines, stop = args.command(args)
        _print(json.dumps(answer, indent=1, allow_nan=False) if args.json else "\n".join(lines), sys.stdout)
    except Stop as ended:
        stop = ended
    except KeyboardInterrupt:
        stop = Stop(130, "interrupted")
    if stop is None:
        return 0
    _print(f"everybyte: {printable(str(stop), LONGEST_LINE)}", sys.stderr)
    return stop.code


def _print(text: str, file: Any) -> None:
    encoding = file.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what is left in the buffer
        if file is sys.stdout and not isinstance(error, BrokenPipeError):  # there the reader has seen enough
            raise Stop(BAD_INPUT, f"the answer cannot be written: {error.strerror or error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Stop(BAD_INPUT, f"{message}; {self.prog} --help says what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="everybyte", description="Where the memory of a training step goes.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (trace, snapshot, audit, sweep, record):
        command.add(commands).add_argument("--json", action="store_true", help="print one JSON object")
    return parser
