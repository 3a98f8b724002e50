"""Recordings of real GPUs: completed, made a timeline of, and held against the allocator's rules.

`torch.cuda.memory._record_memory_history()` and `_dump_snapshot()` leave the segments and blocks of a moment and the
latest events before it. `Snapshot.compare` recovers the allocator's state at the first of them (`rewind`), lets the
rules (`caching`) run from there, and says whether they put each allocation where the GPU put it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from . import snapshot_file
from .allocator import Allocator, Fragmentation, OutOfMemory
from .caching import Segment, SegmentEvent
from .places import lines_of
from .rerun import Rerun
from .rewind import INACTIVE, Event, Recording, Slack, rewind
from .snapshot_file import RETURNS, TAKES
from .timeline import SCHEMA, Timeline
from .units import format_bytes

LONGEST_NAME: Final = 500  # characters


@dataclass(frozen=True)
class Figures:
    """Peaks of a run in bytes, and how often memory was taken from the driver or given back.

    Attributes:
        peak_allocated: Whole blocks, as `torch.cuda.max_memory_allocated` reports.
        peak_rounded: What a recording says without its start: the whole blocks allocated at its end, and from there
            back each event's size rounded to 512 B.
        peak_requested: What was asked for.
        peak_reserved: Segments, as `torch.cuda.max_memory_reserved` reports.
    """

    peak_allocated: int
    peak_rounded: int
    peak_requested: int
    peak_reserved: int
    segment_events: int

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


_NOTHING: Final = Figures(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Comparison:
    """What a GPU did, and what the rules do from the same start.

    Attributes:
        recorded, modelled: The peaks of both.
        allocations: Recorded allocations.
        address_mismatches: Allocations that the rules put elsewhere.
        segment_mismatches: Segments that the rules take or give back at another event or in another size.
        reserved_mismatches: Allocations and releases after which the rules have reserved another number of bytes.
        undetermined: Blocks at the start whose whole size the recording leaves open; until each one's `last_event`,
            `allocated` may be larger by up to what is `possible`.
        contradictions: Events that do not agree with the end of the recording.
        fragmentation: Where each device's reserved bytes are when most are reserved, at the fullest of those moments.
        out_of_memory: The requests that failed.
        left_out: Where not all agrees, the kinds of events of which the recording holds none, and the first event that
            differs. If there were such events and they were not recorded, nothing is certain from there on.
        as_recorded: What goes by something that no file holds, and was taken to be as the recording has it.
    """

    recorded: Figures
    modelled: Figures
    allocations: int
    address_mismatches: int
    segment_mismatches: int
    reserved_mismatches: int
    contradictions: int
    undetermined: tuple[Slack, ...]
    fragmentation: tuple[Fragmentation, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    left_out: tuple[str, ...]
    as_recorded: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not (self.address_mismatches or self.segment_mismatches or self.reserved_mismatches)

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data, for JSON."""
        return {
            "recorded": asdict(self.recorded),
            "modelled": asdict(self.modelled),
            "allocations": self.allocations,
            "address_mismatches": self.address_mismatches,
            "segment_mismatches": self.segment_mismatches,
            "reserved_mismatches": self.reserved_mismatches,
            "contradictions": self.contradictions,
            "undetermined": [
                {
                    "address": slack.address,
                    "requested": slack.requested,
                    "least_slack": slack.possible[0],
                    "most_slack": slack.possible[-1],
                    "last_event": slack.last_event,
                }
                for slack in self.undetermined
            ],
            "fragmentation": [asdict(one) for one in self.fragmentation],
            "out_of_memory": [asdict(one) for one in self.out_of_memory],
            "left_out": list(self.left_out),
            "as_recorded": list(self.as_recorded),
        }

    def explain(self) -> str:
        """The comparison in sentences."""
        hits = self.allocations - self.address_mismatches
        text = (
            f"{hits:,} of {self.allocations:,} allocations lie where the rules put them; "
            f"{self.segment_mismatches:,} of {self.recorded.segment_events:,} segment events differ; the recorded "
            f"peaks are {format_bytes(self.recorded.peak_allocated)} allocated, "
            f"{format_bytes(self.recorded.peak_reserved)} reserved."
        )
        if self.undetermined:
            most = sum(slack.possible[-1] - slack.possible[0] for slack in self.undetermined)
            last = max(slack.last_event for slack in self.undetermined)
            text += (
                f" It leaves open how large {len(self.undetermined):,} blocks were that were there before it: up to "
                f"event {last:,}, allocated may be larger by up to {format_bytes(most)}."
            )
        if self.as_recorded:
            text += f" Taken as recorded, for no file holds what decides it: {'; '.join(self.as_recorded)}."
        if self.left_out:
            text += f" Nothing is certain if the recording was made without these: {'; '.join(self.left_out)}."
        return text


