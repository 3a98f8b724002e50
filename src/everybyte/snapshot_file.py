"""The file of a memory snapshot: its entries as they are in PyTorch 2.0 to 2.13, read and written.

`torch.cuda.memory._dump_snapshot()` pickles what `THCPModule_memorySnapshot` of `torch/csrc/cuda/Module.cpp` makes:
dicts and lists under "segments", "device_traces" and, in later versions, "allocator_settings". Older files lack
settings, times and the addresses of blocks.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc

from . import plain_pickle
from .allocator import Allocator
from .caching import DEFAULT_POOL, BlockInfo, Segment
from .rewind import ALLOCATED, INACTIVE, PENDING, Event
from .timeline import Timeline
from .units import MiB

LARGEST: Final = 2**48  # bytes, far more than any GPU has
STATES: Final = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # as older versions called it
    "inactive": INACTIVE,
}
TAKES: Final = ("segment_alloc", "segment_map")
RETURNS: Final = ("segment_free", "segment_unmap")
ACTIONS: Final = frozenset(("alloc", "free_requested", "free_completed", "oom", *TAKES, *RETURNS))


_IN_CONF: Final = ("max_non_split_rounding_mb", "large_segment_size_mb")  # 20 MiB each unless in this text


class Contents(NamedTuple):
    """Segments by device and address, the events of each device, the settings as `Allocator` takes them, and the stacks
    of the blocks that are live at the end, by device and address."""

    segments: tuple[Segment, ...]
    traces: Mapping[int, Sequence[Event]]
    settings: Mapping[str, Any]
    stacks: Mapping[tuple[int, int], Sequence[dict]]
    settings_told: bool


def read(path: str | Path) -> Contents:
    """Reads a snapshot without running anything that it may contain.

    Raises:
        ValueError: If it is no memory snapshot, is damaged, or could run code.
        OSError: If it cannot be read.
    """
    data, nbytes = plain_pickle.load(path)
    return parse(data, path, nbytes)


def parse(data: Any, path: str | Path, nbytes: int = LARGEST) -> Contents:
    """The same of what was in the file `path`, of so many bytes; they bound its entries.

    Raises:
        ValueError: If it is no memory snapshot.
    """
    try:
        return _contents(data, nbytes)
    except KeyError as error:
        raise ValueError(f"{path} is not a memory snapshot: there is no {str(error)[:80]}") from None
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a memory snapshot: {str(error)[:200]}") from None


def _contents(data: Any, nbytes: int) -> Contents:
    """Segments, traces and settings from what was in the file; raises what a wrong type or value raises."""
    if isinstance(data, list):  # torch.cuda.memory_snapshot(): the segments alone
        data = {"segments": data}
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not a dict with segments and device_traces")
    segments, traces = list(data["segments"]), list(data.get("device_traces", ()))
    if sum(len(segment["blocks"]) for segment in segments) + sum(map(len, traces)) > nbytes:
        raise ValueError("it has more entries than bytes")
    streams = {entry["stream"] for entries in (segments, *traces) for entry in entries if "stream" in entry}
    # A stream is named by its address; they keep their order, in which a pool lists them. 0 is the default stream.
    numbers = {stream: i for i, stream in enumerate(sorted({0, *streams}))}
    # Before PyTorch 2.2 a segment does not say whether it expands.
    expandable = bool(data.get("allocator_settings", {}).get("expandable_segments")) or any(
        entry["action"] == "segment_map" for trace in traces for entry in trace
    )
    parsed = tuple(
        sorted((_segment(segment, numbers, expandable) for segment in segments), key=lambda s: (s.device, s.address))
    )
    for left, right in pairwise(parsed):
        if left.device == right.device and left.address + left.size > right.address:
            raise ValueError(f"two segments overlap at address {right.address:#x}")
    events, stack_of = {}, _StackChecker()
    for device, trace in enumerate(traces):
        pools = _PoolFinder(segment for segment in parsed if segment.device == device)
        events[device] = [_event(entry, numbers, pools, stack_of) for entry in trace if entry["action"] in ACTIONS]
    stacks = {}
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != INACTIVE:
                stacks[segment.get("device", 0), at] = stack_of(_latest(block))
            at += block["size"]
    return Contents(
        parsed,
        events,
        _settings(data.get("allocator_settings", {}), parsed, events),
        stacks,
        "allocator_settings" in data,
    )


def _count(value: Any, limit: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"a {type(value).__name__} is not a whole number below 2^{limit.bit_length() - 1}")
    return value


def _segment(data: Mapping[str, Any], streams: Mapping[int, int], expandable: bool) -> Segment:
    address, size = _count(data["address"]), _count(data["total_size"], LARGEST)
    at, blocks = address, []
    for block in data["blocks"]:  # their own addresses are not in every version's files
        nbytes = _count(block["size"], LARGEST)
        requested = block.get("requested_size", _latest(block).get("real_size", nbytes))
        blocks.append(BlockInfo(at, nbytes, _count(requested, LARGEST), STATES[block["state"]]))
        at += nbytes
    if at != address + size or any(block.size == 0 for block in blocks):
        raise ValueError(f"the blocks of the segment at {address:#x} do not fill it")
    pool_id = tuple(map(_count, data.get("segment_pool_id", DEFAULT_POOL)))
    small = {"small": True, "large": False}[data["segment_type"]]
    expandable, device = bool(data.get("is_expandable", expandable)), _count(data.get("device", 0))
    return Segment(address, size, streams[data["stream"]], small, tuple(blocks), pool_id, expandable, device)


def _latest(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a block's stack is, and before PyTorch 2.1 its requested size: in an entry for each use, latest first."""
    return (block.get("history") or [block])[0]


