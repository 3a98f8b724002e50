"""`everybyte trace script.py ARGS`: would this run fit on that GPU, and whose is the memory at its peak?

The user's program runs in a trace (`everybyte.forecast`); what it prints goes to the error output.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
from pathlib import Path
from typing import Any

from .. import figures, gpus, page
from ..allocator import Allocator
from ..forecast import Forecast
from ..gpus import GPU
from ..script import PHASES, Failed, Program
from ..verdict import DOES_NOT_FIT, FITS, TIGHT, Verdict
from . import BAD_INPUT, CANNOT_SAY, NO, Answer, AsModule, Stop, new_file, on_stderr, written


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte trace`."""
    parser = commands.add_parser(
        "trace",
        help="what a training script would allocate on a GPU, traced without one",
        description="Whether a training run fits on a GPU, and whose the memory is at its peak. Nothing is computed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        metavar="PROGRAM",
        help="script.py, run unedited; or MODULE:FUNCTION or file.py:FUNCTION: FUNCTION() builds the model and returns "
        "a step, a function without arguments; or it runs everything itself and returns nothing",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, action=_Rest, metavar="ARGS", help="the script's own")
    parser.add_argument("-m", dest="target", action=AsModule, help="a module that runs as a script, and its arguments")
    parser.add_argument("--gpu", help=f"such as a4000, t4 or 3050ti; {gpus.DEFAULT} unless given")
    parser.add_argument(
        "--steps", type=_count, metavar="N", help=f"end after N steps of the optimizer; {Program.steps} unless given"
    )
    parser.add_argument(
        "--phase", choices=PHASES, default="train", help="what of a script matters: its training unless given"
    )
    parser.add_argument("--snapshot", type=new_file, metavar="OUT", help="write a snapshot for PyTorch's memory viewer")
    parser.add_argument("--parquet", type=new_file, metavar="OUT", help="write the timeline, an event a row")
    parser.add_argument(
        "--html", type=new_file, metavar="OUT", help="write a report, one file that opens in any browser"
    )
    parser.add_argument("--figure", type=_new_figure, metavar="OUT", help="draw it: a .png, .svg or .pdf")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the verdict alone: no largest batch, no edits tried, each a trace of its own",
    )
    parser.add_argument("--traceback", action="store_true", help="show all of an error of the code that is traced")
    parser.set_defaults(command=_answer)
    return parser


class _Rest(argparse.Action):
    """What follows the program: a script's own arguments, or after a function more of our options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.arguments = ()
        if namespace.target.endswith(".py"):
            namespace.arguments = tuple(values)
        elif values and "again" in namespace:
            parser.error(f"unrecognized arguments: {' '.join(values)}")
        elif values:
            namespace.again, target = True, namespace.target
            parser.parse_args([*values, target], namespace)
            if namespace.target != target:
                parser.error(f"unrecognized arguments: {namespace.target}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of steps is a positive whole number, not {text!r}")
    return int(text)


def _new_figure(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is no name for a figure: let it end in .png, .svg or .pdf")
    return new_file(text)


def _answer(args: argparse.Namespace) -> Answer:
    try:
        gpu = gpus.find(gpus.DEFAULT if args.gpu is None else args.gpu)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    files = {
        option: getattr(args, option) for option in ("snapshot", "parquet", "html", "figure") if getattr(args, option)
    }
    for one, other in itertools.combinations(files, 2):
        if files[one] == files[other]:
            raise Stop(BAD_INPUT, f"--{one} and --{other} both name {files[one]}: give each a file of its own")
    forecast = _traced(_program(args), gpu, args)
    if args.steps and not forecast.steps:
        why = "stepped no optimizer" if forecast.program.is_script else "returned no step to repeat"
        forecast = forecast.remarked(f"--steps {args.steps} was not used: {args.target} {why}")
    written(args.snapshot, lambda path: forecast.whole.to_snapshot(path, Allocator(gpu=gpu)))
    written(args.parquet, forecast.timeline.to_parquet)
    written(args.figure, lambda path: figures.overview(forecast.timeline).savefig(path))
    if forecast.is_sure and not args.quick:
        if sys.stderr.isatty():
            print("The verdict is there; now the largest batch that fits and what would help ...", file=sys.stderr)
        forecast = forecast.advised()
    answer = forecast.answer
    written(args.html, lambda path: path.write_text(page.html(answer, forecast.timeline), encoding="utf-8"))
    return answer, forecast.lines(), _stop(forecast.verdict)


def _program(args: argparse.Namespace) -> Program:
    try:
        return Program(args.target, args.arguments, args.steps or Program.steps, args.phase)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None


def _traced(program: Program, gpu: GPU, args: argparse.Namespace) -> Forecast:
    """Traces the user's program; what it prints goes to the error output."""
    try:
        with on_stderr():
            return Forecast.of(program, gpu, assumed=args.gpu is None)
    except Failed as error:
        if args.traceback and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise Stop(CANNOT_SAY if error.cannot_say else BAD_INPUT, str(error)) from None


def _stop(verdict: Verdict) -> Stop | None:
    codes = {FITS: None, TIGHT: None, DOES_NOT_FIT: NO}
    code = codes.get(verdict.word, CANNOT_SAY)
    return None if code is None else Stop(code, verdict.why)
