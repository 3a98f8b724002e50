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
from .commands.text import LONGEST_LINE, printable


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: The arguments; those of the process unless given.
    """
    try:
        args = _parser().parse_args(argv)
        answer, lines, verdict = args.command(args)
        _print(json.dumps(answer, indent=1, allow_nan=False) if args.json else "\n".join(lines), sys.stdout)
        if verdict is not None:
            raise verdict
    except Stop as stop:
        _print(f"everybyte: {printable(str(stop), LONGEST_LINE)}", sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        _print("everybyte: interrupted", sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(text: str, file: Any) -> None:
    encoding = file.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Stop(BAD_INPUT, f"{message}; {self.prog} --help says what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="everybyte", description="Where the memory of a training step goes.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (trace, snapshot, audit, sweep, record):
        command.add(commands).add_argument("--json", action="store_true", help="print one JSON object")
    return parser