class _StackChecker:
    """The stack of an entry, seen to be a list of frames; entries share stacks, so each is looked at once."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, data: Mapping[str, Any]) -> Sequence[dict]:
        frames = data.get("frames") or ()
        if id(frames) not in self.seen:
            if not all(type(frame) is dict for frame in frames):
                raise ValueError("a stack is not a list of frames")
            self.seen.add(id(frames))
        return frames


class _PoolFinder:
    """Which private pool an address belongs to: that of the segment around it at the end."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.ranges = sorted((s.address, s.address + s.size, s.pool_id) for s in segments if s.pool_id != DEFAULT_POOL)

    def __call__(self, address: int) -> tuple[int, int]:
        i = bisect_right(self.ranges, address, key=lambda range_: range_[0]) - 1
        return self.ranges[i][2] if i >= 0 and address < self.ranges[i][1] else DEFAULT_POOL


def _event(data: Mapping[str, Any], streams: Mapping[int, int], pools: _PoolFinder, stack_of: _StackChecker) -> Event:
    action = data["action"]
    address = _count(data["device_free" if action == "oom" else "addr"])
    pool_id = data.get("pool_id")  # only in files of late versions
    return Event(
        action,
        address,
        _count(data["size"], LARGEST),
        streams[data.get("stream", 0)],
        pools(address) if pool_id is None else tuple(map(_count, pool_id)),
        stack_of(data),
        _count(data.get("time_us", 0)),
    )


def _settings(
    given: Mapping[str, Any], segments: Sequence[Segment], traces: Mapping[int, Sequence[Event]]
) -> dict[str, Any]:
    """The allocator's settings; whether segments expand is told by the segments themselves where there are any."""
    conf = dict(re.findall(r"(\w+):(\d+)", str(given.get("PYTORCH_CUDA_ALLOC_CONF", ""))))
    settings: dict[str, Any] = {}
    for name in _IN_CONF:
        if name in conf:
            settings[name] = int(conf[name])
    limit = int(given.get("max_split_size", -1))
    if 0 <= limit < 2**62:
        settings["max_split_size_mb"] = limit // MiB
    threshold = float(given.get("garbage_collection_threshold", 0))
    if 0 < threshold < 1:
        settings["garbage_collection_threshold"] = threshold
    divisions = {str(start): int(value) for start, value in dict(given.get("roundup_power2_divisions", {})).items()}
    if any(divisions.values()):
        settings["roundup_power2_divisions"] = divisions
    taken = {event.action for trace in traces.values() for event in trace} & set(TAKES)
    kinds = {segment.expandable for segment in segments} | {action == "segment_map" for action in taken}
    expandable = kinds.pop() if len(kinds) == 1 else bool(given.get("expandable_segments", False))
    if expandable:
        settings["expandable_segments"] = True
    Allocator(**settings)  # raises what it refuses
    return settings


