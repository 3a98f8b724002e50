"""`everybyte record --out DIR` and `--check DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import record, recordings
from ..lines import LONGEST_LINE
from ..names import printable
from . import BAD_INPUT, NO, SCHEMA, Answer, Stop


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to a parser's."""
    parser = commands.add_parser(
        "record",
        help="run the book's cases on this machine's GPU, and keep what they took",
        description="Predicts and measures the book's cases at full size, and writes what a reader can contribute.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="record, and write DIR/<gpu>/")
    where.add_argument("--check", type=Path, metavar="DIR", help="say what speaks against the recordings in DIR")
    parser.add_argument("--only", action="append", metavar="CASE", help="this case; may be given several times")
    parser.add_argument("--tgz", action="store_true", help="also write DIR/<gpu>.tgz")
    parser.add_argument(
        "--budget",
        type=int,
        default=record.BUDGET,
        metavar="SECONDS",
        help=f"after so many no case is begun; {record.BUDGET} unless given",
    )
    parser.set_defaults(command=_record)
    return parser


def _record(args: argparse.Namespace) -> Answer:
    try:
        if args.check is not None:
            return _check(args.check)
        folder = record.record(args.out, args.only, args.budget, args.tgz, _say)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    except OSError as error:
        raise Stop(BAD_INPUT, f"{error.filename or args.out}: {error.strerror or error}") from None
    rows = recordings.read(folder).rows()
    lines = [f"{sum(row['status'] == status for row in rows)} {status}" for status in recordings.STATUS]
    faults = recordings.faults(folder)
    said = [", ".join(lines), f"written to {folder}", *(f"to be mended before it is contributed: {f}" for f in faults)]
    answer = {"schema": SCHEMA, "folder": str(folder), "cases": rows, "faults": faults}
    return answer, [printable(line, LONGEST_LINE) for line in said], None


def _check(folder: Path) -> Answer:
    faults = record.check(folder)
    lines = [printable(fault, LONGEST_LINE) for fault in faults] or [f"{folder}: nothing speaks against it"]
    stop = Stop(NO, f"{folder} is refused, for {len(faults):,} reason{'s' * (len(faults) > 1)}") if faults else None
    return {"schema": SCHEMA, "faults": faults}, lines, stop


def _say(line: str) -> None:
    print(printable(line, LONGEST_LINE), file=sys.stderr, flush=True)
