"""The command line: `everybyte trace MODULE:FUNCTION`, `everybyte snapshot FILE` and `everybyte audit [LEDGER ...]`.

A thin face of the library; the book's page `cli` says what its JSON holds. Exit codes: 0 done, 1 the answer is no, 2
bad input, 3 cannot say; any but 0 comes with one line on stderr that says what is wrong and how to mend it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock

from torch import nn

from . import attribution, gpus, workspace
from . import audit as ledgers
from .allocator import Allocator, OutOfMemory, Replay
from .caching import MIN_BLOCK
from .snapshot import Comparison, Names, Snapshot
from .timeline import Timeline
from .trace import Trace, trace
from .units import format_bytes
from .values import DataDependentShape

SCHEMA: Final = 1
"""Version of the JSON: it grows when a key goes or changes its meaning, not when one is added."""

NO, BAD_INPUT, CANNOT_SAY = 1, 2, 3
STEPS: Final = 3  # traced unless said otherwise
LONGEST_TABLE: Final = 12  # rows
LONGEST_LINE: Final = 1_000  # characters of an error


class Stop(Exception):
    """Ends the command with an exit code and one line."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


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
        _print(f"everybyte: {_printable(str(stop), LONGEST_LINE)}", sys.stderr)
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

    trace = commands.add_parser(
        "trace",
        help="what a training step would allocate on a GPU, traced without one",
        description="Whether a training step fits on a GPU, and whose the memory is at its peak. Nothing is computed.",
        allow_abbrev=False,
    )
    trace.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="or file.py:FUNCTION. FUNCTION() builds the model and returns a step, a function without arguments; or it "
        "runs everything itself and returns nothing",
    )
    trace.add_argument("--gpu", help=f"such as a4000, t4 or 3050ti; {gpus.DEFAULT} unless given")
    trace.add_argument("--steps", type=_count, metavar="N", help=f"how often to run the step; {STEPS} unless given")
    trace.add_argument("--snapshot", type=_new_file, metavar="OUT", help="write a snapshot for PyTorch's memory viewer")
    trace.add_argument("--parquet", type=_new_file, metavar="OUT", help="write the timeline, an event a row")
    trace.add_argument("--traceback", action="store_true", help="show all of an error of the code that is traced")
    trace.set_defaults(command=_trace)

    snapshot = commands.add_parser(
        "snapshot",
        help="explain a memory snapshot recorded on a GPU",
        description="What was live at the peak of a recorded run and whose it was, how far memory was fragmented, and "
        "what other settings of the allocator would have reserved. FILE is never trusted: nothing in it is run.",
        allow_abbrev=False,
    )
    snapshot.add_argument("file", metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    snapshot.add_argument("--device", type=int, metavar="N", help="which GPU; the one with most events unless given")
    snapshot.add_argument(
        "--what-if",
        action="append",
        type=_settings,
        metavar="SETTING=VALUE[,...]",
        help="other settings of PYTORCH_CUDA_ALLOC_CONF, or total=16GiB; may be given several times",
    )
    snapshot.set_defaults(command=_snapshot)

    audit = commands.add_parser(
        "audit",
        help="recompute a document's claims and judge them",
        description="Recomputes each claim of a ledger and says what it is worth. A ledger may name a Python file, "
        "which is run.",
        allow_abbrev=False,
    )
    audit.add_argument(
        "files", metavar="LEDGER", nargs="*", help="a TOML file; those of the two analyses of the book unless given"
    )
    audit.set_defaults(command=_audit)

    for command in (trace, snapshot, audit):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


# -- settings ----------------------------------------------------------------------------------------------------------


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


def _divisions(text: str) -> int | dict[str, int]:
    if not text.startswith("["):
        return int(text)
    pairs = [entry.split(":") for entry in text[1:-1].split(",")]
    return {start.strip(): int(steps) for start, steps in pairs}


_SETTINGS: Final[Mapping[str, Callable[[str], Any]]] = {
    "expandable_segments": _switch,
    "max_split_size_mb": int,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": float,
    "per_process_memory_fraction": float,
    "max_non_split_rounding_mb": int,
    "large_segment_size_mb": int,
    "total": str,
    "gpu": str,
}


def _settings(text: str) -> dict[str, Any]:
    """Settings as `PYTORCH_CUDA_ALLOC_CONF` has them, with "=" or ":" between name and value."""
    settings = {}
    for entry in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) or [text]:
        name, _, value = re.sub(r"^(\w+):", r"\1=", entry.strip()).partition("=")
        if name not in _SETTINGS:
            raise argparse.ArgumentTypeError(f"no setting {name!r}; there are {', '.join(_SETTINGS)}")
        try:
            settings[name] = _SETTINGS[name](value)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{name} cannot be {value!r}") from None
    return settings