def write(timeline: Timeline, path: str | Path, allocator: Allocator | None = None) -> None:
    """Writes what the allocator does with a timeline as a snapshot that PyTorch's memory viewer opens.

    Args:
        timeline: Any; each of its devices becomes a device of the snapshot.
        path: Where to.
        allocator: Its settings; PyTorch's defaults, and memory without end, unless given.
    """
    data = contents(timeline, allocator)
    with open(path, "wb") as file:
        pickle.dump(data, file, protocol=4)


def contents(timeline: Timeline, allocator: Allocator | None = None) -> dict[str, Any]:
    """What `write` writes, as `torch.cuda.memory._snapshot` returns it."""
    allocator = allocator or Allocator()
    names = timeline.table["device"].unique().to_pylist()
    segments, traces = [], []
    for device, name in enumerate(names):
        run = allocator.replay(timeline, name)
        rows = timeline.table.filter(pc.field("device") == name).to_pylist()
        traces.append(trace := [])
        live: dict[int, list[dict]] = {}
        upto = 0
        for i, (row, address) in enumerate(zip(rows, run.addresses.tolist(), strict=False)):
            frames = _frames_of(row)
            entries: list[tuple] = list(run.segment_events[upto : run.segment_events_upto[i]])
            upto = run.segment_events_upto[i]
            if address:  # an empty storage has none
                actions = ("alloc",) if row["action"] == "alloc" else ("free_requested", "free_completed")
                entries += [(action, address, row["nbytes"], row["stream"]) for action in actions]
                live[address] = frames
            trace += [_entry(*entry, i, frames) for entry in entries]
        if run.out_of_memory:  # first what could be given back was, then the request failed
            row, i = rows[run.out_of_memory.event], run.out_of_memory.event
            trace += [_entry(*taken, i, _frames_of(row)) for taken in run.segment_events[upto:]]
            trace.append(_entry("oom", run.out_of_memory.free, row["nbytes"], row["stream"], i, _frames_of(row)))
        segments += [_segment_as_dict(segment, device, live) for segment in run.segments]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": _settings_as_dict(allocator),
        "external_annotations": [],
    }


def _frames_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A stack for the viewer, innermost first: the operation, the module, the line, the user's own."""
    named = [("", f"{row['op']} {row['shape']} {row['dtype']}".strip()), ("", row["module"])]
    if row["own"] and row["own"] != row["line"]:
        named.append((f"site-packages/{row['line']}", ""))
    named.append((row["own"] or row["line"], row["category"] or row["phase"]))
    return [_frame(place, name) for place, name in named if place or name]


def _frame(place: str, name: str) -> dict[str, Any]:
    file, _, line = place.rpartition(":")
    return {"filename": file or place, "line": int(line) if line.isdecimal() else 0, "name": name}


def _entry(action: str, address: int, size: int, stream: int, time_us: int, frames: list[dict]) -> dict[str, Any]:
    where = "device_free" if action == "oom" else "addr"
    return {"action": action, where: address, "size": size, "stream": stream, "time_us": time_us, "frames": frames}


def _segment_as_dict(segment: Segment, device: int, frames: Mapping[int, list[dict]]) -> dict[str, Any]:
    active = [block for block in segment.blocks if block.state != INACTIVE]
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": segment.allocated,
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": block.state,
                "frames": frames.get(block.address, []) if block in active else [],
            }
            for block in segment.blocks
        ],
    }


def _settings_as_dict(allocator: Allocator) -> dict[str, Any]:
    limit, divisions = allocator.max_split_size_mb, allocator.divisions
    conf = [f"{name}:{getattr(allocator, name)}" for name in _IN_CONF if getattr(allocator, name) != 20]
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(conf),
        "max_split_size": -1 if limit is None else limit * MiB,
        "garbage_collection_threshold": allocator.garbage_collection_threshold,
        "expandable_segments": allocator.expandable_segments,
        "roundup_power2_divisions": {str(1 << i): steps for i, steps in enumerate(divisions)},
    }
