"""Recordings of real GPUs: completed, made a timeline of, and held against the allocator's rules.

`torch.cuda.memory._record_memory_history()` and `_dump_snapshot()` leave the segments and blocks of a moment and the
latest events before it. `Snapshot.compare` recovers the allocator's state at the first of them (`rewind`), lets the
rules (`caching`) run from there, and says whether they put each allocation where the GPU put it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from . import snapshot_file
from .allocator import Allocator, Fragmentation, OutOfMemory, out_of_memory
from .caching import ADDRESS_SPACE, DEFAULT_POOL, SMALL_SIZE, Segment, SegmentEvent
from .rewind import INACTIVE, Event, Recording, Slack, rewind
from .snapshot_file import RETURNS, TAKES
from .timeline import SCHEMA, Timeline
from .units import format_bytes

OFF_THE_RECORD: Final = 2**60  # no GPU's address
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
        if self.left_out:
            text += f" Nothing is certain if the recording was made without these: {'; '.join(self.left_out)}."
        return text


@dataclass(frozen=True)
class Snapshot:
    """A recording.

    Attributes:
        segments: The segments and blocks at its end, by device and address.
        traces: The events of each device, by its number.
        settings: The allocator's settings, as `Allocator` takes them; defaults where the file does not say.
        stacks: Who allocated the blocks that are live at its end, by device and address; not in every file.
    """

    segments: tuple[Segment, ...]
    traces: Mapping[int, Sequence[Event]]
    settings: Mapping[str, Any]
    stacks: Mapping[tuple[int, int], Sequence[dict]]

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
        return sum(parts[1:], parts[0]) if parts else Comparison(_NOTHING, _NOTHING, 0, 0, 0, 0, 0, (), (), (), ())

    def _compare(self, device: int) -> Comparison:
        events, recording = self.traces.get(device, ()), self.recording(device)
        run = _Run(self.allocator, recording)
        modelled = run.play(events)
        segment_events = [SegmentEvent(*event[:4]) for event in events if event.action in TAKES + RETURNS]
        series = (recording.allocated, recording.rounded, recording.requested, recording.reserved)
        return Comparison(
            recorded=_figures(*(one.tolist() for one in series), len(segment_events)),
            modelled=modelled,
            allocations=sum(event.action == "alloc" for event in events),
            address_mismatches=run.address_mismatches,
            segment_mismatches=run.unpredicted + _differences(segment_events, run.model.segment_events),
            reserved_mismatches=run.reserved_mismatches,
            undetermined=tuple(slack for slack in recording.slacks if len(slack.possible) > 1),
            contradictions=recording.contradictions,
            fragmentation=(run.fragmentation,),
            out_of_memory=tuple(run.out_of_memory),
            left_out=_left_out(events, run.agrees_up_to, recording.contradictions),
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The recording as a timeline: what was live before it in step -1, then a row for each allocation and release.

        A block counts until it can be given out again. A recording knows no categories and modules; `op` is the
        innermost function on the stack, `line` the innermost line outside of PyTorch.
        """
        rows: list[tuple[Any, ...]] = []  # time, step, action, storage, nbytes, device, stream, op, line
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


_COLUMNS: Final = ("time", "step", "action", "storage", "nbytes", "device", "stream", "op", "line")


class Names:
    """Who asked for memory: the innermost function on a stack, and the innermost line outside of PyTorch's own files.

    Stacks and frames are shared in a file, so each is looked at once; texts end where no real name is as long.
    """

    def __init__(self) -> None:
        self.of_stacks: dict[int, tuple[str, str]] = {}  # by identity
        self.of_frames: dict[int, tuple[str, str, bool]] = {}

    def __call__(self, frames: Sequence[dict]) -> tuple[str, str]:
        found = self.of_stacks.get(id(frames))
        if found is None:
            names = [self.of_frame(frame) for frame in frames] or [("", "", True)]
            found = names[0][0], next((line for _, line, outside in names if outside), names[0][1])
            self.of_stacks[id(frames)] = found
        return found

    def of_frame(self, frame: dict) -> tuple[str, str, bool]:
        found = self.of_frames.get(id(frame))
        if found is None:
            name, file = (_text(frame.get(key)) for key in ("name", "filename"))
            number = frame.get("line")
            line = f"{file}:{number if isinstance(number, int) and 0 <= number < 2**31 else 0}"
            found = self.of_frames[id(frame)] = name, line, file.endswith(".py") and "/torch/" not in file
        return found


def _text(name: Any) -> str:
    """A name in a frame as text that every file format takes; of a longer one the end, which tells most."""
    if not isinstance(name, str):
        return ""
    text = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
    return text.encode("utf-8", "replace").decode()


