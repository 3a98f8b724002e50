"""The command line: `everybyte trace script.py`, `run`, `explain`, `snapshot FILE`, `audit`, `sweep`, `record`.

A thin face of the library; the book's page `cli` says what its JSON holds. Exit codes: 0 done, 1 the answer is no, 2
bad input, 3 cannot say; any but 0 comes with one line on stderr that says what is wrong and how to mend it. What each
command does is in its module of `everybyte.commands`, imported when the command is called: what reads a file needs no
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any, Final, NoReturn

from .commands import BAD_INPUT, Stop
from .lines import LONGEST_LINE
from .names import printable

COMMANDS: Final = {
    "trace": True,
    "run": False,
    "explain": False,
    "diff": False,
    "snapshot": False,
    "audit": True,
    "sweep": False,
    "record": True,
}
"""Each command, and whether it needs torch."""

TORCH: Final = (2, 11)
"""The oldest PyTorch that can be traced, as `pyproject.toml` has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: The arguments; those of the process unless given.
    """
    stop = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = _parser(argv[0] if argv and argv[0] in COMMANDS else None).parse_args(argv)
        answer, lines, stop = args.command(args)
        if answer:
            _print(json.dumps(answer, indent=1, allow_nan=False) if args.json else "\n".join(lines), sys.stdout)
    except Stop as ended:
        stop = ended
    except KeyboardInterrupt:
        stop = Stop(130, "interrupted")
    if stop is None:
        return 0
    if not isinstance(stop, Stop):
        raise stop
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


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of one command, or of all."""
    parser = _Parser(prog="everybyte", description="Where the memory of a training step goes.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lacking = _lacking_torch()
    if command and lacking and COMMANDS[command]:
        raise Stop(BAD_INPUT, f"everybyte {command} {lacking}")
    for name in [command] if command else COMMANDS:
        if lacking and COMMANDS[name]:
            commands.add_parser(name, help=lacking)
        else:
            module = import_module(f".commands.{name}", __package__)
            added = module.add(commands)
            if name != "run":  # what it prints is the script's
                added.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _lacking_torch() -> str | None:
    """What a command that needs torch would lack here, and how to mend it."""
    least = ".".join(map(str, TORCH))
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return f"needs torch {least} or later, and none is installed: pip install torch"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= TORCH:
        return None
    return f"needs torch {least} or later, not {version}: use another environment, with a newer one"
