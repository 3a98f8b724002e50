"""`everybyte sweep NOTEBOOK -p NAME=VALUES --out DIR`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from ..sweep import Interrupted, Outcome, SweepError, run
from . import BAD_INPUT, NO, SCHEMA, Answer, Stop

INTERRUPTED: Final = 130


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the command, and returns its parser."""
    parser = commands.add_parser(
        "sweep",
        help="run a notebook over a grid of parameters",
        description="Runs a notebook by papermill once for each combination of values, and collects what it glues in "
        "OUT/results.parquet. Stopped in any way, the same command goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb with a cell tagged 'parameters'")
    parser.add_argument(
        "-p",
        dest="grid",
        action="append",
        type=_values,
        default=[],
        metavar="NAME=VALUES",
        help="values between commas, and of numbers also ranges start:stop:step, both ends included; once a parameter",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the results")
    parser.add_argument("--zip", action="store_true", help="first values together, then the second ones, and so on")
    parser.add_argument("--append", action="store_true", help="add to the other combinations that DIR holds")
    parser.add_argument("--retry-failed", action="store_true", help="run those again that failed")
    parser.add_argument("--jobs", type=int, metavar="N", help="how many at a time; half the cores unless given")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="run on the workers of this Dask scheduler, as tcp://host:8786"
    )
    parser.add_argument(
        "--resources", type=_resources, metavar="NAME=N[,...]", help="what a worker must offer, such as GPU=1"
    )
    parser.add_argument("--kernel", metavar="NAME", help="a Jupyter kernel in place of the notebook's")
    parser.set_defaults(command=_sweep)
    return parser


def _values(text: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} gives no values: write NAME=VALUES, as in batch_size=4,8,16")
    return name.strip(), values


def _resources(text: str) -> dict[str, float]:
    try:
        pairs = [entry.split("=") for entry in text.split(",")]
        found = {name.strip(): float(number) for name, number in pairs}
    except ValueError:
        found = {}
    if not found or "" in found or not all(0 < number < math.inf for number in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is no resource: write NAME=N, as in GPU=1")
    return found


def _sweep(args: argparse.Namespace) -> Answer:
    names = [name for name, _ in args.grid]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Stop(BAD_INPUT, f"-p {twice[0]} is given twice: put its values in one, with commas")
    try:
        with _Display() as display:
            outcome = run(
                args.notebook,
                dict(args.grid),
                out=args.out,
                zipped=args.zip,
                append=args.append,
                retry_failed=args.retry_failed,
                jobs=args.jobs,
                scheduler=args.scheduler,
                resources=args.resources,
                kernel=args.kernel,
                watch=display,
            )
    except SweepError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    except Interrupted as error:
        raise Stop(INTERRUPTED, f"interrupted: {error}") from None
    answer = {
        "schema": SCHEMA,
        "out": str(outcome.out),
        "combinations": outcome.combinations,
        "ran": outcome.ran,
        "done": outcome.done,
        "failed": len(outcome.errors),
        "errors": dict(outcome.errors),
        "damaged": list(outcome.damaged),
    }
    return answer, _lines(outcome), None if not outcome.errors else Stop(NO, _failed(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    counts = f"{outcome.done} done, {len(outcome.errors)} failed"
    yield f"{outcome.ran:,} run now, of {outcome.combinations:,}: {counts}"
    yield str(outcome.out / "results.parquet")


def _failed(outcome: Outcome) -> str:
    first, error = next(iter(outcome.errors.items()))
    failed = f"{len(outcome.errors)} of {outcome.combinations} failed"
    return f"{failed}, such as {first}: {error}; --retry-failed runs them again"


class _Display:
    """A bar on a terminal, and everywhere a line for each combination that has finished, with the time left."""

    def __enter__(self) -> _Display:
        self.bar, self.start = None, 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, finished: int, of: int, line: str) -> None:
        if self.bar is None:
            from tqdm import tqdm

            form = "{n}/{total} |{bar}| {elapsed}{postfix}"
            self.bar = tqdm(total=of, disable=None, bar_format=form, file=sys.stderr, leave=False)
            self.before = finished
        elif not self.start:  # the workers are there
            self.start = time.monotonic()
        left = ""
        if self.before < finished < of:
            seconds = (time.monotonic() - self.start) / (finished - self.before) * (of - finished)
            left = f"about {_duration(seconds)} left"
        self.bar.n = finished
        self.bar.set_postfix_str(left)
        if line:
            self.bar.write(f"[{finished}/{of}] {line}{left and f'; {left}'}", file=sys.stderr)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
