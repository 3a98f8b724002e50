"""`everybyte explain [FILE|-]`: what kind of out-of-memory error a message reports, and what to do next."""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..explain import KINDS, Explanation, explain
from ..gpus import find
from . import BAD_INPUT, CANNOT_SAY, SCHEMA, Answer, Stop

MOST: Final = 64 * 2**20
"""Bytes of a log that are read, from its beginning: the first message decides."""


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte explain`."""
    parser = commands.add_parser(
        "explain",
        help="explain an out-of-memory message",
        description="What kind of out-of-memory error the first message of a log reports, by arithmetic, and what to "
        "do next. Needs no GPU and no torch.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="a log; what is pasted, unless given")
    parser.add_argument("--gpu", help="the GPU that you thought you had, such as a100-80gb")
    parser.set_defaults(command=_answer)
    return parser


def _answer(args: argparse.Namespace) -> Answer:
    try:
        thought = None if args.gpu is None else find(args.gpu)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    found = explain(_read(args.file), thought)
    if found is None:
        where = "in what was pasted" if args.file == "-" else f"in {args.file}"
        raise Stop(BAD_INPUT, f"not an out-of-memory message I know, {where}: paste all of it, with its figures")
    stop = None
    if found.kind == "cannot say":
        can = f": it can be {' or '.join(found.possible)}" if found.possible else ""
        stop = Stop(CANNOT_SAY, f"cannot say what kind it is{can}; next, {found.next[0].partition('  #')[0]}")
    return _as_dict(found), _lines(found), stop


def _read(file: str) -> str:
    if file == "-" and sys.stdin.isatty():
        print("Paste the message, then Ctrl-D:", file=sys.stderr)
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST)
        else:
            with Path(file).open("rb") as log:
                data = log.read(MOST)
    except OSError as error:
        raise Stop(BAD_INPUT, f"{file} cannot be read: {error.strerror or error}") from None
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes logs
    return data.decode("utf-16" if wide else "utf-8", "replace")


def _as_dict(found: Explanation) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": found.kind,
        "possible": list(found.possible),
        "device": found.device,
        "index": found.index,
        "sizes": {name: {"least": size.least, "most": size.most} for name, size in found.sizes.items()},
        "gpus": list(found.gpus),
        "why": list(found.why),
        "next": list(found.next),
        "more": found.more,
    }


def _lines(found: Explanation) -> Iterator[str]:
    yield f"{found.kind}: {KINDS[found.kind]}"
    if found.rows:
        yield ""
        width = max(len(label) for label, _ in found.rows)
        yield "What the message says:" if found.index is None else f"What the message says of GPU {found.index}:"
        yield from (f"  {label:{width}}  {size}" for label, size in found.rows)
    for title, lines in (("Why", found.why), ("Next", found.next)):
        yield ""
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)
    if found.more:
        messages = "messages follow" if found.more > 1 else "message follows"
        yield ""
        yield f"{found.more:,} more {messages}; the first decides, because those after it may be its consequences."
