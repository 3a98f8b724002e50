"""The command line: `everybyte snapshot FILE`. What it prints and what its JSON holds is on the book's page `cli`.

A thin face of the library. Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 cannot say; other than 0 comes with
one line on stderr that says what and how to mend it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NoReturn

from .allocator import Allocator, Replay
from .snapshot import Comparison, Snapshot
from .timeline import Timeline
from .units import format_bytes

SCHEMA: Final = 1
"""Version of the JSON: it grows when a key goes or changes its meaning, not when one is added."""

NO, BAD_INPUT, CANNOT_SAY = 1, 2, 3
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

    for command in (snapshot,):
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


# -- snapshot ----------------------------------------------------------------------------------------------------------

Answer = tuple[dict[str, Any], Iterable[str], Stop | None]  # the JSON, the lines, why it is no plain yes


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
    answer = {
        "schema": SCHEMA,
        "file": os.fsencode(args.file).decode("utf-8", "replace"),
        "device": device,
        "devices": list(snapshot.devices),
        "events": counts.get(device, 0),
        "settings": dict(snapshot.settings),
        **comparison.as_dict(),
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
        for (op, line, _), nbytes, count in groups.itertuples()
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
    peaks, rows = comparison.recorded, answer["live_at_peak"]
    yield _printable(f"{answer['file']}: GPU {answer['device']}, {answer['events']:,} events")
    others = [str(device) for device in answer["devices"] if device != answer["device"]]
    if others:
        yield f"It also holds GPU {', '.join(others)}: choose with --device."
    yield ""
    for name, nbytes, meaning in (
        ("allocated", peaks.peak_allocated, "whole blocks, as torch.cuda.max_memory_allocated reports"),
        ("rounded", peaks.peak_rounded, "each request rounded to 512 B"),
        ("requested", peaks.peak_requested, "what was asked for"),
        ("reserved", peaks.peak_reserved, "segments, as torch.cuda.max_memory_reserved reports"),
    ):
        yield f"peak {name:9}  {format_bytes(nbytes):>46}  {meaning}"
    yield ""
    yield comparison.explain()
    for fragmentation in comparison.fragmentation:
        yield f"When most was reserved: {fragmentation}."
    for failure in comparison.out_of_memory[-1:]:
        yield f"In the recording: {failure}."
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
    return f"no stack recorded, {row['bytes'] // row['allocations']:,} B each"


# -- text --------------------------------------------------------------------------------------------------------------


def _printable(text: str, most: int = 120) -> str:
    """A text without line breaks, control characters and excess, safe for a terminal."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def _table(rows: Iterable[tuple[int, int, str]], most: int = LONGEST_TABLE) -> Iterator[str]:
    """Bytes, share, number of storages and name, largest first; what is beyond `most` rows as one."""
    rows = list(rows)
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows = [*rows[: most - 1], (sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest):,} others")]
    total = sum(nbytes for nbytes, *_ in rows) or 1
    for nbytes, count, name in rows:
        yield f"  {format_bytes(nbytes):>46}  {nbytes / total:6.1%}  {count:>7,} ×  {_printable(name)}"
