"""The allocator's rules at work on a recording's requests: what no file says, they learn from what follows.

Where the driver puts a new segment is recorded. How many addresses it sets apart for an expandable one is not (9/8 of
the GPU's memory, which no file holds), and a pool on a nearly full GPU may have several. `Rules` takes them for one as
long as it can, and cuts it where the recording goes elsewhere, as late as that allows; all else is the rules' own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .allocator import Allocator, Fragmentation, OutOfMemory, out_of_memory
from .caching import ADDRESS_SPACE, DEFAULT_POOL, SMALL_SIZE, UNLIMITED, Block, DeviceAllocator, Pool, Segment
from .rewind import Event, Recording
from .snapshot_file import RETURNS, TAKES

OFF_THE_RECORD = 2**60  # no GPU's address


class Rules(DeviceAllocator):
    """The rules, and what is recorded of the request that they are at.

    Attributes:
        taken: Where the recording has new memory for it, and how much, in order.
        expected: Where it has the block.
        waited: Whether streams were waited for, which made blocks free that the request was not given any more.
        ended: Where expandable segments were found to end.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, cuda_malloc=self.recorded_address)
        self.taken: deque[tuple[int, int]] = deque()
        self.expected = 0
        self.waited = False
        self.ended: list[int] = []
        self.held: dict[int, int] = {}  # sizes of the segments that do not expand, by address

    def restore(self, segments: Iterable[Segment]) -> dict[int, Block]:
        segments = list(segments)
        self.held = {segment.address: segment.size for segment in segments if not segment.expandable}
        return super().restore(segments)

    def _count(self, action: str, block: Block, change: int) -> None:
        super()._count(action, block, change)
        if action == "segment_alloc":
            self.held[block.address] = change
        elif action == "segment_free":
            del self.held[block.address]

    def get_free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """None where the recording has new memory, and what the rules would look at is not in it."""
        unknown = self.waited or (self.expandable_segments and self.max_split_size < UNLIMITED)
        return None if self.taken and unknown else super().get_free_block(pool, size, stream)

    def recorded_address(self, size: int) -> int:
        """Where the recording has the new segment; elsewhere if it has none, or the model has not left that place."""
        address = self.taken.popleft()[0] if self.taken else None
        taken = size < ADDRESS_SPACE and any(
            at < address + size and address < at + held for at, held in self.held.items() if address is not None
        )
        if address is None or taken or self.begins_segment(address):
            return OFF_THE_RECORD + self.next_address(size)
        for pool in self._pools.values():  # what is another's address is no longer theirs
            for _, at, block in list(pool.unmapped):
                if at < address < at + block.size:
                    self.end_segment(block, address, at + block.size)
        return address

    def find_expandable_block(self, pool: Pool, size: int, stream: int) -> Block:
        """The rules' choice, if the recording maps memory there; if not, its addresses had come to an end."""
        there = self.taken[0][0] if self.taken else None
        if self.waited and there is not None and not self.is_known(there):
            self.reserve_addresses(stream, pool, there)  # for a first try, which then had no memory for them
        while True:
            block = super().find_expandable_block(pool, size, stream)
            run = self.free_run(block, size)
            unmapped = [part for part in run if not part.mapped]
            told = self.taken and self.taken[0][0] == there  # not yet by a new segment
            if not told or not unmapped or there == unmapped[0].address or self.is_mapped(there):
                return block
            below = [part for part in unmapped if part.address < there < run[-1].address + run[-1].size]
            part = below[-1] if below else unmapped[-1]
            end, limit = part.address, part.address + part.size
            before = sum(other.size for other in run[: run.index(part)])
            behind = sum(other.size for other in self.free_run(part.next, size))
            if part.prev is not None:  # where so many bytes are not in one any more
                end = min(end + (size - 1 - before) // part.page * part.page, there if below else limit, limit)
            begin = end if part.prev is not None else limit - max(size - 1 - behind, 0) // part.page * part.page
            self.end_segment(part, end, there if below and there < limit else begin)
            self.ended.append(end)

    def narrower(self, a: Block, b: Block) -> bool:
        """The rules' choice, if the recording has the same; if not, a block can grow less than was thought."""
        says = a.room() < b.room()
        if self.taken or self.max_split_size < UNLIMITED or says != (self.expected == b.address):
            return says  # not the best fit, or nothing against it
        block, most = (b, a.room()) if says else (a, b.room() - 1)
        others = {other.address for *_, other in b.pool.free} - {b.address}
        if most < block.size or block.room() == block.size or not (says or self.expected in others):
            return says
        end = block.next.address + (most - block.size) // block.page * block.page
        self.end_segment(block.next, end, end)
        self.ended.append(end)
        return not says

    def map_in_vain(self, requested: int, stream: int, pool_id: tuple[int, int]) -> None:
        """The driver has only the recorded bytes for a request: what is mapped of it before that is known stays."""
        size, total = self.round_size(requested), self.total
        self.total = self.reserved + sum(nbytes for _, nbytes in self.taken)
        block = self.alloc_block(self.get_pool(pool_id, size <= SMALL_SIZE), size, stream)
        self.total = total
        self.taken.clear()
        if block is not None:
            self._put(block)

    def is_mapped(self, address: int) -> bool:
        """Whether memory lies behind an address."""
        return any(s.address <= address < s.address + s.size for s in self.segments())

    def is_known(self, address: int) -> bool:
        """Whether an address belongs to a segment, mapped or not."""
        unmapped = (entry[2] for pool in self._pools.values() for entry in pool.unmapped)
        return self.is_mapped(address) or any(b.address <= address < b.address + b.size for b in unmapped)


class Rerun:
    """A recording's requests, given to the rules one after the other.

    Attributes:
        series: Bytes allocated, rounded, requested and reserved before the first event and after each that is no
            segment's, `[events, 4]`.
        address_mismatches, reserved_mismatches: Allocations, and events, after which the two differ.
        unpredicted: Segments given back that the rules would have kept.
        collected: Of them those that garbage collection may give back: by their age, which no file holds.
        out_of_memory: The requests that failed.
        differences: The event at which rules and recording part; empty if they never do.
    """

    def __init__(self, allocator: Allocator, recording: Recording) -> None:
        self.recording = recording
        self.rules: Rules = allocator.device(Rules)
        self.blocks = self.rules.restore(recording.start)
        self.collects_garbage = allocator.garbage_collection_threshold > 0
        self.address_mismatches = self.reserved_mismatches = self.unpredicted = self.collected = 0
        self.pending = 0  # bytes of blocks that are freed, but that another stream still uses
        self.fullest = (-1, -1, 0, 0, 0, 0)  # bytes reserved and taken, event, requested, rounded, inactive split
        self.out_of_memory: list[OutOfMemory] = []
        self.differences: list[int] = []
        self.series: list[tuple[int, int, int, int]] = []

    def play(self, events: Sequence[Event]) -> None:
        rules, blocks, recording = self.rules, self.blocks, self.recording
        rounded = sum(rules.round_size(block.requested) for block in blocks.values())
        self.pending = sum(block.size for block in blocks.values() if not block.allocated)
        self.note(-1, rounded)
        reserved, returned = recording.reserved.tolist(), 0
        requests, following = _next_requests(events), [*(event.action for event in events[1:]), "alloc"]
        frees = any(event.action == "free_requested" for event in events)
        for i, event in enumerate(events):
            action, address, size, stream = event[:4]
            if action in RETURNS:
                if i >= returned:  # the first of a row of them
                    others = (j for j in range(i, len(events)) if events[j].action not in RETURNS)
                    returned = next(others, len(events))
                    self.give_back(events[i:returned], requests[i])
                continue
            if action in TAKES:
                rules.taken.append((address, size))
                if action == "segment_map" and following[i] not in ("segment_map", "alloc") and requests[i]:
                    rules.map_in_vain(requests[i].size, stream, event.pool_id)
                continue
            if action == "free_completed":
                rules.waited |= frees and (i == 0 or events[i - 1][:2] != ("free_requested", address))
            if action == "alloc":
                rules.expected = address
                block = rules.malloc(size, stream, event.pool_id)
                if block is None:
                    raise ValueError("the recording asks for more memory than any GPU has")
                blocks[address] = block
                self.address_mismatches += block.address != address
                rounded += rules.round_size(size)
            elif action == "oom":  # its address is what the driver had left
                needed = max(int(recording.rounded.max()), rounded + rules.round_size(size))
                self.out_of_memory.append(out_of_memory(rules, i, size, stream, free=address, needed=needed))
            elif address in blocks:
                block = blocks[address]
                if block.allocated:
                    rules.request_free(block)
                    self.pending += block.size
                if i in recording.releases:
                    rounded -= rules.round_size(block.requested)
                    self.pending -= block.size
                    rules.free_block(blocks.pop(address))
            if action != "free_completed":
                rules.taken.clear()
                rules.waited = False
            self.reserved_mismatches += rules.reserved != reserved[i + 1]
            if not self.differences and (self.address_mismatches or self.reserved_mismatches or self.unpredicted):
                self.differences.append(i)
            self.note(i, rounded)

    def note(self, event: int, rounded: int) -> None:
        rules, taken = self.rules, self.rules.allocated + self.pending
        self.series.append((rules.allocated, rounded, rules.requested, rules.reserved))
        if (rules.reserved, taken) > self.fullest[:2]:
            self.fullest = (rules.reserved, taken, event, rules.requested, rounded, rules.inactive_split)

    @property
    def fragmentation(self) -> Fragmentation:
        reserved, taken, event, requested, rounded, split = self.fullest
        parts = (rounded - requested, taken - rounded, split, reserved - taken - split)
        return Fragmentation(event, reserved, requested, *parts)

    def give_back(self, row: Sequence[Event], request: Event | None) -> None:
        """Why memory was given back is not recorded: for the request that follows, or because the program said so."""
        rules, addresses = self.rules, [event.address for event in row]
        private = dict.fromkeys(event.pool_id for event in row if event.pool_id != DEFAULT_POOL)
        if request is not None:
            size = rules.round_size(request.size)
            pool = rules.get_pool(request.pool_id, size <= SMALL_SIZE)
            oversize = rules.oversize_blocks(pool, size, request.stream)
            if oversize and addresses[: len(oversize)] == [block.address for block in oversize]:
                addresses = addresses[len(oversize) :]
                for block in oversize:
                    rules.release_block(block)
        cached = {block.address: block for block in rules.cached_segments(*private)}
        if addresses == list(cached) or any(event.action == "segment_unmap" for event in row):
            rules.release_cached_blocks(*private)
            return
        for address in addresses:
            block = cached.pop(address, None)
            if block is not None:
                rules.release_block(block)
            if block is not None and self.collects_garbage and not block.pool.small and block.pool.id == DEFAULT_POOL:
                self.collected += 1
            elif not (self.collected and cached.keys() <= set(addresses)):  # collected, and then all others given back
                self.unpredicted += 1


def _next_requests(events: Sequence[Event]) -> list[Event | None]:
    """For each event the next one that asks for memory."""
    found, following = [], None
    for event in reversed(events):
        following = event if event.action in ("alloc", "oom") else following
        found.append(following)
    return found[::-1]
