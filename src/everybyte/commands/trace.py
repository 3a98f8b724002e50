"""`everybyte trace script.py ARGS`: would this run fit on that GPU, and whose is the memory at its peak?

The user's program runs in a trace; what it prints goes to the error output. Its timeline, with the workspaces of
cuBLAS added, then goes through the allocator twice: beside the smallest and beside the largest CUDA context. Only where
both agree is the answer yes or no.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import answers, figures, gpus, page, workspace
from ..allocator import Allocator, Replay
from ..caching import MIN_BLOCK
from ..changes import Loaders
from ..names import alike, printable
from ..script import PHASES, Failed, Program, Ran
from ..trace import Trace
from ..trials import Advice, Trial, Trials
from ..units import format_bytes
from ..verdict import DOES_NOT_FIT, FITS, TIGHT, Verdict, doubts, judge, steps_until
from . import BAD_INPUT, CANNOT_SAY, NO, SCHEMA, Answer, Stop, new_file, on_stderr, written
from .text import LONGEST_LINE, LONGEST_TABLE, peaks, table


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
    program, loaders = _program(args), Loaders()
    ran = _traced(program, gpu, loaders, args.traceback)
    run, remarks = ran.run, list(ran.remarks)
    timeline = run.timeline
    if not len(timeline):
        raise Stop(BAD_INPUT, f"{args.target} put nothing on the GPU: does it ask for device='cpu'?")
    steps = timeline.info["steps"]
    if args.steps and not steps:
        why = "stepped no optimizer" if args.target.endswith(".py") else "returned no step to repeat"
        remarks.append(f"--steps {args.steps} was not used: {args.target} {why}")
    whole = timeline.with_workspaces()  # what the allocator gets to see
    written(args.snapshot, lambda path: whole.to_snapshot(path, Allocator(gpu=gpu)))
    written(args.parquet, timeline.to_parquet)
    written(args.figure, lambda path: figures.overview(timeline).savefig(path))

    unsure = doubts(run.not_covered, run.conditional)
    verdict = judge(whole, gpu, unsure, goes_on=ran.goes_on)
    advice = Advice({}, ())
    if not (args.quick or unsure or (ran.goes_on and steps_until(verdict.left[0], whole) is not None)):
        try:
            advice = _advice(program, gpu, Trial.of(verdict, loaders, steps))
        except (BrokenExecutor, EOFError):
            remarks.append("what would help is not known: a trial's process was killed, perhaps as it filled the host")
    notes = {
        "not_covered": sorted(run.not_covered),
        "conditional": list(run.conditional),
        "left_out": sorted(run.left_out),
        "remarks": [*remarks, *run.remarks],
    }
    needs = verdict.replay
    answer = {
        "schema": SCHEMA,
        "function": args.target,
        "arguments": list(args.arguments),
        "ended": ran.ended,
        "gpu": {
            "key": gpu.key,
            "name": gpu.name,
            "total": gpu.total,
            "usable_at_least": gpu.usable[0],
            "usable_at_most": gpu.usable[1],
        },
        "assumed": args.gpu is None,
        "steps": steps,
        "verdict": verdict.word,
        "reason": verdict.why or None,
        "needs": verdict.needs,
        "left": {"at_least": verdict.left[0], "at_most": verdict.left[1]},
        "largest": {
            kind: {
                "now": one.now,
                "fits": one.size,
                "bytes": one.nbytes or None,
                "next_bytes": one.next_nbytes or None,
                "next_reason": one.next_why or None,
            }
            for kind, one in advice.largest.items()
        },
        "levers": [
            {
                "name": pulled.lever.name,
                "saves": needs.peak_reserved - pulled.trial.nbytes,
                "peak_reserved": pulled.trial.nbytes,
                "fits": pulled.trial.fits,
                "costs": pulled.lever.costs,
                "edit": dict(pulled.lever.edit),
            }
            for pulled in advice.levers
        ],
        "peak_allocated": needs.peak_allocated,
        "peak_rounded": timeline.rounded(MIN_BLOCK).peak_bytes,
        "peak_requested": timeline.peak_bytes,
        "peak_reserved": needs.peak_reserved,
        "fragmentation": asdict(needs.fragmentation),
        "out_of_memory": verdict.failure and asdict(verdict.failure),
        "peak": answers.moment(timeline, timeline.peak, "step", "phase", "op", "module", "line"),
        **{f"by_{key}": answers.by(timeline, key) for key in ("category", "module", "op", "line")},
        "saved_for_backward": answers.saved_for_backward(timeline),
        "growth_per_step": answers.growth_per_step(timeline),
        "workspaces": [asdict(taken) for taken in run.workspaces],
        **notes,
    }
    written(args.html, lambda path: path.write_text(page.html(answer, timeline), encoding="utf-8"))
    return answer, _lines(answer, run, needs), _stop(verdict)


def _program(args: argparse.Namespace) -> Program:
    try:
        return Program(args.target, args.arguments, args.steps or Program.steps, args.phase)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None


def _traced(program: Program, gpu: gpus.GPU, loaders: Loaders, show: bool) -> Ran:
    """Runs the user's program in a trace; what it prints goes to the error output."""
    try:
        with on_stderr():
            return program.trace(gpu, changes=[loaders.watched()])
    except Failed as error:
        if show:
            traceback.print_exception(error.__cause__)
        raise Stop(CANNOT_SAY if error.cannot_say else BAD_INPUT, str(error)) from None