def _allocator(recorded: Mapping[str, Any], others: Mapping[str, Any]) -> Allocator:
    try:
        return Allocator(**{**recorded, **others})
    except (ValueError, TypeError) as error:
        raise Stop(BAD_INPUT, str(error)) from None


Answer = tuple[dict[str, Any], Iterable[str], Stop | None]  # the JSON, the lines, why it is no plain yes

# -- trace -------------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of steps is a positive whole number, not {text!r}")
    return int(text)


def _new_file(text: str) -> Path:
    path = Path(text)
    reasons = {
        "it is a folder": path.is_dir(),
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "it is a program": path.suffix == ".py",
    }
    for reason, holds in reasons.items():
        if holds:
            raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}")
    return path


def _trace(args: argparse.Namespace) -> Answer:
    try:
        gpu = gpus.find(args.gpu or gpus.DEFAULT)
    except ValueError as error:
        raise Stop(BAD_INPUT, str(error)) from None
    if args.snapshot and args.snapshot == args.parquet:
        raise Stop(BAD_INPUT, f"--snapshot and --parquet both name {args.snapshot}: give each a file of its own")
    run, remarks = _traced(args, gpu)
    timeline = run.timeline
    if not len(timeline):
        raise Stop(BAD_INPUT, f"{args.target} put nothing on the GPU: does it ask for device='cpu'?")
    steps = timeline.info["steps"]
    if args.steps and not steps:
        remarks.append(f"--steps {args.steps} was not used: {args.target} returned no step to repeat")
    whole = timeline.with_workspaces()  # what the allocator gets to see
    _written(args.snapshot, lambda path: whole.to_snapshot(path, Allocator(gpu=gpu)))
    _written(args.parquet, timeline.to_parquet)

    needs = Allocator().replay(whole)
    notes = {
        "not_covered": sorted(run.not_covered),
        "conditional": list(run.conditional),
        "left_out": sorted(run.left_out),
        "remarks": [*remarks, *run.remarks],
    }
    verdict, failure, stop = _verdict(needs, whole, gpu, list(_unsure(notes)))
    step, phase = timeline.table.select(["step", "phase"]).slice(timeline.peak, 1).to_pylist()[0].values()
    answer = {
        "schema": SCHEMA,
        "function": args.target,
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
        "peak_allocated": needs.peak_allocated,
        "peak_rounded": timeline.rounded(MIN_BLOCK).peak_bytes,
        "peak_requested": timeline.peak_bytes,
        "peak_reserved": needs.peak_reserved,
        "fragmentation": asdict(needs.fragmentation),
        "out_of_memory": failure and asdict(failure),
        "peak": {"event": timeline.peak, "step": step, "phase": phase},
        **{f"by_{key}": _by(timeline, key) for key in ("category", "module", "op")},
        "workspaces": [asdict(taken) for taken in run.workspaces],
        **notes,
    }
    return answer, _trace_lines(answer, run, needs), stop


def _written(path: Path | None, write: Callable[[Path], None]) -> None:
    try:
        if path is not None:
            write(path)
    except OSError as error:
        raise Stop(BAD_INPUT, f"{path} cannot be written: {error.strerror or error}") from None