class _Run:
    """The rules at work on a recording's requests: where new segments lie is recorded, all else is theirs."""

    def __init__(self, allocator: Allocator, recording: Recording) -> None:
        self.recording = recording
        self.new_segments: deque[int] = deque()
        self.model = allocator.device(cuda_malloc=self.cuda_malloc)
        self.blocks = self.model.restore(recording.start)
        self.held = {segment.address: segment.size for segment in recording.start if not segment.expandable}
        self.seen = 0  # of the model's segment events
        self.address_mismatches = self.reserved_mismatches = self.unpredicted = 0
        self.pending = 0  # bytes of blocks that are freed, but that another stream still uses
        self.fullest = (-1, -1, 0, 0, 0, 0)  # bytes reserved and taken, event, requested, rounded, inactive split
        self.out_of_memory: list[OutOfMemory] = []
        self.agrees_up_to: int | None = None  # the event at which rules and recording part; None: they never do

    def cuda_malloc(self, size: int) -> int:
        """Where the recording has the new segment; elsewhere if it has none, or the model has not left that place."""
        for event in self.model.segment_events[self.seen :]:
            if event.action == "segment_free":
                del self.held[event.address]
            elif event.action == "segment_alloc":
                self.held[event.address] = event.size
        self.seen = len(self.model.segment_events)
        address = self.new_segments.popleft() if self.new_segments else None
        if address is None or self.model.begins_segment(address):
            return OFF_THE_RECORD + self.model.next_address(size)
        if size < ADDRESS_SPACE and any(at < address + size and address < at + held for at, held in self.held.items()):
            return OFF_THE_RECORD + self.model.next_address(size)
        return address

    def play(self, events: Sequence[Event]) -> Figures:
        model, blocks, recording = self.model, self.blocks, self.recording
        rounded = sum(model.round_size(block.requested) for block in blocks.values())
        self.pending = sum(block.size for block in blocks.values() if not block.allocated)
        self.note_fullest(-1, rounded)
        series = [(model.allocated, rounded, model.requested, model.reserved)]
        reserved, returned = recording.reserved.tolist(), 0
        requests = _next_requests(events)
        for i, event in enumerate(events):
            action, address, size, stream = event[:4]
            if action in RETURNS:
                if i >= returned:  # the first of a row of them
                    others = (j for j in range(i, len(events)) if events[j].action not in RETURNS)
                    returned = next(others, len(events))
                    self.give_back(events[i:returned], requests[i])
                continue
            if action in TAKES:
                self.new_segments.append(address)
                continue
            if action == "alloc":
                block = model.malloc(size, stream, event.pool_id)
                if block is None:
                    raise ValueError("the recording asks for more memory than any GPU has")
                blocks[address] = block
                self.new_segments.clear()
                self.address_mismatches += block.address != address
                rounded += model.round_size(size)
            elif action == "oom":  # its address is what the driver had left
                needed = int(recording.rounded.max())
                self.out_of_memory.append(out_of_memory(model, i, size, stream, free=address, needed=needed))
            elif address in blocks:
                block = blocks[address]
                if block.allocated:
                    model.request_free(block)
                    self.pending += block.size
                if i in recording.releases:
                    rounded -= model.round_size(block.requested)
                    self.pending -= block.size
                    model.free_block(blocks.pop(address))
            self.note_fullest(i, rounded)
            self.reserved_mismatches += model.reserved != reserved[i + 1]
            if self.agrees_up_to is None and (self.address_mismatches or self.reserved_mismatches or self.unpredicted):
                self.agrees_up_to = i
            series.append((model.allocated, rounded, model.requested, model.reserved))
        return _figures(*zip(*series, strict=True), len(model.segment_events))

    def note_fullest(self, event: int, rounded: int) -> None:
        model, taken = self.model, self.model.allocated + self.pending
        if (model.reserved, taken) > self.fullest[:2]:
            self.fullest = (model.reserved, taken, event, model.requested, rounded, model.inactive_split)

    @property
    def fragmentation(self) -> Fragmentation:
        reserved, taken, event, requested, rounded, split = self.fullest
        parts = (rounded - requested, taken - rounded, split, reserved - taken - split)
        return Fragmentation(event, reserved, requested, *parts)

    def give_back(self, row: Sequence[Event], request: Event | None) -> None:
        """Why memory was given back is not recorded: for the request that follows, or because the program said so."""
        private = sorted({event.pool_id for event in row} - {DEFAULT_POOL})
        addresses = [event.address for event in row]
        if request is not None:
            size = self.model.round_size(request.size)
            pool = self.model.get_pool(request.pool_id, size <= SMALL_SIZE)
            oversize = self.model.oversize_blocks(pool, size, request.stream)
            if oversize and addresses[: len(oversize)] == [block.address for block in oversize]:
                addresses = addresses[len(oversize) :]
                for block in oversize:
                    self.model.release_block(block)
        cached = {block.address: block for block in self.model.cached_segments(*private)}
        if any(event.action == "segment_unmap" for event in row) or set(addresses) == set(cached):
            self.model.release_cached_blocks(*private)
            return
        self.unpredicted += len(addresses)
        for block in filter(None, [cached.pop(address, None) for address in addresses]):
            self.model.release_block(block)


def _left_out(events: Sequence[Event], since: int | None, contradictions: int) -> tuple[str, ...]:
    """Kinds of events that a recording does not hold, where it is not as the rules say.

    `torch.cuda.memory._record_memory_history(skip_actions=...)` leaves them out, and no file says so.

    Args:
        since: The event at which the rules and the recording part, None if they do not.
        contradictions: Events that do not agree with the end.
    """
    if since is None and not contradictions:
        return ()
    there = {event.action for event in events}
    streams = {event.stream for event in events if event.action == "alloc"}
    lacks = {
        "memory taken from the driver": there.isdisjoint(TAKES),
        "memory given back to the driver": there.isdisjoint(RETURNS),
        "a free that was completed, on several streams": (
            "free_requested" in there and "free_completed" not in there and len(streams) > 1
        ),
    }
    return tuple(f"{what}, from event {since or 0:,} on" for what, missing in lacks.items() if missing)


def _next_requests(events: Sequence[Event]) -> list[Event | None]:
    """For each event the next one that asks for memory."""
    found, following = [], None
    for event in reversed(events):
        following = event if event.action in ("alloc", "oom") else following
        found.append(following)
    return found[::-1]


def _figures(
    allocated: Sequence[int], rounded: Sequence[int], requested: Sequence[int], reserved: Sequence[int], events: int
) -> Figures:
    unsplit = allocated[-1] - rounded[-1]
    return Figures(max(allocated), max(rounded) + unsplit, max(requested), max(reserved), events)


def _differences(a: Sequence[SegmentEvent], b: Sequence[SegmentEvent]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
