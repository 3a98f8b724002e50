"""`everybyte run SCRIPT ARGS`: the script on this machine's GPU, and where its memory went, above all where it ran out.

It ends as the script ends, by exit code, exception or signal. What is said of it goes to the error output, behind what
the script and the interpreter print.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .. import as_main, watch
from . import BAD_INPUT, Answer, AsModule, Stop


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte run`."""
    parser = commands.add_parser(
        "run",
        help="run a script on this machine's GPU, and report where its memory went",
        description="Runs a script, unchanged, and ends as it ends. Where memory runs out, and at the end, a snapshot "
        "and a report are written. Options come before SCRIPT; what follows it is the script's.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", help="a folder for the reports; everybyte-run unless given")
    parser.add_argument(
        "--events", type=_count, metavar="N", help=f"how many events of history to keep; {watch.EVENTS:,} unless given"
    )
    parser.add_argument("-m", dest="script", action=AsModule, help="a module that runs as a script, and its arguments")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    parser.set_defaults(command=_answer)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of events is a positive whole number, not {text!r}")
    return int(text)


def _answer(args: argparse.Namespace) -> Answer:
    if lacking := watch.unavailable():
        raise Stop(BAD_INPUT, lacking)
    if not args.script.startswith("-m ") and not Path(args.script).is_file():
        raise Stop(BAD_INPUT, f"there is no file {args.script}")
    folder = args.out or "everybyte-run"
    try:
        watching = watch.Watch(folder, args.events or watch.EVENTS)
    except OSError as error:
        raise Stop(BAD_INPUT, f"{folder} cannot be written: {error.strerror or error}") from None
    watching.begin()
    try:
        ended = as_main.run(args.script, args.arguments)
    except ImportError as error:
        watching.finish()
        raise Stop(BAD_INPUT, f"{error}: run in the folder from which it can be imported") from None
    tell = partial(watching.tell, ended, script=args.script, arguments=args.arguments)
    if ended is None or isinstance(ended, SystemExit):
        tell()
    else:
        as_main.leaving(ended, tell)
    return {}, (), ended