def _traced(args: argparse.Namespace, gpu: gpus.GPU) -> tuple[Trace, list[str]]:
    """Runs the user's function in a trace; what it prints goes to the error output. With it what is worth knowing."""
    where, _, name = args.target.rpartition(":")
    if not where or not name:
        raise Stop(BAD_INPUT, f"{args.target!r} names no function: write MODULE:FUNCTION or file.py:FUNCTION")
    run, remarks = trace(rules="cuda", gpu=gpu), []
    try:
        with _on_stderr(), _as_a_script(where), run:
            step = _called(_function(where, name), args.target)
            if callable(step) and not isinstance(step, nn.Module):
                for _ in run.steps(args.steps or STEPS):
                    _called(step, f"the step of {args.target}")
            elif step is not None:
                what = f"a {type(step).__name__}, which is no step"
                remarks.append(f"{args.target} returned {what}: it was taken to have run everything")
            del step
        return run, remarks
    except Stop:
        raise
    except (Exception, SystemExit) as error:
        if args.traceback:
            traceback.print_exc()
        ours, line = attribution.is_ours(error), attribution.line_of(error)
        message = " ".join([str(error), *getattr(error, "__notes__", ())])
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            message = f"the code ended itself with exit code {error.code}; it gets no arguments: set its options in it"
        elif not ours:
            message = f"{type(error).__name__}: {message}"
        if line and not re.match(r"\S+:\d+: ", message):
            message = f"{line}: {message}"
        cannot = isinstance(error, DataDependentShape) or (ours and isinstance(error, NotImplementedError))
        cannot = cannot or bool(run.conditional)  # who knows whether a real run comes there
        raise Stop(CANNOT_SAY if cannot else BAD_INPUT, message) from None


