"""What `torch.cuda.memory_stats` counts, while a trace goes on: the allocator's rules fed with the events so far.

The names and what moves them are those of `DeviceStats` in `c10/core/CachingDeviceAllocator.h` and of
`c10/cuda/CUDACachingAllocator.cpp`, read in PyTorch 2.13.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from .caching import UNLIMITED, Block, DeviceAllocator
from .gpus import GPU
from .timeline import Recorder
from .workspace import Workspace

_SEGMENTS: Final = ("segment", "reserved_bytes")
_BLOCKS: Final = ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes")
_SPLITS: Final = ("inactive_split", "inactive_split_bytes")
_OVERSIZE: Final = ("oversize_allocations", "oversize_segments")  # only with max_split_size_mb, which a trace lacks


class Stat:
    """A count: now, at its highest, and all that was added and taken away (`Stat` of `c10/core/Allocator.h`)."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount


class CountingAllocator(DeviceAllocator):
    """The allocator's rules, and what they come to by pool."""

    def __init__(self, total: int) -> None:
        super().__init__(total=total)
        names = (*_SEGMENTS, *_BLOCKS, *_SPLITS)
        self.stats = {name: {pool: Stat() for pool in ("all", "small_pool", "large_pool")} for name in names}
        self.retries = self.ooms = 0
        self._split = [0, 0]  # of the call that runs: what it changes in the number and bytes of free split blocks

    def malloc(self, requested: int, stream: int = 0, *args: Any) -> Block:
        """A block, always: a trace goes on where a GPU's memory runs out, and counts that it did."""
        block = super().malloc(requested, stream, *args)
        if block is None:
            self.ooms += 1
            self.total = UNLIMITED
            block = super().malloc(requested, stream, *args)
        self._change(_BLOCKS, block, 1, block.size, 1, block.size, requested)
        self._settle(block)
        return block

    def free(self, block: Block) -> None:
        self._change(_BLOCKS, block, -1, -block.size, -1, -block.size, -block.requested)
        super().free(block)
        self._settle(block)

    def alloc_block(self, *args: Any) -> Block | None:
        block = super().alloc_block(*args)
        self.retries += block is None
        return block

    def _put(self, block: Block) -> None:
        super()._put(block)
        self._split = [self._split[0] + block.is_split, self._split[1] + block.size * block.is_split]

    def _take(self, block: Block) -> None:
        super()._take(block)
        self._split = [self._split[0] - block.is_split, self._split[1] - block.size * block.is_split]

    def _count(self, action: str, block: Block, change: int) -> None:
        super()._count(action, block, change)
        self._change(_SEGMENTS, block, 1 if change > 0 else -1, change)

    def _settle(self, block: Block) -> None:
        self._change(_SPLITS, block, *self._split)
        self._split = [0, 0]

    def _change(self, names: tuple[str, ...], block: Block, *amounts: int) -> None:
        for name, amount in zip(names, amounts, strict=True):
            for pool in ("all", "small_pool" if block.pool.small else "large_pool"):
                self.stats[name][pool].change(amount)


class MemoryStats:
    """The statistics of a trace under way, its tensors and the workspaces of its matrix products.

    What kernels take beside them and no rule states (`Trace.left_out`) a real run's figures have on top.

    Args:
        recorder: Of the trace.
        workspaces: Says which have been taken so far.
        gpu: Whose memory it is; its context is taken at its largest.
    """

    def __init__(self, recorder: Recorder, workspaces: Callable[[], Sequence[Workspace]], gpu: GPU) -> None:
        self.gpu = gpu
        self._recorder, self._workspaces = recorder, workspaces
        self._allocator = CountingAllocator(gpu.usable[0])
        self._blocks: dict[int, Block] = {}
        self._at = self._taken = 0

    def allocator(self) -> CountingAllocator:
        """The allocator's state now."""
        pending = deque(self._workspaces()[self._taken :])
        stream = 0

        def take_workspaces() -> None:
            while pending and pending[0].event <= self._at:
                self._allocator.malloc(pending.popleft().nbytes, stream)
                self._taken += 1

        for action, storage, nbytes, stream in self._recorder.events_from(self._at):
            take_workspaces()
            self._at += 1
            if action == "alloc" and nbytes:
                self._blocks[storage] = self._allocator.malloc(nbytes, stream)
            elif action == "free" and storage in self._blocks:
                self._allocator.free(self._blocks.pop(storage))
        take_workspaces()
        return self._allocator

    def nested(self) -> dict[str, Any]:
        """As `torch.cuda.memory_stats_as_nested_dict` (`THCPModule_memoryStats` of `torch/csrc/cuda/Module.cpp`)."""
        now = self.allocator()
        actions = [event.action for event in now.segment_events]
        return {
            **{name: {pool: dict(vars(stat)) for pool, stat in pools.items()} for name, pools in now.stats.items()},
            **{name: vars(Stat()) for name in _OVERSIZE},
            "num_alloc_retries": now.retries - now.ooms,
            "num_ooms": now.ooms,
            "num_sync_all_streams": 0,
            "num_device_alloc": actions.count("segment_alloc"),
            "num_device_free": actions.count("segment_free"),
            "max_split_size": -1,
        }

    def free_and_total(self) -> tuple[int, int]:
        """Bytes, as `cudaMemGetInfo` says: the context and what is reserved are taken."""
        return max(self.gpu.usable[0] - self.allocator().reserved, 0), self.gpu.total

    def reset_peak(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        for stat in self._each():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """`torch.cuda.reset_accumulated_memory_stats`."""
        for stat in self._each():
            stat.allocated = stat.freed = 0

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`."""
        self.allocator().release_cached_blocks()

    def _each(self) -> list[Stat]:
        return [stat for pools in self.allocator().stats.values() for stat in pools.values()]