@dataclass(frozen=True)
class Snapshot:
    """A recording.

        >>> with eb.trace(rules="cuda") as run:
        ...     x = torch.ones(1_000)
        >>> run.timeline.to_snapshot("traced.pickle")
        >>> eb.Snapshot.read("traced.pickle").compare().exact  # the allocator's rules, and what they wrote
        True

    Attributes:
        segments: The segments and blocks at its end, by device and address.
        traces: The events of each device, by its number.
        settings: The allocator's settings, as `Allocator` takes them; defaults where the file does not say.
        stacks: Who allocated the blocks that are live at its end, by device and address; not in every file.
        settings_told: Whether the file says the settings.
    """

    segments: tuple[Segment, ...]
    traces: Mapping[int, Sequence[Event]]
    settings: Mapping[str, Any]
    stacks: Mapping[tuple[int, int], Sequence[dict]]
    settings_told: bool = True

    @classmethod
    def read(cls, path: str | Path) -> Snapshot:
        """Reads a snapshot without running anything that it may contain.

        Raises:
            ValueError: If it is no memory snapshot, is damaged, or could run code.
            OSError: If it cannot be read.
        """
        return cls(*snapshot_file.read(path))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Snapshot:
        """What `torch.cuda.memory._snapshot()` returned.

        Raises:
            ValueError: If it is no memory snapshot.
        """
        return cls(*snapshot_file.parse(data, "this"))

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that have memory or events."""
        return tuple(sorted({s.device for s in self.segments} | {d for d, trace in self.traces.items() if trace}))

    @cached_property
    def allocator(self) -> Allocator:
        """The allocator of the recording's settings, with memory without end."""
        return Allocator(**self.settings)

    def recording(self, device: int) -> Recording:
        """A device's recording, completed: the state before its first event, and the bytes after each.

        Raises:
            ValueError: If it contradicts itself.
        """
        segments = [segment for segment in self.segments if segment.device == device]
        return rewind(segments, self.traces.get(device, ()), self.allocator.device())

    def compare(self, device: int | None = None) -> Comparison:
        """Lets the allocator's rules run from the recovered start, and compares event by event.

        Args:
            device: Which; all of them unless given, and then each figure is the sum over the devices.

        Raises:
            ValueError: If there is no such device, or the recording contradicts itself.
        """
        if device is not None and device not in self.devices:
            raise ValueError(f"no device {device}; the recording has {', '.join(map(str, self.devices)) or 'none'}")
        parts = [self._compare(d) for d in (self.devices if device is None else (device,))]
        return sum(parts[1:], parts[0]) if parts else Comparison(_NOTHING, _NOTHING, 0, 0, 0, 0, 0, (), (), (), (), ())

    def _compare(self, device: int) -> Comparison:
        events, recording, names = self.traces.get(device, ()), self.recording(device), Names()
        run = Rerun(self.allocator, recording)
        run.play(events)
        asked_by = (dict(zip(WHO, names(events[failed.event].frames), strict=True)) for failed in run.out_of_memory)
        driver = [(i, SegmentEvent(*event[:4])) for i, event in enumerate(events) if event.action in TAKES + RETURNS]
        pairs = zip_longest(driver, run.rules.segment_events, fillvalue=(len(events), None))
        wrong = [event for (event, recorded), modelled in pairs if recorded != modelled]
        series = (recording.allocated, recording.rounded, recording.requested, recording.reserved)
        return Comparison(
            recorded=_figures(*(one.tolist() for one in series), len(driver)),
            modelled=_figures(*zip(*run.series, strict=True), len(run.rules.segment_events)),
            allocations=sum(event.action == "alloc" for event in events),
            address_mismatches=run.address_mismatches,
            segment_mismatches=run.unpredicted + len(wrong),
            reserved_mismatches=run.reserved_mismatches,
            undetermined=tuple(slack for slack in recording.slacks if len(slack.possible) > 1),
            contradictions=recording.contradictions,
            fragmentation=(run.fragmentation,),
            out_of_memory=tuple(
                replace(failed, **who) for failed, who in zip(run.out_of_memory, asked_by, strict=True)
            ),
            left_out=_left_out(
                events, min([*run.differences, *wrong[:1]], default=None), recording, self.settings_told
            ),
            as_recorded=_as_recorded(run),
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The recording as a timeline: what was live before it in step -1, then a row for each allocation and release.

        A block counts until it can be given out again. A recording knows no categories and modules; `op` is the
        innermost function on the stack, `line` the innermost line outside of PyTorch, `own` of the user's own code.
        """
        return self._timeline(with_refused=False)

    @cached_property
    def demanded(self) -> Timeline:
        """The same with the requests that failed, each given back at once: what it would have taken to go on."""
        return self._timeline(with_refused=True)

    def _timeline(self, with_refused: bool) -> Timeline:
        rows: list[tuple[Any, ...]] = []  # time, step, action, storage, nbytes, device, stream, op, line, own
        names = Names()
        for device in self.devices:
            recording, events, name = self.recording(device), self.traces.get(device, ()), f"cuda:{device}"
            frames = self._stacks_at_start(device)
            live: dict[int, tuple[Any, ...]] = {}
            before = [
                Event("alloc", block.address, block.requested, segment.stream, frames=frames.get(block.address, ()))
                for segment in recording.start
                for block in segment.blocks
                if block.state != INACTIVE
            ]
            for i, event in enumerate([*before, *events], start=-len(before)):
                when = (event.time_us, 0) if i >= 0 else (-1, -1)  # time, step
                if event.action == "alloc":
                    what = (len(rows), event.size, name, event.stream, *names(event.frames))
                    live[event.address] = what
                    rows.append((*when, "alloc", *what))
                elif event.action == "oom" and with_refused:
                    what = (len(rows), event.size, name, event.stream, *names(event.frames))
                    rows += (*when, "alloc", *what), (*when, "free", *what)
                elif i in recording.releases and event.address in live:
                    rows.append((*when, "free", *live.pop(event.address)))
        rows.sort(key=lambda row: row[0])  # stable: devices are interleaved by time, each keeps its order
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)) if rows else {}
        n = len(rows)
        defaults = {"phase": "other", "module": "", "category": "", "shape": "", "dtype": ""}
        arrays = [pa.array(columns.get(field.name, [defaults.get(field.name, 0)] * n), field.type) for field in SCHEMA]
        start = sum(row[1] < 0 for row in rows)
        return Timeline(
            pa.Table.from_arrays(arrays, schema=SCHEMA), {"evidence": "recorded", "start_event": start, "steps": 1}
        )

    def _stacks_at_start(self, device: int) -> dict[int, Sequence[dict]]:
        """What is known of who allocated the blocks that were there before: from those left, and from their release."""
        stacks = {address: stack for (owner, address), stack in self.stacks.items() if owner == device}
        seen: set[int] = set()
        for event in self.traces.get(device, ()):
            if event.action == "alloc" and event.address not in seen:
                stacks.pop(event.address, None)
            elif event.action.startswith("free") and event.address not in seen:
                stacks[event.address] = event.frames
            seen.add(event.address)
        return stacks


WHO: Final = ("op", "line", "own")
_COLUMNS: Final = ("time", "step", "action", "storage", "nbytes", "device", "stream", *WHO)


class Names:
    """Who asked for memory: the innermost function on a stack, and the two lines of `places.lines_of`.

    Of a stack that has none, as PyTorch's own in C++, the line is the innermost. Stacks and frames are shared in a
    file, so each is looked at once; texts end where no real name is as long.
    """

    def __init__(self) -> None:
        self._of_stacks: dict[int, tuple[str, str, str]] = {}  # by identity
        self._of_frames: dict[int, tuple[str, str, int]] = {}

    def __call__(self, frames: Sequence[dict]) -> tuple[str, str, str]:
        found = self._of_stacks.get(id(frames))
        if found is None:
            stack = [self._of_frame(frame) for frame in frames]
            name, file, number = stack[0] if stack else ("", "", 0)
            line, own = lines_of((file, number) for _, file, number in stack)
            found = self._of_stacks[id(frames)] = name, line or (f"{file}:{number}" if file else ""), own
        return found

    def _of_frame(self, frame: dict) -> tuple[str, str, int]:
        found = self._of_frames.get(id(frame))
        if found is None:
            name, file = (_text(frame.get(key)) for key in ("name", "filename"))
            number = frame.get("line")
            number = number if isinstance(number, int) and 0 <= number < 2**31 else 0
            found = self._of_frames[id(frame)] = name, file, number
        return found


def _text(name: Any) -> str:
    """A name in a frame as text that every file format takes; of a longer one the end, which tells most."""
    if not isinstance(name, str):
        return ""
    text = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
    return text.encode("utf-8", "replace").decode()


def _left_out(events: Sequence[Event], since: int | None, recording: Recording, told: bool) -> tuple[str, ...]:
    """Kinds of events that a recording does not hold, where it is not as the rules say.

    `torch.cuda.memory._record_memory_history(skip_actions=...)` leaves them out, and no file says so.

    Args:
        since: The event at which the rules and the recording part, None if they do not.
        told: Whether the allocator's settings are in the file.
    """
    if since is None and not recording.contradictions:
        return ()
    there = {event.action for event in events}
    streams = {event.stream for event in events if event.action == "alloc"}
    lacks = {
        "the allocator's settings": not told,
        "memory taken from the driver": there.isdisjoint(TAKES),
        "memory given back to the driver": there.isdisjoint(RETURNS),
        "a free that was completed, on several streams": (
            "free_requested" in there and "free_completed" not in there and len(streams) > 1
        ),
        "the addresses of expandable segments": (
            "segment_map" in there or any(segment.expandable for segment in recording.start)
        ),
    }
    found = [what for what, missing in lacks.items() if missing] or ["what else the program did"]
    return tuple(f"{what}, from event {since or 0:,} on" for what in found)


def _as_recorded(run: Rerun) -> tuple[str, ...]:
    """What the rules were told, because it goes by what no file holds."""
    told = {
        "where an expandable segment ends (its addresses are 9/8 of the GPU's memory)": len(run.rules.ended),
        "which segments garbage collection gives back (it goes by their age)": run.collected,
    }
    return tuple(f"{what}, {count:,} times" for what, count in told.items() if count)


def _figures(
    allocated: Sequence[int], rounded: Sequence[int], requested: Sequence[int], reserved: Sequence[int], events: int
) -> Figures:
    unsplit = allocated[-1] - rounded[-1]
    return Figures(max(allocated), max(rounded) + unsplit, max(requested), max(reserved), events)