def _advice(program: Program, gpu: gpus.GPU, plain: Trial) -> Advice:
    if sys.stderr.isatty():
        print("The verdict is there; now the largest batch that fits and what would help ...", file=sys.stderr)
    with Trials(program, gpu) as trials:
        return trials.advice(plain)


def _stop(verdict: Verdict) -> Stop | None:
    codes = {FITS: None, TIGHT: None, DOES_NOT_FIT: NO}
    code = codes.get(verdict.word, CANNOT_SAY)
    return None if code is None else Stop(code, verdict.why)


def _first(answer: Mapping[str, Any]) -> Iterator[str]:
    """What one wants to know first: how much is left or missing, where the peak is, what fits, what helps."""
    least, most = answer["left"]["at_least"], answer["left"]["at_most"]
    if most < 0:
        yield f"missing         {format_bytes(-most):>46}  at least, {-least:,} B at most"
    else:
        yield f"left            {format_bytes(max(least, 0)):>46}  at least, {most:,} B at most"
    peak = answer["peak"]
    at = " in ".join(filter(None, [peak["line"], peak["module"]]))
    yield printable(f"peak at         {at or peak['op']}")
    for kind, one in answer["largest"].items():
        more = ""
        if one["next_bytes"]:
            more = f"; {one['fits'] + 1:,} needs {format_bytes(one['next_bytes'])}"
        elif one["next_reason"]:
            more = f"; {one['fits'] + 1:,} cannot be traced: {one['next_reason']}"
        yield printable(f"largest {kind.replace('_', ' ')} that fits: {one['fits']:,} (now {one['now']:,}{more})")
    if answer["levers"]:
        yield ""
        yield "What would make it smaller, each traced again alone (--html and --json say what to write):"
        for one in answer["levers"]:
            fits = "it fits" if one["fits"] else "it does not fit yet"
            yield f"  {format_bytes(one['saves']):>46}  {one['name']}: {fits}"


def _lines(answer: Mapping[str, Any], run: Trace, needs: Replay) -> Iterator[str]:
    gpu, peak, steps = run.gpu, answer["peak"], answer["steps"]
    where = f"{gpu.name}{' (--gpu chooses another)' if answer['assumed'] else ''}"
    times = f"{steps} step{'s' * (steps > 1)}" if steps else "one run"
    yield printable(f"{answer['function']} on {where}, {times}: {answer['verdict']}")
    yield ""
    yield from _first(answer)
    yield ""
    yield from peaks(answer)
    context = f"less {gpu.context[0]:,} to {gpu.context[1]:,} B for a context"
    yield f"memory          {format_bytes(gpu.total):>46}  {context}"
    yield ""
    yield f"When most is reserved: {needs.fragmentation}."
    when = f"step {peak['step']}, {peak['phase']}" if peak["step"] >= 0 else f"event {peak['event']:,}"
    for key in ("category", "module", "op"):
        yield ""
        yield f"Requested at the peak ({when}), by {key}:"
        rows = [(row["bytes"], row["storages"], row[key] or "(outside any module)") for row in answer[f"by_{key}"]]
        yield from table(rows if len(rows) <= LONGEST_TABLE else alike(rows))
    for title, notes in (
        ("Beside the tensors, counted in allocated and reserved", [str(taken) for taken in run.workspaces]),
        ("Not covered by any rule", answer["not_covered"]),
        ("Decided by values that no trace knows", answer["conditional"]),
        ("Left out", answer["left_out"]),
        ("Worth knowing", [*answer["remarks"], workspace.beside(gpu)]),
    ):
        if notes:
            yield ""
            yield f"{title}:"
            yield from (f"  {printable(note, LONGEST_LINE)}" for note in notes)
