"""An account of a recording: its peaks, who holds them, why a request failed, what other settings would have done.

The recording is read as data, never trusted. Its allocations are placed anew by the model of the allocator: from the
state that the recording began in, to see whether the model is right about it, and on an empty GPU, to compare settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from . import schema, workspace
from .allocator import Allocator, Replay
from .lines import LONGEST_LINE, peaks, table
from .names import printable
from .places import led_there
from .snapshot import Comparison, Names, Snapshot
from .timeline import Timeline
from .units import format_bytes

_WHO: Final = ("op", "line", "own")


@dataclass(frozen=True)
class Account:
    """What there is to say of one GPU of a recording.

    Attributes:
        answer: As JSON; `answer.schema.json` describes it.
        timeline: The run, on that GPU.
        comparison: The recording and the allocator's rules.
        replays: For some settings, the recording's own first, the same allocations on an empty GPU.
    """

    answer: Mapping[str, Any]
    timeline: Timeline
    comparison: Comparison
    replays: Sequence[tuple[Mapping[str, Any], Replay]]

    @classmethod
    def read(cls, path: str | Path, device: int | None = None, what_if: Sequence[Mapping[str, Any]] = ()) -> Account:
        """Reads a recording that `torch.cuda.memory._dump_snapshot` wrote.

        Args:
            path: The file.
            device: Which GPU; the one with most events unless given.
            what_if: Settings as `Allocator` takes them, laid over the recording's own; the other way of growing
                segments unless given.

        Raises:
            ValueError: If the file is no memory snapshot, there is no such GPU in it, or a setting cannot be.
            TypeError: If a setting is of the wrong type.
            OSError: If the file cannot be read.
        """
        snapshot = Snapshot.read(path)
        counts = {device: len(snapshot.traces.get(device, ())) for device in snapshot.devices}
        device = max(counts, key=counts.get, default=None) if device is None else device
        comparison = snapshot.compare(device)
        timeline = snapshot.timeline.on(f"cuda:{device}")
        scenarios = what_if or [{"expandable_segments": not snapshot.settings.get("expandable_segments", False)}]
        replays = [
            (others, Allocator(**{**snapshot.settings, **others}).replay(timeline)) for others in ({}, *scenarios)
        ]
        found = comparison.as_dict()
        for failure in found["out_of_memory"]:
            failure["op"], failure["line"], failure["own"] = Names()(snapshot.traces[device][failure["event"]].frames)
        answer = {
            "schema": schema.VERSION,
            "file": os.fsencode(path).decode("utf-8", "replace"),
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
        return cls(answer, timeline, comparison, replays)

    def lines(self) -> Iterator[str]:
        """The same for a terminal."""
        rows = self.answer["live_at_peak"]
        yield printable(f"{self.answer['file']}: GPU {self.answer['device']}, {self.answer['events']:,} events")
        others = [str(device) for device in self.answer["devices"] if device != self.answer["device"]]
        if others:
            yield f"It also holds GPU {', '.join(others)}: choose with --device."
        yield ""
        yield from peaks(asdict(self.comparison.recorded))
        yield ""
        yield self.comparison.explain()
        for fragmentation in self.comparison.fragmentation:
            yield f"When most was reserved: {fragmentation}."
        for failure, row in zip(self.comparison.out_of_memory[-1:], self.answer["out_of_memory"][-1:], strict=True):
            who = _who(row) if row["op"] or row["line"] else ""
            yield f"In the recording: {failure}{printable(who and f', asked for by {who}', LONGEST_LINE)}."
            if len(self.comparison.out_of_memory) > 1:
                yield f"Before it, {len(self.comparison.out_of_memory) - 1:,} other requests failed."
        yield ""
        yield f"Live at the peak of what was requested, {sum(row['allocations'] for row in rows):,} allocations:"
        yield from table((row["bytes"], row["allocations"], _who(row)) for row in rows)
        yield ""
        yield "The same allocations on an empty GPU would peak at:"
        for what_if, replay in self.replays:
            settings = ", ".join(f"{name}={value}" for name, value in what_if.items()) or "the recording's settings"
            reserved = f"{format_bytes(replay.peak_reserved)} reserved, {format_bytes(replay.peak_allocated)} allocated"
            yield f"  {settings}: {reserved}{f'; {replay.out_of_memory}' if replay.out_of_memory else ''}"


def _live_at_peak(timeline: Timeline) -> list[dict[str, Any]]:
    """Who holds the peak, largest first: by function and lines; what has no stack by its size."""
    if not len(timeline):
        return []
    live = timeline.live(timeline.peak).astype({name: str for name in _WHO})
    live["each"] = live["nbytes"].where((live["op"] == "") & (live["line"] == ""), 0)
    groups = live.groupby([*_WHO, "each"])["nbytes"].agg(["sum", "count"])
    groups = groups.sort_values("sum", ascending=False, kind="stable")
    return [
        {**dict(zip(_WHO, who, strict=False)), "bytes": int(nbytes), "allocations": int(count)}
        for who, nbytes, count in zip(groups.index, groups["sum"], groups["count"], strict=True)
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


def _who(row: Mapping[str, Any]) -> str:
    if row["op"] or row["line"]:
        return f"{row['line']} {row['op']}{led_there(row)}".strip()
    each = row["bytes"] // row["allocations"]
    size = ", the size of cuBLAS's workspace" if each == workspace.DEFAULT else ""
    return f"no stack recorded, {each:,} B each{size}"