@contextmanager
def _on_stderr() -> Iterator[None]:
    """What the code prints, and what programs print that it starts, goes to the error output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _called(function: Callable[[], Any], name: str) -> Any:
    """What the function returns; nothing if it ends with `sys.exit()`, as a script may."""
    try:
        made = function()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None
    if inspect.iscoroutine(made) or inspect.isgenerator(made):
        made.close()
        raise Stop(BAD_INPUT, f"{name} is a generator or a coroutine, of which nothing has run: write a plain function")
    return made


@contextmanager
def _as_a_script(where: str) -> Iterator[None]:
    """Modules beside the script, or in the working folder, can be imported; the arguments, being ours, are hidden."""
    folder = str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd())
    with mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.object(sys, "argv", [where]):
        yield


def _function(where: str, name: str) -> Callable[[], Any]:
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise Stop(BAD_INPUT, f"there is no file {where}")
        spec = spec_from_file_location(f"{Path(where).stem} (traced)", where)
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        hint = f"run in its folder, or write path/to/file.py:{name}"
        if not all(part.isidentifier() for part in where.split(".")):
            raise Stop(BAD_INPUT, f"there is no module {where}: {hint}")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise Stop(BAD_INPUT, f"there is no module {error.name}: {hint}") from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "what only runs as __main__ must go into one"
        raise Stop(BAD_INPUT, f"{where} has no function {name}; {hint}") from None


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


def _by(timeline: Timeline, key: str) -> list[dict[str, Any]]:
    table = timeline.by(key)
    rows = zip(table.index, table["nbytes"].tolist(), table["storages"].tolist(), strict=True)
    return [{key: name, "bytes": nbytes, "storages": count} for name, nbytes, count in rows]


def _trace_lines(answer: Mapping[str, Any], run: Trace, needs: Replay) -> Iterator[str]:
    gpu, peak, steps = run.gpu, answer["peak"], answer["steps"]
    where = f"{gpu.name}{' (--gpu chooses another)' if answer['assumed'] else ''}"
    times = f"{steps} step{'s' * (steps > 1)}" if steps else "one run"
    yield _printable(f"{answer['function']} on {where}, {times}: {answer['verdict']}")
    yield ""
    yield from _peaks(answer)
    context = f"less {gpu.context[0]:,} to {gpu.context[1]:,} B for a context"
    yield f"memory          {format_bytes(gpu.total):>46}  {context}"
    yield ""
    yield f"When most is reserved: {needs.fragmentation}."
    when = f"step {peak['step']}, {peak['phase']}" if peak["step"] >= 0 else f"event {peak['event']:,}"
    for key in ("category", "module", "op"):
        yield ""
        yield f"Requested at the peak ({when}), by {key}:"
        rows = [(row["bytes"], row["storages"], row[key] or "(outside any module)") for row in answer[f"by_{key}"]]
        yield from _table(rows if len(rows) <= LONGEST_TABLE else _alike(rows))
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
            yield from (f"  {_printable(note, LONGEST_LINE)}" for note in notes)


# -- snapshot ----------------------------------------------------------------------------------------------------------


def _snapshot(args: argparse.Namespace) -> Answer:
    try:
        snapshot = Snapshot.read(args.file)
        counts = {device: len(snapshot.traces.get(device, ())) for device in snapshot.devices}
        device = max(counts, key=counts.get, default=None) if args.device is None else args.device
        comparison = snapshot.compare(device)
        timeline = snapshot.timeline.on(f"cuda:{device}")
    except (ValueError, OSError) as error:
        message = f"{args.file}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise Stop(BAD_INPUT, message) from None
    scenarios = args.what_if or [{"expandable_segments": not snapshot.settings.get("expandable_segments", False)}]
    replays = [(what_if, _allocator(snapshot.settings, what_if).replay(timeline)) for what_if in ({}, *scenarios)]
    found = comparison.as_dict()
    for failure in found["out_of_memory"]:
        failure["op"], failure["line"] = Names()(snapshot.traces[device][failure["event"]].frames)
    answer = {
        "schema": SCHEMA,
        "file": os.fsencode(args.file).decode("utf-8", "replace"),
        "device": device,
        "devices": list(snapshot.devices),
        "events": counts.get(device, 0),
        "settings": dict(snapshot.settings),
        **found,
        "fragmentation": found["fragmentation"][0] if found["fragmentation"] else None,
        "live_at_peak": _live_at_peak(timeline),
        "replayed": _replay_as_dict({}, replays[0][1]),
        "what_if": [_replay_as_dict(what_if, replay) for what_if, replay in replays[1:]],
    }
    return answer, _snapshot_lines(answer, comparison, replays), None


def _live_at_peak(timeline: Timeline) -> list[dict[str, Any]]:
    """Who holds the peak, largest first: by function and line; what has no stack by its size."""
    if not len(timeline):
        return []
    live = timeline.live(timeline.peak).astype({"op": str, "line": str})
    live["each"] = live["nbytes"].where((live["op"] == "") & (live["line"] == ""), 0)
    groups = live.groupby(["op", "line", "each"])["nbytes"].agg(["sum", "count"])
    groups = groups.sort_values("sum", ascending=False, kind="stable")
    return [
        {"op": op, "line": line, "bytes": int(nbytes), "allocations": int(count)}
        for (op, line, _), nbytes, count in zip(groups.index, groups["sum"], groups["count"], strict=True)
    ]


def _replay_as_dict(settings: Mapping[str, Any], replay: Replay) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "peak_allocated": replay.peak_allocated,
        "peak_reserved": replay.peak_reserved,
        "segment_events": len(replay.segment_events),
        "fragmentation": replay.fragmentation and asdict(replay.fragmentation),
        "out_of_memory": replay.out_of_memory and asdict(replay.out_of_memory),
    }


def _snapshot_lines(
    answer: Mapping[str, Any], comparison: Comparison, replays: Sequence[tuple[Mapping[str, Any], Replay]]
) -> Iterator[str]:
    rows = answer["live_at_peak"]
    yield _printable(f"{answer['file']}: GPU {answer['device']}, {answer['events']:,} events")
    others = [str(device) for device in answer["devices"] if device != answer["device"]]
    if others:
        yield f"It also holds GPU {', '.join(others)}: choose with --device."
    yield ""
    yield from _peaks(asdict(comparison.recorded))
    yield ""
    yield comparison.explain()
    for fragmentation in comparison.fragmentation:
        yield f"When most was reserved: {fragmentation}."
    for failure, row in zip(comparison.out_of_memory[-1:], answer["out_of_memory"][-1:], strict=True):
        who = f"{row['line']} {row['op']}".strip()
        yield f"In the recording: {failure}{_printable(who and f', asked for by {who}')}."
        if len(comparison.out_of_memory) > 1:
            yield f"Before it, {len(comparison.out_of_memory) - 1:,} other requests failed."
    yield ""
    yield f"Live at the peak of what was requested, {sum(row['allocations'] for row in rows):,} allocations:"
    yield from _table((row["bytes"], row["allocations"], _who(row)) for row in rows)
    yield ""
    yield "The same allocations on an empty GPU would peak at:"
    for what_if, replay in replays:
        settings = ", ".join(f"{name}={value}" for name, value in what_if.items()) or "the recording's settings"
        reserved = f"{format_bytes(replay.peak_reserved)} reserved, {format_bytes(replay.peak_allocated)} allocated"
        yield f"  {settings}: {reserved}{f'; {replay.out_of_memory}' if replay.out_of_memory else ''}"


def _who(row: Mapping[str, Any]) -> str:
    if row["op"] or row["line"]:
        return f"{row['line']} {row['op']}".strip()
    each = row["bytes"] // row["allocations"]
    size = ", the size of cuBLAS's workspace" if each == workspace.DEFAULT else ""
    return f"no stack recorded, {each:,} B each{size}"


# -- audit -------------------------------------------------------------------------------------------------------------


def _audit(args: argparse.Namespace) -> Answer:
    documents, changed = [], []
    for file in args.files or ledgers.packaged():
        try:
            with _on_stderr():
                ledger = ledgers.Ledger.read(file)
                findings = list(ledger.audit())
        except ledgers.LedgerError as error:
            raise Stop(BAD_INPUT, str(error)) from None
        except OSError as error:
            raise Stop(BAD_INPUT, f"{file}: {error.strerror or error}") from None
        documents.append({
            "ledger": os.fsencode(file).decode("utf-8", "replace"),
            "document": ledger.document,
            "claims": [finding.as_dict() for finding in findings],
            "counts": {verdict: sum(f.verdict == verdict for f in findings) for verdict in ledgers.VERDICTS},
        })  # fmt: skip
        changed += [finding for finding in findings if finding.changed]
    answer = {"schema": SCHEMA, "documents": documents, "changed": len(changed)}
    if not changed:
        return answer, _audit_lines(documents), None
    what = "; ".join(f"claim {f.claim.id} is now {f.verdict!r}, not {f.claim.verdict!r}" for f in changed)
    return answer, _audit_lines(documents), Stop(NO, f"{what}: mend the ledger, or what it calls")


def _audit_lines(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for document in documents:
        yield f"{_printable(document['document'])}, {len(document['claims'])} claims"
        yield ""
        for row in document["claims"]:
            value = f"{row['stated']} -> {row['text'] or 'nothing to recompute'}"
            basis = f" ({row['basis']})" if row["basis"] else ""
            was = f" (the ledger says {row['stored']})" if row["changed"] else ""
            yield _printable(f"{row['id']:>6}  {row['verdict']:17}{was}  {value}{basis}  {row['claim']}", LONGEST_LINE)
        yield ""
        yield ", ".join(f"{count} {verdict}" for verdict, count in document["counts"].items() if count)
        yield ""


# -- text --------------------------------------------------------------------------------------------------------------


def _printable(text: str, most: int = 120) -> str:
    """A text without line breaks, control characters and excess, safe for a terminal."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def _alike(rows: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The rows of `blocks.0.mlp`, `blocks.1.mlp`, ... as one of `blocks.*.mlp`."""
    sums: dict[str, tuple[int, int]] = {}
    for nbytes, count, name in rows:
        alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        before = sums.get(alike, (0, 0))
        sums[alike] = before[0] + nbytes, before[1] + count
    return sorted(((*both, name) for name, both in sums.items()), reverse=True)


def _peaks(peaks: Mapping[str, int]) -> Iterator[str]:
    for name, meaning in (
        ("allocated", "whole blocks, as torch.cuda.max_memory_allocated reports"),
        ("rounded", "each request rounded to 512 B"),
        ("requested", "what was asked for"),
        ("reserved", "segments, as torch.cuda.max_memory_reserved reports"),
    ):
        yield f"peak {name:9}  {format_bytes(peaks[f'peak_{name}']):>46}  {meaning}"


def _table(rows: Iterable[tuple[int, int, str]], most: int = LONGEST_TABLE) -> Iterator[str]:
    """Bytes, share, number of storages and name, largest first; what is beyond `most` rows as one."""
    rows = list(rows)
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows = [*rows[: most - 1], (sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest):,} others")]
    total = sum(nbytes for nbytes, *_ in rows) or 1
    for nbytes, count, name in rows:
        yield f"  {format_bytes(nbytes):>46}  {nbytes / total:6.1%}  {count:>7,} ×  {_printable(name)}"
