"""The rules by which PyTorch's CUDA caching allocator hands out memory, function by function.

`DeviceAllocator` is `DeviceCachingAllocator` of `c10/cuda/CUDACachingAllocator.cpp`, read in PyTorch 2.1 to 2.13; its
methods bear the names that the rules have there. Memory comes from the driver in *segments*, is cut into *blocks*, and
a block that is freed waits in its pool for the next request of the same stream.

Left out, because a stream of allocations does not decide it: when another stream has finished with a block (whoever
drives the model calls `free_block` then), and which private pool a CUDA graph's capture takes from (`pool_id` says).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from .units import MiB, round_up

MIN_BLOCK: Final = 512  # kMinBlockSize: requests are rounded to its multiples
SMALL_SIZE: Final = 1 * MiB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT: Final = 2 * MiB  # kSmallBuffer
MIN_LARGE_ALLOC: Final = 10 * MiB  # kMinLargeAlloc: smaller ones share a segment of 20 MiB
ROUND_LARGE: Final = 2 * MiB  # kRoundLarge

UNLIMITED: Final = 2**62
DEFAULT_POOL: Final = (0, 0)
FIRST_ADDRESS: Final = 0x7F00_0000_0000
ADDRESS_SPACE: Final = 2**38
"""Bytes that an expandable segment may grow to where the GPU's memory is unknown: more than 9/8 of any GPU's."""


class BlockInfo(NamedTuple):
    """A part of a segment. `state` is "active_allocated", "active_pending_free" (freed, but another stream still uses
    it) or "inactive"; `requested` is what was last asked for, in bytes."""

    address: int
    size: int
    requested: int
    state: str


@dataclass(frozen=True)
class Segment:
    """Memory taken from the driver in one piece, or a contiguous mapped range of an expandable segment."""

    address: int
    size: int
    stream: int
    small: bool
    blocks: tuple[BlockInfo, ...]
    pool_id: tuple[int, int] = DEFAULT_POOL
    expandable: bool = False
    device: int = 0

    @property
    def allocated(self) -> int:
        """Bytes of the blocks that are allocated."""
        return sum(block.size for block in self.blocks if block.state == "active_allocated")


class SegmentEvent(NamedTuple):
    """Memory taken from the driver or given back: segment_alloc, segment_free, segment_map or segment_unmap."""

    action: str
    address: int
    size: int
    stream: int


class Block:
    """A block, linked to its neighbours in the segment (`Block`)."""

    __slots__ = (
        *("address", "size", "stream", "pool", "page", "prev", "next"),
        *("requested", "allocated", "active", "mapped", "gc_base"),
    )

    def __init__(self, address: int, size: int, stream: int, pool: Pool, page: int = 0) -> None:
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.page = page  # of an expandable segment, otherwise 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.allocated = False
        self.active = False  # allocated, or freed while another stream still uses it
        self.mapped = True  # has memory behind it; always so unless expandable
        self.gc_base = 0

    def __lt__(self, other: Block) -> bool:
        return id(self) < id(other)  # only recordings that contradict themselves have two in one place

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Keeps the first `size` bytes and returns the rest as a block of its own."""
        rest = Block(self.address + size, self.size - size, self.stream, self.pool, self.page)
        rest.mapped, rest.prev, rest.next = self.mapped, self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.size, self.next = size, rest
        return rest

    def absorb_next(self) -> None:
        self.size += self.next.size
        self.next = self.next.next
        if self.next is not None:
            self.next.prev = self

    def room(self) -> int:
        """Bytes that a free block can become: with the unmapped space behind it, if it can grow."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)


class Pool:
    """Free blocks by stream, size and address, which is the order of best fit (`BlockPool`, `BlockComparatorSize`)."""

    def __init__(self, pool_id: tuple[int, int], small: bool) -> None:
        self.id, self.small = pool_id, small
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []  # by stream and address (`BlockComparatorAddress`)
        self.calls = 0  # get_free_blocks_call_count: the clock of garbage collection

    def insert(self, block: Block) -> None:
        if block.mapped:
            block.gc_base = self.calls
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def erase(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address, block))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address, block))]


class DeviceAllocator:
    """The state of one GPU's allocator.

    Args:
        total: Bytes that the driver has.
        allowed: Bytes that the process may reserve of them (`allowed_memory_maximum`); None if there is no such limit.
        divisions: Steps between powers of two that sizes below 2 MiB, 4 MiB, ... are rounded to; 0 and 1 mean 512 B.
        cuda_malloc: Says at which address the driver puts so many new bytes; rising addresses unless given.

    The other arguments are settings of `PYTORCH_CUDA_ALLOC_CONF`, in bytes; `Allocator` checks and explains them.

    Attributes:
        allocated, reserved, requested, inactive_split: Bytes now, as `torch.cuda.memory_stats` counts them.
        segment_events: What was taken from the driver and given back so far.
    """

    def __init__(
        self,
        *,
        total: int = UNLIMITED,
        allowed: int | None = None,
        max_split_size: int = UNLIMITED,
        max_non_split_rounding: int = 20 * MiB,
        large_segment: int = 20 * MiB,
        divisions: tuple[int, ...] = (),
        garbage_collection_threshold: float = 0.0,
        expandable_segments: bool = False,
        cuda_malloc: Callable[[int], int] | None = None,
    ) -> None:
        self.total, self.allowed = total, UNLIMITED if allowed is None else allowed
        self.max_split_size, self.max_non_split_rounding = max_split_size, max_non_split_rounding
        self.large_segment = large_segment
        self.divisions = divisions if any(divisions) else ()
        self.garbage_collection_threshold = garbage_collection_threshold
        self.collects_garbage = garbage_collection_threshold > 0 and allowed is not None
        self.expandable_segments = expandable_segments
        self.cuda_malloc = cuda_malloc or self.next_address
        self._top = FIRST_ADDRESS
        self._pools: dict[tuple[tuple[int, int], bool], Pool] = {}
        self._heads: dict[int, Block] = {}  # each segment's first block, by address
        self.allocated = self.reserved = self.requested = self.inactive_split = 0
        self.segment_events: list[SegmentEvent] = []

    def next_address(self, size: int) -> int:
        """Where new memory lies if nobody says otherwise."""
        address, self._top = self._top, round_up(self._top + size, ROUND_LARGE)
        return address

    # -- what a program calls ------------------------------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool_id: tuple[int, int] = DEFAULT_POOL) -> Block | None:
        """A block of at least `requested` bytes, or None when memory has run out (`malloc`)."""
        size = self.round_size(requested)
        pool = self.get_pool(pool_id, size <= SMALL_SIZE)
        block = self.get_free_block(pool, size, stream)
        if block is None:
            if self.collects_garbage:
                self.garbage_collect_cached_blocks()
            block = (
                self.alloc_block(pool, size, stream)
                or (self.release_available_cached_blocks(pool, size, stream) and self.alloc_block(pool, size, stream))
                or (self.release_cached_blocks() and self.alloc_block(pool, size, stream))
            )
            if not block:
                return None
        return self.alloc_found_block(block, size, requested)

    def free(self, block: Block) -> None:
        """Gives a block back that only its own stream has used (`free`)."""
        self.request_free(block)
        self.free_block(block)

    def request_free(self, block: Block) -> None:
        """Counts a block as freed; it stays where it is until `free_block` (`free` after `record_stream`)."""
        block.allocated = False
        self.allocated -= block.size

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def round_size(self, size: int) -> int:
        """Multiples of 512 B, or steps between powers of two (`round_size`, `roundup_power2_next_division`)."""
        if self.divisions and size >= MIN_BLOCK:
            interval = max(size.bit_length() - MiB.bit_length(), 0)  # AcceleratorAllocatorConfig
            divisions = self.divisions[min(interval, len(self.divisions) - 1)]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                return round_up(size, (1 << size.bit_length() - 1) // divisions)
        return max(MIN_BLOCK, (size + MIN_BLOCK - 1) & -MIN_BLOCK)

    def get_allocation_size(self, size: int) -> int:
        """What is asked of the driver for a request that finds no block (`get_allocation_size`)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return self.large_segment if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)

    def should_split(self, available: int, size: int, small: bool) -> bool:
        """Whether the remainder becomes a block of its own or stays unused behind the request (`should_split`)."""
        remaining = available - size
        if small or self.expandable_segments:
            return remaining >= MIN_BLOCK
        return size < self.max_split_size and remaining > SMALL_SIZE

    # -- blocks --------------------------------------------------------------------------------------------------------

    def get_pool(self, pool_id: tuple[int, int], small: bool) -> Pool:
        """Requests of at most 1 MiB and larger ones never share a segment (`get_pool`)."""
        pool = self._pools.get((pool_id, small))
        if pool is None:
            pool = self._pools[pool_id, small] = Pool(pool_id, small)
        return pool

    def get_free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Best fit: the stream's smallest free block that is large enough, of equals the lowest (`get_free_block`)."""
        if self.collects_garbage:
            pool.calls += 1
        free = pool.free
        i = bisect_left(free, (stream, size))
        if i == len(free) or free[i][0] != stream:
            return None
        block = free[i][3]
        while block.page and i + 1 < len(free) and free[i + 1][0] == stream:
            if not self.narrower(free[i + 1][3], block):  # what can grow counts as large as it can become
                break
            i += 1
            block = free[i][3]
        if size < self.max_split_size <= block.size:
            return None  # an oversize block is kept for oversize requests
        if size >= self.max_split_size and block.size >= size + self.max_non_split_rounding:
            return None
        self._take(block)
        return block

    def narrower(self, a: Block, b: Block) -> bool:
        """Whether one free block can grow less than another."""
        return a.room() < b.room()

    def alloc_found_block(self, block: Block, size: int, requested: int) -> Block:
        """Splits off what is left over, and counts (`alloc_found_block`)."""
        if self.should_split(block.size, size, block.pool.small):
            self._put(block.split(size))
        block.allocated = block.active = True
        block.requested = requested
        self.allocated += block.size
        self.requested += requested
        return block

    def free_block(self, block: Block) -> None:
        """Makes a block available again, as one with its free neighbours (`free_block`)."""
        block.active = False
        self.requested -= block.requested
        self._put(self.try_merge_blocks(block))

    def try_merge_blocks(self, block: Block) -> Block:
        """The block as one with its free neighbours, which leave their pool (`try_merge_blocks`)."""
        prev, next_ = block.prev, block.next
        if next_ is not None and not next_.active and next_.mapped == block.mapped:
            self._take(next_)
            block.absorb_next()
        if prev is not None and not prev.active and prev.mapped == block.mapped:
            self._take(prev)
            prev.absorb_next()
            return prev
        return block

    def _put(self, block: Block) -> None:
        block.pool.insert(block)
        if not block.page and (block.prev or block.next):
            self.inactive_split += block.size

    def _take(self, block: Block) -> None:
        block.pool.erase(block)
        if not block.page and (block.prev or block.next):
            self.inactive_split -= block.size

    # -- segments ------------------------------------------------------------------------------------------------------

    def alloc_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A new segment, if the process may have it and the driver has it (`alloc_block`)."""
        segment = self.get_allocation_size(size)
        if self.reserved + segment > self.allowed:
            return None
        if self.expandable_segments:
            return self.try_allocate_expandable_block(pool, size, stream)
        if self.reserved + segment > self.total:
            return None
        block = Block(self.cuda_malloc(segment), segment, stream, pool)
        self._heads[block.address] = block
        self._count("segment_alloc", block, segment)
        return block

    def release_available_cached_blocks(self, pool: Pool, size: int, stream: int) -> bool:
        """Gives back oversize blocks, as few as the request needs (`release_available_cached_blocks`)."""
        if self.max_split_size == UNLIMITED:
            return False
        blocks = self.oversize_blocks(pool, size, stream)
        for block in blocks:
            self.release_block(block)
        return sum(block.size for block in blocks) >= max(size, self.max_split_size)

    def oversize_blocks(self, pool: Pool, size: int, stream: int) -> list[Block]:
        """One oversize block that is large enough, or the largest ones until they are together."""
        wanted = max(size, self.max_split_size)
        i = bisect_left(pool.free, (stream, wanted))
        if i < len(pool.free) and pool.free[i][0] == stream and not pool.free[i][3].page:
            return [pool.free[i][3]]
        chosen: list[Block] = []
        for _, _, _, block in reversed(pool.free[:i]):
            enough = sum(block.size for block in chosen) >= wanted
            if enough or block.stream != stream or block.size < self.max_split_size:
                break
            if not block.page:
                chosen.append(block)
        return chosen

    def release_cached_blocks(self, *pool_ids: tuple[int, int]) -> bool:
        """Gives back what no live block holds (`release_cached_blocks`; `torch.cuda.empty_cache` calls it too).

        Args:
            pool_ids: Private pools that no graph uses any more; they are released as well.
        """
        for pool in self._release_order(pool_ids):
            self.release_blocks(pool)
        return True

    def cached_segments(self, *pool_ids: tuple[int, int]) -> list[Block]:
        """The segments that `release_cached_blocks` would give back, in that order."""
        pools = self._release_order(pool_ids)
        return [block for pool in pools for *_, block in pool.free if not block.page and not block.is_split]

    def _release_order(self, pool_ids: Iterable[tuple[int, int]]) -> list[Pool]:
        keys = [(DEFAULT_POOL, False), (DEFAULT_POOL, True)]
        keys += [(pool_id, small) for pool_id in pool_ids for small in (True, False)]
        return [self._pools[key] for key in keys if key in self._pools]

    def release_blocks(self, pool: Pool) -> None:
        """Gives back unsplit blocks, and whole free pages of expandable segments (`release_blocks`)."""
        free = [entry[3] for entry in pool.free]
        for block in free:
            if not block.page and not block.is_split:
                self.release_block(block)
        for block in free:
            if block.page:
                self.unmap_block(block)

    def release_block(self, block: Block) -> None:
        """Gives a segment back to the driver (`release_block`)."""
        self._take(block)
        del self._heads[block.address]
        self._count("segment_free", block, -block.size)

    def garbage_collect_cached_blocks(self) -> None:
        """Gives back free segments of at least average age until enough is (`garbage_collect_cached_blocks`)."""
        target = self.reserved - int(self.garbage_collection_threshold * self.allowed)
        pool = self.get_pool(DEFAULT_POOL, small=False)
        ages = {block: pool.calls - block.gc_base for *_, block in pool.free if not block.is_split}
        reclaimed, freed = 0, True
        while reclaimed < target and freed and ages:
            average = sum(ages.values()) / len(ages)
            freed = [block for block, age in ages.items() if age >= average]
            for block in freed:
                reclaimed += block.size
                del ages[block]
                self.release_block(block)

    # -- expandable segments -------------------------------------------------------------------------------------------

    def try_allocate_expandable_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Maps the pages that the request lacks (`try_allocate_expandable_block`)."""
        block = self.find_expandable_block(pool, size, stream)
        if not block.mapped:
            block = self.map_block(block, min(block.size, size))
        while block is not None and block.size < size:  # a free block, and an unmapped one behind it
            block = self.map_block(block.next, min(block.next.size, size - block.size))
        if block is not None:
            self._take(block)
        return block

    def find_expandable_block(self, pool: Pool, size: int, stream: int) -> Block:
        """The lowest place where free and unmapped blocks side by side hold the request (`find_expandable_block`)."""
        for owner, _, block in pool.unmapped[bisect_left(pool.unmapped, (stream,)) :]:
            if owner != stream:
                break
            if block.prev is not None and not block.prev.active:
                block = block.prev
            if sum(part.size for part in self.free_run(block, size)) >= size:
                return block
        return self.reserve_addresses(stream, pool, least=size)

    def free_run(self, block: Block | None, size: int) -> list[Block]:
        """Free and unmapped blocks side by side, from a block on, until they are so large or no more follow."""
        run: list[Block] = []
        while size > 0 and block is not None and not block.active:
            run.append(block)
            size, block = size - block.size, block.next
        return run

    def end_segment(self, block: Block, end: int, begin: int) -> None:
        """Cuts in two what was taken for one expandable segment (`restore`).

        Args:
            block: The unmapped block in which the first ends.
            end, begin: The addresses where it does, and from where on the rest of the block belongs to the second.
        """
        rest, limit = block.next, block.address + block.size
        block.size, block.next = end - block.address, None
        if not block.size:
            self._take(block)
            if block.prev is not None:
                block.prev.next = None
            elif self._heads.get(block.address) is block:
                del self._heads[block.address]
        if rest is None:
            return
        rest.prev = None
        if begin < limit:
            unmapped = Block(begin, limit - begin, block.stream, block.pool, block.page)
            unmapped.mapped, unmapped.next, rest.prev = False, rest, unmapped
            self._put(unmapped)
            rest = unmapped
        self._heads[rest.address] = rest

    def reserve_addresses(self, stream: int, pool: Pool, address: int | None = None, least: int = 0) -> Block:
        """A new expandable segment, nothing of it mapped (`ExpandableSegment`)."""
        page = SMALL_SEGMENT if pool.small else self.large_segment
        most = max(ADDRESS_SPACE, least) if self.total == UNLIMITED else self.total + self.total // 8
        space = round_up(most, page)
        address = self.cuda_malloc(space) if address is None else address
        block = self._heads[address] = Block(address, space, stream, pool, page)
        block.mapped = False
        self._put(block)
        return block

    def map_block(self, block: Block, size: int) -> Block | None:
        """Puts whole pages behind the beginning of an unmapped block (`map_block`, `ExpandableSegment::map`)."""
        mapped = round_up(size, block.page)
        if self.reserved + mapped > self.total:
            return None
        self._take(block)
        if mapped < block.size:
            self._put(block.split(mapped))
        block.mapped = True
        self._count("segment_map", block, mapped)
        block = self.try_merge_blocks(block)
        self._put(block)
        return block

    def unmap_block(self, block: Block) -> None:
        """Takes the whole pages from behind a free block (`unmap_block`, `ExpandableSegment::unmap`)."""
        head = block
        while head.prev is not None:
            head = head.prev
        before = -(block.address - head.address) % block.page
        size = (block.size - before) // block.page * block.page
        if size <= 0:
            return
        self._take(block)
        if before:
            rest = block.split(before)
            self._put(block)
            block = rest
        if size < block.size:
            self._put(block.split(size))
        block.mapped = False
        self._count("segment_unmap", block, -size)
        block = self.try_merge_blocks(block)
        if block.is_split:
            self._put(block)
        else:
            del self._heads[block.address]  # release_expandable_segment

    def _count(self, action: str, block: Block, change: int) -> None:
        self.reserved += change
        self.segment_events.append(SegmentEvent(action, block.address, abs(change), block.stream))

    # -- the state as a whole ------------------------------------------------------------------------------------------

    def begins_segment(self, address: int) -> bool:
        """Whether a segment begins there."""
        return address in self._heads

    def segments(self) -> Iterator[Segment]:
        """What is reserved, by address (`snapshot`)."""
        for _, head in sorted(self._heads.items()):
            mapped: list[Block] = []
            block: Block | None = head
            while block is not None or mapped:
                if block is not None and block.mapped:
                    mapped.append(block)
                elif mapped:
                    yield _segment(mapped)
                    mapped = []
                block = block.next if block is not None else None

    def restore(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Takes over a state that was recorded, and returns the active blocks by address.

        Mapped ranges of one pool and stream are taken for parts of one expandable segment, which begins at the first; a
        range of no bytes says that it begins before.
        """
        unmapped: dict[tuple[Pool, int], Block] = {}  # what follows the last mapped range
        for segment in sorted(segments, key=lambda segment: segment.address):
            pool = self.get_pool(segment.pool_id, segment.small)
            for owner, block in unmapped.items():
                if segment.size and owner != (pool, segment.stream) and segment.address < block.address + block.size:
                    self.end_segment(block, max(segment.address, block.address), block.address + block.size)
            if segment.expandable:
                block = unmapped.get((pool, segment.stream))
                if block is None or segment.address >= block.address + block.size:
                    block = self.reserve_addresses(segment.stream, pool, segment.address)
                    unmapped[pool, segment.stream] = block
                if not segment.size:
                    continue
                self._take(block)
                if segment.address > block.address:
                    rest = block.split(segment.address - block.address)
                    self._put(block)
                    block = rest
                unmapped[pool, segment.stream] = block.split(segment.size)
                self._put(unmapped[pool, segment.stream])
                block.mapped = True
            else:
                block = Block(segment.address, segment.size, segment.stream, pool)
                self._heads[block.address] = block
            self.reserved += segment.size
            for info in segment.blocks:
                rest = block.split(info.size) if info.size < block.size else None
                block.requested = info.requested
                block.allocated = info.state == "active_allocated"
                block.active = info.state != "inactive"
                block = rest
        active = {}
        for head in self._heads.values():
            block = head
            while block is not None:
                if block.active:
                    active[block.address] = block
                    self.allocated += block.size if block.allocated else 0
                    self.requested += block.requested
                elif block.mapped:
                    self._put(block)
                block = block.next
        return active


def _segment(blocks: list[Block]) -> Segment:
    states = [
        "active_allocated" if block.allocated else "active_pending_free" if block.active else "inactive"
        for block in blocks
    ]
    first, size = blocks[0], sum(block.size for block in blocks)
    infos = (BlockInfo(b.address, b.size, b.requested, state) for b, state in zip(blocks, states, strict=True))
    return Segment(first.address, size, first.stream, first.pool.small, tuple(infos), first.pool.id, first.page > 0)
