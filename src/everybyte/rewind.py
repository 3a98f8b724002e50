"""The state of an allocator before a recording began, found by going back from the state at its end.

A recording holds what happened (addresses and requested sizes, in order) and the segments and blocks at its end. Taking
the events back one by one gives the blocks at its beginning; only how much unused space lies behind those that were
freed since must be found otherwise. In the large pool a remainder of at most 1 MiB stays unsplit behind a request, and
every block is larger than 1 MiB. So a gap of at most 1 MiB belongs to the block before it; and a block before a larger
gap has 0 to 1 MiB of it, which what happens later narrows down:

- an allocation in that gap starts where its free block does, which is where the block ends;
- an allocation elsewhere says that the free block in the gap was no better fit.

What remains possible after that is reported, and the least of it taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .caching import (
    ADDRESS_SPACE,
    DEFAULT_POOL,
    MIN_BLOCK,
    SMALL_SEGMENT,
    SMALL_SIZE,
    BlockInfo,
    DeviceAllocator,
    Segment,
)

ALLOCATED, PENDING, INACTIVE = "active_allocated", "active_pending_free", "inactive"


class Event(NamedTuple):
    """An entry of a recording; `address` is the free memory of the driver where the action is "oom"."""

    action: str
    address: int
    size: int
    stream: int = 0
    pool_id: tuple[int, int] = DEFAULT_POOL
    frames: Sequence[dict] = ()
    time_us: int = 0


@dataclass
class Slack:
    """The unused space behind a block that was allocated before the recording began and freed while it went on.

    Attributes:
        address, requested: The block's.
        end: Where it would end without slack.
        limit: Where the gap behind it ends.
        possible: Bytes of slack that no event contradicts, ascending.
        last_event: The event that frees it; its size matters to none that follows.
    """

    address: int
    requested: int
    end: int
    limit: int
    possible: Sequence[int] = field(repr=False)
    last_event: int = -1

    @property
    def bytes(self) -> int:
        return self.possible[0]

    def no_better_fit(self, size: int, free: int, address: int) -> None:
        """Learns that `size` bytes were taken from a free block of `free` bytes at `address`, not from this gap."""
        largest, smallest = self.limit - self.end - self.possible[0], self.limit - self.end - self.possible[-1]
        if largest < size or smallest > free:
            return
        rest = [
            slack
            for slack in self.possible
            if not (size, 0) <= (self.limit - self.end - slack, self.end + slack) < (free, address)
        ]
        if 0 < len(rest) < len(self.possible):
            self.possible = rest


@dataclass(frozen=True)
class Recording:
    """What was recorded, completed.

    Attributes:
        start: The segments and blocks before the first event.
        slacks: Blocks at the start whose size had to be found from what followed.
        allocated, rounded, requested, reserved: Bytes before the first event and after each, `[1 + events]`, from the
            recorded addresses alone.
        releases: The events after which a block can be given out again: completed frees, and requested ones whose
            completion was not recorded.
        contradictions: Events that do not agree with the end of the recording.
    """

    start: tuple[Segment, ...]
    slacks: tuple[Slack, ...]
    allocated: np.ndarray
    rounded: np.ndarray
    requested: np.ndarray
    reserved: np.ndarray
    releases: frozenset[int]
    contradictions: int


def rewind(segments: Iterable[Segment], events: Sequence[Event], rules: DeviceAllocator) -> Recording:
    """Completes a recording.

    Args:
        segments: The state at its end, of one device.
        events: What happened before, in order.
        rules: For rounding and splitting, under the settings of the recording.

    Raises:
        ValueError: If the events and the end contradict each other so far that two blocks would overlap.
    """
    back = _Backwards(segments, events, rules.large_segment)
    start, slacks = _blocks_at_start(back, rules)
    series = _Forwards(start, slacks, rules).run(events, back.releases)
    start = [_with_slack(segment, slacks) for segment in start]
    return Recording(tuple(start), tuple(slacks.values()), *series, frozenset(back.releases), back.contradictions)


class _Backwards:
    """The blocks and the memory before the first event; a block that was freed since has size 0: not yet known."""

    def __init__(self, segments: Iterable[Segment], events: Sequence[Event], page: int) -> None:
        segments = list(segments)
        self.contradictions = 0
        self.active = {block.address: block for s in segments for block in s.blocks if block.state != INACTIVE}
        self.fixed = {segment.address: segment for segment in segments if not segment.expandable}
        self.mapped: dict[tuple, list[tuple[int, int]]] = {}  # ranges of expandable segments, by pool and stream
        self.spaces: dict[tuple, list[list[int]]] = {}  # of each: first and last address ever mapped, bytes mapped now
        for segment in segments:
            if segment.expandable:
                self._map(segment, mapped=True)
        self.releases: set[int] = set()
        actions = [event.action for event in events]
        # Without any request they were left out of the recording (`skip_actions`), and a completion stands for both.
        freed = PENDING if "free_requested" in actions or actions.count("free_completed") < 2 else ALLOCATED
        for i, event in reversed(list(enumerate(events))):
            if event.action == "alloc":
                self.contradictions += self.active.pop(event.address, None) is None
            elif event.action == "free_completed":
                self.contradictions += event.address in self.active
                self.releases.add(i)
                self.active[event.address] = BlockInfo(event.address, 0, event.size, freed)
            elif event.action == "free_requested":
                if event.address not in self.active:  # its completion was not recorded
                    self.releases.add(i)
                block = self.active.get(event.address, BlockInfo(event.address, 0, event.size, ALLOCATED))
                self.active[event.address] = block._replace(state=ALLOCATED)
            elif event.action == "segment_alloc":
                self.contradictions += self.fixed.pop(event.address, None) is None
            elif event.action == "segment_free":
                self.fixed[event.address] = _segment_of(event, page)
            elif event.action in ("segment_map", "segment_unmap"):
                self._map(_segment_of(event, page), mapped=event.action == "segment_unmap")

    def _map(self, segment: Segment, *, mapped: bool) -> None:
        key, start, end = _key(segment), segment.address, segment.address + segment.size
        spaces = self.spaces.setdefault(key, [])
        i = bisect_right(spaces, start, key=lambda space: space[0])
        near = (s for s in spaces[max(i - 1, 0) : i + 1] if max(end, s[1]) - min(start, s[0]) <= ADDRESS_SPACE)
        space = next(near, None)
        if space is None:
            space = [start, end, 0]
            spaces.insert(i, space)
        space[:] = min(start, space[0]), max(end, space[1]), space[2] + (segment.size if mapped else -segment.size)
        if not space[2]:
            spaces.remove(space)  # the address space was given back: what was mapped before lay in another
        ranges = self.mapped.setdefault(key, [])  # apart from one another, by address
        first = bisect_left(ranges, start, key=lambda range_: range_[1])
        last = bisect_right(ranges, end, key=lambda range_: range_[0])
        touched = ranges[first:last]
        if mapped:
            lefts, rights = zip((start, end), *touched, strict=True)
            pieces = [(min(lefts), max(rights))]
        else:
            pieces = [(left, min(right, start)) for left, right in touched]
            pieces += [(max(left, end), right) for left, right in touched]
        ranges[first:last] = sorted(piece for piece in pieces if piece[0] < piece[1])

    def segments(self) -> list[Segment]:
        """The segments at the start, by address, without their blocks."""
        found = list(self.fixed.values())
        for (pool_id, small, stream), ranges in self.mapped.items():
            # An address space may begin where something was mapped only later.
            lowest = [(space[0], space[0]) for space in self.spaces.get((pool_id, small, stream), ())]
            ranges = ranges + [space for space in lowest if space[0] not in {start for start, _ in ranges}]
            found += [Segment(start, end - start, stream, small, (), pool_id, True) for start, end in ranges]
        return sorted(found, key=lambda segment: segment.address)


def _segment_of(event: Event, page: int) -> Segment:
    """Small segments have 2 MiB, large ones more; large expandable ones grow by whole pages, 20 MiB unless set."""
    expandable = event.action.endswith("map")
    small = event.size == SMALL_SEGMENT or (expandable and event.size % page > 0)
    return Segment(event.address, event.size, event.stream, small, (), event.pool_id, expandable)


def _blocks_at_start(back: _Backwards, rules: DeviceAllocator) -> tuple[list[Segment], dict[int, Slack]]:
    """The segments at the start, filled with blocks, and the blocks whose slack is not known yet."""
    addresses, filled, slacks = sorted(back.active), [], {}
    segments = back.segments()
    for left, right in pairwise(segments):
        if left.address + max(left.size, 1) > right.address:
            raise ValueError(f"the recording contradicts itself: two segments overlap at address {right.address:#x}")
    for segment in segments:
        end_of_segment = segment.address + segment.size
        inside = addresses[bisect_left(addresses, segment.address) : bisect_left(addresses, end_of_segment)]
        blocks: list[BlockInfo] = []
        at = segment.address
        for address, limit in zip(inside, [*inside[1:], end_of_segment], strict=False):
            block = back.active[address]
            if address > at:
                blocks.append(BlockInfo(at, address - at, 0, INACTIVE))
            if not block.size:
                size = rules.round_size(block.requested)
                if not rules.should_split(limit - address, size, segment.small or segment.expandable):
                    size = limit - address
                elif not (segment.small or segment.expandable or rules.expandable_segments):
                    most = min(SMALL_SIZE, limit - address - size - SMALL_SIZE - MIN_BLOCK)
                    possible = range(0, most + 1, MIN_BLOCK) or [0]
                    slacks[address] = Slack(address, block.requested, address + size, limit, possible)
                block = block._replace(size=size)
            at = address + block.size
            if block.size <= 0 or at > limit:
                raise ValueError(f"the recording contradicts itself: two blocks overlap at address {address:#x}")
            blocks.append(block)
        if at < end_of_segment:
            blocks.append(BlockInfo(at, end_of_segment - at, 0, INACTIVE))
        filled.append(replace(segment, blocks=tuple(blocks)))
    return filled, slacks


class _Forwards:
    """Goes through the recorded addresses once: whole blocks, and what is known of the slacks."""

    def __init__(self, start: list[Segment], slacks: dict[int, Slack], rules: DeviceAllocator) -> None:
        self.start, self.slacks, self.rules = start, slacks, rules
        self.segments = {segment.address: segment for segment in start if not segment.expandable}
        self.bases = sorted(self.segments)
        blocks = [block for segment in start for block in segment.blocks if block.state != INACTIVE]
        self.active = sorted(block.address for block in blocks)
        self.sizes = {block.address: (block.size, block.requested) for block in blocks}
        self.allocated = {block.address for block in blocks if block.state == ALLOCATED}
        self.fresh: set[int] = set()  # segments just taken from the driver
        self.open: dict[tuple, dict[int, Slack]] = {}  # slacks that may still be narrowed down, by pool and stream
        for slack in slacks.values():
            self.open.setdefault(_key(self.segment_at(slack.address)), {})[slack.address] = slack

    def segment_at(self, address: int) -> Segment | None:
        """The segment that holds an address, unless it is expandable or unknown."""
        i = bisect_right(self.bases, address) - 1
        if i < 0 or address >= self.bases[i] + self.segments[self.bases[i]].size:
            return None
        return self.segments[self.bases[i]]

    def run(self, events: Sequence[Event], releases: set[int]) -> np.ndarray:
        """Bytes allocated, rounded, requested and reserved before the first event and after each, `[4, 1 + events]`."""
        allocated = sum(self.sizes[address][0] for address in self.allocated)
        requested = sum(size for _, size in self.sizes.values())
        rounded = sum(self.rules.round_size(size) for _, size in self.sizes.values())
        reserved = sum(segment.size for segment in self.start)
        series = [(allocated, rounded, requested, reserved)]
        for i, event in enumerate(events):
            action, address, size = event[:3]
            if action == "alloc":
                self.sizes[address] = self.whole_block(address, size), size
                self.allocated.add(address)
                insort(self.active, address)
                allocated += self.sizes[address][0]
                requested += size
                rounded += self.rules.round_size(size)
            elif action in ("free_requested", "free_completed") and address in self.sizes:
                whole, size = self.sizes[address]
                if address in self.allocated:
                    self.allocated.remove(address)
                    allocated -= whole
                    if address in self.slacks and self.slacks[address].last_event < 0:
                        self.slacks[address].last_event = i
                if i in releases:
                    requested -= size
                    rounded -= self.rules.round_size(size)
                    self.forget(address)
            elif action in ("segment_alloc", "segment_map"):
                reserved += size
                if action == "segment_alloc" and address not in self.segments:
                    self.segments[address] = _segment_of(event, self.rules.large_segment)
                    insort(self.bases, address)
                    self.fresh.add(address)
            elif action in ("segment_free", "segment_unmap"):
                reserved -= size
                if self.segments.pop(address, None) is not None:
                    self.bases.remove(address)
            series.append((allocated, rounded, requested, reserved))
        table = np.array(series, np.int64).T
        for slack in self.slacks.values():
            table[0, : slack.last_event + 1] += slack.bytes
        return table

    def whole_block(self, address: int, requested: int) -> int:
        """The size of the block that a request got; its place says something about slacks."""
        size, segment = self.rules.round_size(requested), self.segment_at(address)
        if segment is None:
            return size
        i = bisect_left(self.active, address)
        limit = segment.address + segment.size
        if i < len(self.active):
            limit = min(limit, self.active[i])
        open_ = self.open.get(_key(segment), {})
        before = open_.pop(self.active[i - 1], None) if i and self.active[i - 1] >= segment.address else None
        if before is not None and address - before.end in before.possible:
            before.possible = [address - before.end]
        fresh = segment.address in self.fresh
        self.fresh.discard(segment.address)
        for slack in open_.values():
            slack.no_better_fit(size, 2**62 if fresh else limit - address, address)
        split = self.rules.should_split(limit - address, size, segment.small)
        return size if split else max(size, limit - address)

    def forget(self, address: int) -> None:
        """A block is free: the gap of the block before it grows, its own slack is a gap like any other."""
        del self.sizes[address]
        i = bisect_left(self.active, address)
        del self.active[i]
        segment = self.segment_at(address)
        if segment is None:
            return
        open_ = self.open.get(_key(segment), {})
        open_.pop(address, None)
        if i and self.active[i - 1] in open_ and self.active[i - 1] >= segment.address:
            limit = segment.address + segment.size
            open_[self.active[i - 1]].limit = min(limit, self.active[i]) if i < len(self.active) else limit


def _key(segment: Segment) -> tuple:
    return segment.pool_id, segment.small, segment.stream


def _with_slack(segment: Segment, found: dict[int, Slack]) -> Segment:
    """The segment's blocks as they are once the slacks are found: the free block behind each shrinks."""
    blocks: list[BlockInfo] = []
    for block in segment.blocks:
        shift = found[blocks[-1].address].bytes if blocks and blocks[-1].address in found else 0
        if shift and block.state == INACTIVE:
            blocks[-1] = blocks[-1]._replace(size=blocks[-1].size + shift)
            block = block._replace(address=block.address + shift, size=block.size - shift)
        blocks.append(block)
    return replace(segment, blocks=tuple(blocks))
