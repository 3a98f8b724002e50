"""`everybyte trace script.py ARGS`: would this run fit on that GPU, and whose is the memory at its peak?

The user's program runs in a trace; what it prints goes to the error output. Its timeline, with the workspaces of
cuBLAS added, then goes through the allocator twice: beside the smallest and beside the largest CUDA context. Only where
both agree is the answer yes or no.
"""

from __future__ import annotations

import argparse
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import answers, figures, gpus, page, workspace
from ..allocator import Allocator, OutOfMemory, Replay
from ..caching import MIN_BLOCK
from ..names import alike, printable
from ..script import Failed, Program, Ran
from ..timeline import Timeline
from ..trace import Trace
from ..units import format_bytes
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
    parser.add_argument("--snapshot", type=new_file, metavar="OUT", help="write a snapshot for PyTorch's memory viewer")
    parser.add_argument("--parquet", type=new_file, metavar="OUT", help="write the timeline, an event a row")
    parser.add_argument(
        "--html", type=new_file, metavar="OUT", help="write a report, one file that opens in any browser"
    )
    parser.add_argument("--figure", type=_new_figure, metavar="OUT", help="draw it: a .png, .svg or .pdf")
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
    ran = _traced(args, gpu)
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

    needs = Allocator().replay(whole)
    notes = {
        "not_covered": sorted(run.not_covered),
        "conditional": list(run.conditional),
        "left_out": sorted(run.left_out),
        "remarks": [*remarks, *run.remarks],
    }
    verdict, failure, stop = _verdict(needs, whole, gpu, list(_unsure(notes)))
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
        "verdict": verdict,
        "reason": stop and str(stop),
        "left": {
            "at_least": gpu.usable[0] - needs.peak_reserved,
            "at_most": gpu.usable[1] - needs.peak_reserved,
        },
        "peak_allocated": needs.peak_allocated,
        "peak_rounded": timeline.rounded(MIN_BLOCK).peak_bytes,
        "peak_requested": timeline.peak_bytes,
        "peak_reserved": needs.peak_reserved,
        "fragmentation": asdict(needs.fragmentation),
        "out_of_memory": failure and asdict(failure),
        "peak": answers.moment(timeline, timeline.peak, "step", "phase", "op", "module", "line"),
        **{f"by_{key}": answers.by(timeline, key) for key in ("category", "module", "op", "line")},
        "saved_for_backward": answers.saved_for_backward(timeline),
        "growth_per_step": answers.growth_per_step(timeline),
        "workspaces": [asdict(taken) for taken in run.workspaces],
        **notes,
    }
    written(args.html, lambda path: path.write_text(page.html(answer, timeline), encoding="utf-8"))
    return answer, _lines(answer, run, needs), stop


def _traced(args: argparse.Namespace, gpu: gpus.GPU) -> Ran:
    """Runs the user's program in a trace; what it prints goes to the error output."""
    try:
        program = Program(args.target, args.arguments, args.steps or Program.steps)
        with on_stderr():
            return program.trace(gpu)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    except Failed as error:
        if args.traceback:
            traceback.print_exception(error.__cause__)
        raise Stop(CANNOT_SAY if error.cannot_say else BAD_INPUT, str(error)) from None


def _verdict(
    needs: Replay, timeline: Timeline, gpu: gpus.GPU, unsure: Sequence[str]
) -> tuple[str, OutOfMemory | None, Stop | None]:
    """Whether it fits, the request that fails, and why the answer is no plain yes.

    What a CUDA context takes is a range: it fits if it does beside the largest, and does not if it does not beside the
    smallest.
    """
    tight, loose = (Allocator(total=usable).replay(timeline).out_of_memory for usable in gpu.usable)
    if unsure:
        return "cannot say", tight, Stop(CANNOT_SAY, f"cannot say whether it fits: {'; '.join(unsure)}")
    if loose:
        mend = f"it needs {format_bytes(needs.peak_reserved)}: make the batch smaller, recompute, or choose another GPU"
        if Allocator(total=gpu.usable[0], expandable_segments=True).replay(timeline).out_of_memory is None:
            mend = "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits"
        return "does not fit", loose, Stop(NO, f"does not fit on {gpu.name}: {loose}; {mend}")
    if tight:
        least, most = (format_bytes(nbytes) for nbytes in gpu.context)
        why = f"it does if the CUDA context takes {least}, and not if it takes {most}; make the batch a little smaller"
        return "cannot say", tight, Stop(CANNOT_SAY, f"cannot say whether it fits on {gpu.name}: {why}")
    return "fits", None, None


def _unsure(notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if notes["not_covered"]:
        yield f"no rule covers {', '.join(notes['not_covered'])}: leave it out, or measure it on the GPU"
    if notes["conditional"]:
        lines = ", ".join(notes["conditional"])
        yield f"at {lines} a value that no trace knows decides the way, or full memory; figures are of the way taken"


def _lines(answer: Mapping[str, Any], run: Trace, needs: Replay) -> Iterator[str]:
    gpu, peak, steps = run.gpu, answer["peak"], answer["steps"]
    where = f"{gpu.name}{' (--gpu chooses another)' if answer['assumed'] else ''}"
    times = f"{steps} step{'s' * (steps > 1)}" if steps else "one run"
    yield printable(f"{answer['function']} on {where}, {times}: {answer['verdict']}")
    yield ""
    yield from peaks(answer)
    context = f"less {gpu.context[0]:,} to {gpu.context[1]:,} B for a context"
    yield f"memory          {format_bytes(gpu.total):>46}  {context}"
    least, most = answer["left"].values()
    for nbytes, left, lacking in ((least, "left at least", "lacks at most"), (most, "left at most", "lacks at least")):
        yield f"{lacking if nbytes < 0 else left:14}  {format_bytes(abs(nbytes)):>46}"
    yield ""
    when = f"step {peak['step']}, {peak['phase']}" if peak["step"] >= 0 else f"event {peak['event']:,}"
    who = " in ".join(filter(None, [peak["op"], peak["module"]]))
    yield printable(f"The last of the peak was asked for by {who}, at {peak['line'] or 'no line of yours'}.")
    yield f"When most is reserved: {needs.fragmentation}."
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
