"""An account of a recording: its peaks, who holds them, why a request failed, what other settings would have done.

The recording is read as data, never trusted. Its allocations are placed anew by the model of the allocator: from the
state that the recording began in, to see whether the model is right about it, and on an empty GPU, to compare settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import schema, workspace
from .allocator import Allocator, Replay
from .lines import LONGEST_LINE, peaks, table
from .names import printable
from .places import led_there
from .snapshot import WHO, Comparison, Snapshot
from .timeline import Timeline
from .units import format_bytes


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
        room = comparison.out_of_memory[-1].room if comparison.out_of_memory else None
        demanded = snapshot.demanded.on(f"cuda:{device}")
        replays = [
            (others, _allocator({**snapshot.settings, **others}, room).replay(demanded)) for others in ({}, *scenarios)
        ]
        found = comparison.as_dict()
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
            "room": room,
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
        for failure in self.comparison.out_of_memory[-1:]:
            yield printable(f"In the recording: {failure}.", LONGEST_LINE)
            if len(self.comparison.out_of_memory) > 1:
                yield f"Before it, {len(self.comparison.out_of_memory) - 1:,} other requests failed."
        yield ""
        yield f"Live at the peak of what was requested, {sum(row['allocations'] for row in rows):,} allocations:"
        yield from table((row["bytes"], row["allocations"], _who(row)) for row in rows)
        yield ""
        yield f"{replayed(self.answer['room'])}:"
        for what_if, replay in self.replays:
            settings = ", ".join(f"{name}={value}" for name, value in what_if.items()) or "the recording's settings"
            reserved = f"{format_bytes(replay.peak_reserved)} reserved, {format_bytes(replay.peak_allocated)} allocated"
            ends = replay.out_of_memory or ("it holds them" if self.answer["room"] else "")
            yield printable(f"  {settings}: {reserved}{ends and f'; {ends}'}", LONGEST_LINE)


def _allocator(settings: Mapping[str, Any], room: int | None) -> Allocator:
    """An allocator of these settings, and of the recording's memory where they do not say how much there is."""
    return Allocator(**settings if settings.keys() & {"total", "gpu"} else {"total": room, **settings})


def replayed(room: int | None) -> str:
    """What replays are of; `room` is the memory that did not do, None where it did."""
    if room is None:
        return "The same allocations on an empty GPU would peak at"
    return (
        f"The same allocations, those that failed too, on an empty GPU of {format_bytes(room)} unless another size is "
        "named, would peak at"
    )


def _live_at_peak(timeline: Timeline) -> list[dict[str, Any]]:
    """Who holds the peak, largest first: by function and lines; what has no stack by its size."""
    if not len(timeline):
        return []
    live = timeline.live(timeline.peak).astype({name: str for name in WHO})
    live["each"] = live["nbytes"].where((live["op"] == "") & (live["line"] == ""), 0)
    groups = live.groupby([*WHO, "each"])["nbytes"].agg(["sum", "count"])
    groups = groups.sort_values("sum", ascending=False, kind="stable")
    return [
        {**dict(zip(WHO, who, strict=False)), "bytes": int(nbytes), "allocations": int(count)}
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
