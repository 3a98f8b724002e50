"""`everybyte snapshot FILE`: what a recording from a GPU says, and what other settings would have done to it.

The recording is read as data, never trusted. Its allocations are placed anew by the model of the allocator: from the
state that the recording began in, to see whether the model is right about it, and on an empty GPU, to compare settings.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from .. import page, workspace
from ..allocator import Allocator, Replay
from ..names import printable
from ..snapshot import Comparison, Names, Snapshot
from ..timeline import Timeline
from ..units import format_bytes
from . import BAD_INPUT, SCHEMA, Answer, Stop, new_file, written
from .text import peaks, table


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte snapshot`."""
    parser = commands.add_parser(
        "snapshot",
        help="explain a memory snapshot recorded on a GPU",
        description="What was live at the peak of a recorded run and whose it was, how far memory was fragmented, and "
        "what other settings of the allocator would have reserved. FILE is never trusted: nothing in it is run.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    parser.add_argument("--device", type=int, metavar="N", help="which GPU; the one with most events unless given")
    parser.add_argument(
        "--what-if",
        action="append",
        type=_settings,
        metavar="SETTING=VALUE[,...]",
        help="other settings of PYTORCH_CUDA_ALLOC_CONF, or total=16GiB; may be given several times",
    )
    parser.add_argument(
        "--html", type=new_file, metavar="OUT", help="write a report, one file that opens in any browser"
    )
    parser.set_defaults(command=_answer)
    return parser


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


def _answer(args: argparse.Namespace) -> Answer:
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
    written(args.html, lambda path: path.write_text(page.html(answer, timeline), encoding="utf-8"))
    return answer, _lines(answer, comparison, replays), None


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


def _lines(
    answer: Mapping[str, Any], comparison: Comparison, replays: Sequence[tuple[Mapping[str, Any], Replay]]
) -> Iterator[str]:
    rows = answer["live_at_peak"]
    yield printable(f"{answer['file']}: GPU {answer['device']}, {answer['events']:,} events")
    others = [str(device) for device in answer["devices"] if device != answer["device"]]
    if others:
        yield f"It also holds GPU {', '.join(others)}: choose with --device."
    yield ""
    yield from peaks(asdict(comparison.recorded))
    yield ""
    yield comparison.explain()
    for fragmentation in comparison.fragmentation:
        yield f"When most was reserved: {fragmentation}."
    for failure, row in zip(comparison.out_of_memory[-1:], answer["out_of_memory"][-1:], strict=True):
        who = f"{row['line']} {row['op']}".strip()
        yield f"In the recording: {failure}{printable(who and f', asked for by {who}')}."
        if len(comparison.out_of_memory) > 1:
            yield f"Before it, {len(comparison.out_of_memory) - 1:,} other requests failed."
    yield ""
    yield f"Live at the peak of what was requested, {sum(row['allocations'] for row in rows):,} allocations:"
    yield from table((row["bytes"], row["allocations"], _who(row)) for row in rows)
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
