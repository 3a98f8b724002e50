"""`everybyte diff BEFORE AFTER [--max +1%]`: what grew between two timelines at the peak, and whether it may."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..compare import KEYS, Change, Comparison, allowance, compare
from ..lines import LONGEST_TABLE
from ..names import alike, printable
from ..timeline import Timeline
from ..units import format_bytes
from . import BAD_INPUT, CANNOT_SAY, NO, SCHEMA, Answer, Stop


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte diff`."""
    parser = commands.add_parser(
        "diff",
        help="what grew between two timelines",
        description="What grew at the peak between two timelines, as `everybyte trace --parquet` writes them; with "
        "--max, exit code 1 if the peak grew by more. For continuous integration: needs no GPU and no torch.",
        allow_abbrev=False,
    )
    parser.add_argument("before", metavar="BEFORE", help="the timeline to compare with, a .parquet")
    parser.add_argument("after", metavar="AFTER", help="the timeline to be judged")
    parser.add_argument("--max", metavar="GROWTH", help="how much the peak may grow: +1%%, +10MB, +10MiB or 0")
    parser.add_argument("--by", choices=KEYS, default=KEYS[0], help=f"whose the growth is; by {KEYS[0]} unless given")
    parser.set_defaults(command=_answer)
    return parser


def _answer(args: argparse.Namespace) -> Answer:
    found = compare(_read(args.before), _read(args.after), args.by)
    allowed = None
    if args.max is not None:
        try:
            allowed = allowance(args.max, found.before)
        except ValueError as error:
            raise Stop(BAD_INPUT, f"--max {error}") from None
    over = allowed is not None and found.over(allowed)
    answer = {
        "schema": SCHEMA,
        "before": _name(args.before),
        "after": _name(args.after),
        "by": args.by,
        "peak_requested_before": found.before,
        "peak_requested_after": found.after,
        "difference": found.difference,
        "allowed": allowed,
        "over": over,
        "changes": [_as_dict(change) for change in found.changes],
        "unlike": list(found.unlike),
        "uncertain": list(found.uncertain),
    }
    stop = None
    if allowed is not None and found.uncertain:
        stop = Stop(CANNOT_SAY, f"cannot say whether it grew: {'; '.join(found.uncertain)} makes the figures uncertain")
    elif over:
        most, count, name = _rows(found)[0]
        grew = f"the peak grew by {format_bytes(found.difference)}{_share(found)}, and may by {format_bytes(allowed)}"
        who = f"{f'{count} × ' if count > 1 else ''}{printable(name)}, {format_bytes(most)}"
        stop = Stop(NO, f"{grew}; most in {who}: mend it, or raise --max")
    return answer, _lines(found), stop


def _read(file: str) -> Timeline:
    if not Path(file).is_file():
        raise Stop(BAD_INPUT, f"there is no file {file}: everybyte trace --parquet writes one")
    try:
        timeline = Timeline.from_parquet(file)
        timeline.live_bytes  # noqa: B018  (adds up what is live, and says if that is too much)
    except (ValueError, TypeError, AttributeError, OSError, pa.ArrowException) as error:
        message = str(error) if file in str(error) else f"{file}: {error}"
        raise Stop(BAD_INPUT, f"{message}; everybyte trace --parquet writes a timeline") from None
    return timeline


def _name(file: str) -> str:
    return os.fsencode(file).decode("utf-8", "replace")


def _as_dict(change: Change) -> dict[str, Any]:
    return {"name": change.name, "before": change.before, "after": change.after, "difference": change.difference}


def _share(found: Comparison) -> str:
    return f" ({found.difference / found.before:+.2%})" if found.before else ""


def _rows(found: Comparison) -> list[tuple[int, int, str]]:
    """What a reader is shown: difference, holders and their name, alike ones together where there are many."""
    rows = [(change.difference, 1, change.name or f"(no {found.key})") for change in found.changes]
    return alike(rows) if len(rows) > LONGEST_TABLE else rows


def _lines(found: Comparison) -> Iterator[str]:
    yield f"peak before  {format_bytes(found.before):>46}  requested"
    yield f"peak after   {format_bytes(found.after):>46}  requested"
    yield f"difference   {_signed(found.difference):>46} {_share(found)}"
    if found.changes:
        yield ""
        yield f"What changed at the peak, by {found.key}:"
        rows = _rows(found)
        # Whoever grew most and whoever shrank most; what lies between them as one.
        head, tail = (rows, []) if len(rows) <= 2 * LONGEST_TABLE else (rows[:LONGEST_TABLE], rows[-LONGEST_TABLE:])
        between = rows[len(head) : len(rows) - len(tail)]
        if between:
            head = [*head, (sum(row[0] for row in between), sum(row[1] for row in between), f"{len(between):,} others")]
        for difference, count, name in [*head, *tail]:
            yield f"  {_signed(difference):>46}  {f'{count} × ' if count > 1 else ''}{printable(name)}"
    if found.unlike:
        yield ""
        yield f"Not alike, beside the code: {printable('; '.join(found.unlike))}."


def _signed(nbytes: int) -> str:
    return f"+{format_bytes(nbytes)}" if nbytes > 0 else format_bytes(nbytes)
