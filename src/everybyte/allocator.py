"""What a GPU would reserve for a timeline, and where it would run out: the caching allocator with its settings.

`Allocator` holds the settings of `PYTORCH_CUDA_ALLOC_CONF` and feeds a timeline to the rules of `caching`. Three sizes
are kept apart: what was *requested*, what is *allocated* (whole blocks, `torch.cuda.memory_allocated`) and what is
*reserved* (segments, `torch.cuda.memory_reserved`).

New segments lie at rising addresses. A real driver may place them otherwise, which matters only where two free blocks
of one size compete: the lower address wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import gpus, workspace
from .caching import DEFAULT_POOL, SMALL_SEGMENT, SMALL_SIZE, UNLIMITED, Block, DeviceAllocator, Segment, SegmentEvent
from .gpus import GPU
from .places import led_there
from .timeline import Timeline
from .units import MiB, format_bytes, parse_bytes, round_up

INTERVALS: Final = 16  # kRoundUpPowerOfTwoIntervals: below 2 MiB, below 4 MiB, ... and from 32 GiB on


@dataclass(frozen=True)
class Fragmentation:
    """Where the reserved bytes are after an event; all counts are bytes.

    `reserved == requested + rounding + unsplit + inactive_split + releasable`; the first three are what is allocated.

    Attributes:
        event: The event.
        requested: What was asked for.
        rounding: Rounding of each request to 512 B, or to the steps that are set.
        unsplit: Remainders of blocks that are too small to be split off.
        inactive_split: Free blocks in segments that live blocks hold; what fits may still go there, but they cannot be
            given back.
        releasable: Free segments, and free parts of expandable ones, whose whole pages can be given back.
    """

    event: int
    reserved: int
    requested: int
    rounding: int
    unsplit: int
    inactive_split: int
    releasable: int

    def __str__(self) -> str:
        parts = (
            (self.rounding, "rounding"),
            (self.unsplit, "remainders too small to split off"),
            (self.inactive_split, "gaps in segments that live blocks hold"),
            (self.releasable, "free and could be given back"),
        )
        rest = [f"{format_bytes(nbytes)} {what}" for nbytes, what in parts if nbytes]
        return ", ".join([f"{format_bytes(self.reserved)} reserved: {format_bytes(self.requested)} asked for", *rest])


@dataclass(frozen=True)
class OutOfMemory:
    """The allocation that failed, after all that could be released was; all counts are bytes.

    Attributes:
        event: Its place in the timeline.
        requested: What was asked for.
        segment: What was asked of the driver for it.
        free: What the driver (or the process's fraction) still had.
        allocated, reserved: As `torch.cuda.memory_allocated` and `memory_reserved` would say.
        largest_free: The largest cached block that the request could have been given.
        split_segment: The segment with the most free bytes that live blocks hold; 0 if there is none.
        live_blocks, live_bytes: How many blocks hold it, and how large they are together.
        cause: "demand" if the live blocks and the request exceed the memory however they lie, "limit" if the driver had
            enough and the process was refused it (its own fraction, in a recording), else "fragmentation".
        needed: What the whole timeline comes to at its fullest, each request rounded: less memory than this never does.
        op, line, own: Who asked, as in the timeline; "" where nobody knows.
    """

    event: int
    requested: int
    segment: int
    free: int
    allocated: int
    reserved: int
    largest_free: int
    split_segment: int
    live_blocks: int
    live_bytes: int
    cause: str
    needed: int
    op: str = ""
    line: str = ""
    own: str = ""

    @property
    def room(self) -> int:
        """The memory with which the request failed: of what a limit refused, less than was asked for."""
        return self.reserved + (self.segment - 1 if self.cause == "limit" else self.free)

    def __str__(self) -> str:
        limit = self.reserved + self.free
        by, at = self.op and f" by {self.op}", self.line and f" at {self.line}{led_there(vars(self))}"
        when = "" if by or at else f" at event {self.event:,}"
        asked = f"out of memory{when}: {format_bytes(self.requested)} asked for{by}{at}, "
        if self.cause == "demand":
            return asked + (
                f"but {format_bytes(self.allocated)} of {format_bytes(limit)} are allocated already: demand, not "
                "fragmentation; the tensors themselves do not fit"
            )
        if self.cause == "limit":
            return asked + (
                f"with {format_bytes(self.allocated)} allocated, and the driver still had {format_bytes(self.free)}: a "
                "limit of the process, such as per_process_memory_fraction"
            )
        verdict = "fragmentation, not demand"
        if self.needed > limit:
            verdict = f"fragmentation here, and demand all the same: at its fullest the run needs {self.needed:,} B"
        return asked + (
            f"{format_bytes(limit - self.allocated)} of {format_bytes(limit)} are not allocated, but "
            f"{format_bytes(self.reserved - self.allocated)} of them lie in segments that live blocks hold, in pieces "
            f"of at most {format_bytes(self.largest_free)}; the one that wastes most has "
            f"{format_bytes(self.split_segment)} and cannot be given back, for live blocks of together "
            f"{format_bytes(self.live_bytes)} ({self.live_blocks:,}) are in it: {verdict}"
        )


@dataclass(frozen=True, eq=False)
class Replay:
    """What the allocator did with a timeline.

    Attributes:
        allocated, reserved, requested, rounded, inactive_split: Bytes after each event, `[events]`; shorter than the
            timeline if memory ran out. `allocated` counts whole blocks, as `torch.cuda.memory_allocated` does.
        addresses: The block's address for each event, `[events]`; 0 for an empty storage.
        segments: What is reserved at the end, by address.
        segment_events: What was taken from the driver and given back, in order.
        segment_events_upto: How many of those had happened after each event, `[events]`.
        out_of_memory: What failed, or None.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    requested: np.ndarray
    rounded: np.ndarray
    inactive_split: np.ndarray
    addresses: np.ndarray
    segments: tuple[Segment, ...]
    segment_events: tuple[SegmentEvent, ...]
    segment_events_upto: np.ndarray
    out_of_memory: OutOfMemory | None

    @cached_property
    def peak_allocated(self) -> int:
        """Bytes of whole blocks at their peak, as `torch.cuda.max_memory_allocated` reports."""
        return int(self.allocated.max(initial=0))

    @cached_property
    def peak_reserved(self) -> int:
        """Bytes of segments at their peak, as `torch.cuda.max_memory_reserved` reports."""
        return int(self.reserved.max(initial=0))

    @cached_property
    def fragmentation(self) -> Fragmentation | None:
        """Where the reserved bytes are when most are, at the fullest of those moments; None in an empty run."""
        if not len(self.reserved):
            return None
        return self.fragmentation_at(int(np.where(self.reserved == self.peak_reserved, self.allocated, -1).argmax()))

    def fragmentation_at(self, event: int) -> Fragmentation:
        """Where the reserved bytes are after an event; -1 is the last."""
        series = (self.allocated, self.reserved, self.requested, self.rounded, self.inactive_split)
        allocated, reserved, requested, rounded, split = (int(one[event]) for one in series)
        parts = (requested, rounded - requested, allocated - rounded, split, reserved - allocated - split)
        return Fragmentation(event % len(self.reserved), reserved, *parts)

    def explain(self) -> str:
        """The figures in sentences: allocated and reserved, at the end and at the peaks, and why they differ."""
        if not len(self.reserved):
            return "nothing was allocated"
        at_last = format_bytes(int(self.allocated[-1]))
        lines = [
            f"Allocated peaked at {format_bytes(self.peak_allocated)} and is {at_last} at the end.",
            f"Reserved peaked at {format_bytes(self.peak_reserved)}; it stays at what the largest moment needed, so "
            "compare peak with peak.",
            f"At that moment {self.fragmentation}.",
            f"At the end {self.fragmentation_at(-1)}.",
        ]
        live = [block for segment in self.segments for block in segment.blocks if block.state != "inactive"]
        largest = max(live, key=lambda block: block.size - block.requested, default=None)
        if self.fragmentation_at(-1).unsplit:
            lines.append(
                f"The largest of those remainders: {format_bytes(largest.requested)} asked for lie in a free block of "
                f"{format_bytes(largest.size)}, whose rest is not above 1 MiB and so not split off."
            )
        if kept := [block.requested for block in live].count(workspace.DEFAULT):
            lines.append(f"Of what is allocated then, {kept} x {workspace.named(workspace.DEFAULT)}.")
        return " ".join([*lines, f"{self.out_of_memory}."] if self.out_of_memory else lines)


@dataclass(frozen=True)
class Allocator:
    """The allocator of a GPU, with the settings of `PYTORCH_CUDA_ALLOC_CONF` and PyTorch's checks of them.

        >>> with eb.trace(rules="cuda") as run:
        ...     x = torch.ones(1_000)
        >>> replay = eb.Allocator(total="16 GB").replay(run.timeline)
        >>> replay.peak_allocated, replay.peak_reserved  # 4,000 B in 512s, in a segment of 2 MiB
        (4096, 2097152)

    Args:
        total: Memory that the allocator may reserve: bytes, or as people write it ("16 GB"); what the CUDA context and
            other processes take is already gone from it. None never runs out.
        gpu: In its place a GPU of `everybyte.gpus`, by name or described: its memory less the most that a CUDA context
            is reported to take.
        max_split_size_mb: Blocks of this many MiB and more are not split; at least 20.
        max_non_split_rounding_mb: How much larger than the request such a block may be; at least 20.
        large_segment_size_mb: The segment that requests of 1 to 10 MiB share; more than 10.
        roundup_power2_divisions: Rounds sizes up to one of so many steps between powers of two: a power of two for all
            sizes, or a mapping from an interval's start in MiB (a power of two; last, ">" for the rest) to a power of
            two or 0. 0 rounds to 512 B.
        garbage_collection_threshold: In (0, 1): share of the allowed memory above which old free segments are given
            back before new ones are taken. Acts only where `per_process_memory_fraction` is below 1, as in PyTorch.
        expandable_segments: One growing segment for each pool and stream.
        per_process_memory_fraction: In [0, 1]: share of `total`, or of all that the GPU has, that may be reserved.

    Raises:
        ValueError, TypeError: If a setting is one that PyTorch refuses.
    """

    total: int | str | None = None
    _: KW_ONLY
    gpu: str | GPU | None = None
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    large_segment_size_mb: int = 20
    roundup_power2_divisions: int | Mapping[int | str, int] = 0
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.total is not None and parse_bytes(self.total) <= 0:
            raise ValueError(f"total must be positive, not {self.total!r}")
        if self.gpu is not None and self.total is not None:
            raise ValueError(f"total={self.total!r} and gpu={self.gpu!r}: say one of them")
        self.memory  # noqa: B018  (finds the GPU)
        for name, least in (
            ("max_split_size_mb", 20),
            ("max_non_split_rounding_mb", 20),
            ("large_segment_size_mb", 11),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name} is a whole number of MiB, not {value!r}")
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not isinstance(self.expandable_segments, bool):
            raise TypeError(f"expandable_segments is True or False, not {self.expandable_segments!r}")
        if self.garbage_collection_threshold != 0 and not 0 < self.garbage_collection_threshold < 1:
            raise ValueError(
                f"garbage_collection_threshold lies between 0 and 1, not {self.garbage_collection_threshold}"
            )
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise ValueError(f"per_process_memory_fraction lies in [0, 1], not {self.per_process_memory_fraction}")
        if self.per_process_memory_fraction < 1 and self.total is None and self.gpu is None:
            raise ValueError("per_process_memory_fraction is a share of the GPU's memory: say total as well")
        self.divisions  # noqa: B018  (checks them)

    @cached_property
    def memory(self) -> tuple[int, int]:
        """Bytes that may be reserved, and bytes that a share is a share of."""
        if self.gpu is not None:
            gpu = gpus.find(self.gpu)
            return gpu.usable[0], gpu.total
        return (UNLIMITED if self.total is None else parse_bytes(self.total),) * 2

    @cached_property
    def divisions(self) -> tuple[int, ...]:
        """Steps between powers of two for sizes below 2 MiB, 4 MiB, ..., 64 GiB (`parseRoundUpPower2Divisions`)."""

        def power_of_two(value: int | str, what: str) -> int:
            if not str(value).isdecimal() or int(value) & (int(value) - 1):
                raise ValueError(f"roundup_power2_divisions: {what} must be a power of two, not {value!r}")
            return int(value)

        given = self.roundup_power2_divisions
        if not isinstance(given, Mapping):
            return (power_of_two(given, "divisions"),) * INTERVALS
        divisions, last = [0] * INTERVALS, -1
        for start, value in given.items():
            value = power_of_two(value, "divisions")
            if start == ">":
                divisions[last + 1 :] = [value] * (INTERVALS - last - 1)
                continue
            if power_of_two(start, "an interval") == 0:
                raise ValueError("roundup_power2_divisions: an interval starts at 1 MiB or above, not at 0")
            first, last = last < 0, min(int(start).bit_length() - 1, INTERVALS - 1)
            if first:
                divisions[:last] = [value] * last
            divisions[last] = value
        return tuple(divisions)

    def replay(self, timeline: Timeline, device: str | None = None) -> Replay:
        """Feeds a timeline's allocations and releases, in order, to an allocator that has nothing yet.

        Args:
            timeline: From a trace, a measurement or a recording. Whatever its device is called, the GPU's rules apply.
            device: Which device, where the timeline has several ("cuda:1").

        Returns:
            What was allocated and reserved after each event, up to the end or to an out-of-memory error.

        Raises:
            ValueError: If the timeline has several devices and none is named, or not the one that is.
        """
        devices = timeline.table["device"].unique().to_pylist()
        if device is None and len(devices) > 1:
            raise ValueError(f"the timeline has {', '.join(devices)}: say device={devices[0]!r} or another of them")
        if device is not None and device not in devices:
            raise ValueError(f"the timeline has no device {device!r}, only {', '.join(devices) or 'none'}")
        rows = timeline.table if len(devices) < 2 else timeline.table.filter(pc.field("device") == device)
        allocations = pc.equal(rows["action"].cast(pa.string()), "alloc").to_pylist()
        storages, sizes, streams = (rows[name].to_pylist() for name in ("storage", "nbytes", "stream"))

        model, failed = self.device(), None
        rounding = {nbytes: model.round_size(nbytes) if nbytes else 0 for nbytes in set(sizes)}
        changes = [rounding[n] if is_alloc else -rounding[n] for n, is_alloc in zip(sizes, allocations, strict=True)]
        rounded = np.cumsum(np.array(changes, np.int64))
        blocks: dict[int, Block] = {}
        addresses, driver = [], []
        stats: dict[str, list[int]] = {name: [] for name in ("allocated", "reserved", "requested", "inactive_split")}
        allocated, reserved, requested, inactive_split = stats.values()
        for event, (is_alloc, storage, nbytes, stream) in enumerate(
            zip(allocations, storages, sizes, streams, strict=True)
        ):
            block = None
            if not is_alloc:
                block = blocks.pop(storage, None)
            elif nbytes:  # an empty storage never reaches the allocator
                block = model.malloc(nbytes, stream)
                if block is None:
                    free = min(model.total, model.allowed) - model.reserved
                    failed = out_of_memory(model, event, nbytes, stream, free=free, needed=int(rounded.max()))
                    who = rows.slice(event, 1).select(["op", "line", "own"]).to_pylist()[0]
                    failed = replace(failed, **{name: text or "" for name, text in who.items()})
                    break
                blocks[storage] = block
            addresses.append(block.address if block else 0)
            if block and not is_alloc:
                model.free(block)
            driver.append(len(model.segment_events))
            allocated.append(model.allocated)
            reserved.append(model.reserved)
            requested.append(model.requested)
            inactive_split.append(model.inactive_split)
        return Replay(
            rounded=rounded[: len(addresses)],
            **{name: np.array(series, np.int64) for name, series in stats.items()},
            addresses=np.array(addresses, np.int64),
            segments=tuple(model.segments()),
            segment_events=tuple(model.segment_events),
            segment_events_upto=np.array(driver, np.int64),
            out_of_memory=failed,
        )

    def smallest_card(self, timeline: Timeline, grain: int = 2 * MiB) -> int:
        """The least memory in which a timeline ends, under these settings but for the memory.

        It is sought by halving between the peak of what is asked for and what is reserved where memory never ends.

        Args:
            timeline: Of one device.
            grain: Bytes of which the answer is a multiple; by default those of the driver's pages.
        """

        def ends(card: int) -> bool:
            return replace(self, total=card, gpu=None).replay(timeline).out_of_memory is None

        least = max(grain, round_up(timeline.peak_bytes, grain))
        most = replace(self, total=None, gpu=None).replay(timeline).peak_reserved
        cards = range(least, max(least, most) + grain, grain)
        return cards[bisect_left(cards, True, key=ends)]

    def device(self, kind: type[DeviceAllocator] = DeviceAllocator, **recorded: Any) -> DeviceAllocator:
        """The rules under these settings, with nothing allocated. `recorded` overrides its arguments."""
        total, whole = self.memory
        limited = self.per_process_memory_fraction < 1
        return kind(
            total=total,
            allowed=int(self.per_process_memory_fraction * whole) if limited else None,
            max_split_size=UNLIMITED if self.max_split_size_mb is None else self.max_split_size_mb * MiB,
            max_non_split_rounding=self.max_non_split_rounding_mb * MiB,
            large_segment=self.large_segment_size_mb * MiB,
            divisions=self.divisions,
            garbage_collection_threshold=self.garbage_collection_threshold,
            expandable_segments=self.expandable_segments,
            **recorded,
        )


def out_of_memory(
    model: DeviceAllocator, event: int, requested: int, stream: int, *, free: int, needed: int
) -> OutOfMemory:
    """Why a request failed, of which all else is known. `free` and `needed` are as in `OutOfMemory`."""
    size = model.round_size(requested)
    pool, segment = model.get_pool(DEFAULT_POOL, size <= SMALL_SIZE), model.get_allocation_size(size)
    if model.expandable_segments:  # whole pages, at most so many
        segment = round_up(size, SMALL_SEGMENT if size <= SMALL_SIZE else model.large_segment)
    cause = "fragmentation"
    held = [(s, [b.size for b in s.blocks if b.state != "inactive"]) for s in model.segments()]
    wasteful, live = max((entry for entry in held if entry[1]), key=lambda e: e[0].size - sum(e[1]), default=(None, []))
    if model.allocated + size > model.reserved + free:
        cause = "demand"
    elif free >= segment and model.allocated + size > model.reserved:
        cause = "limit"
    return OutOfMemory(
        event=event,
        requested=requested,
        segment=segment,
        free=free,
        allocated=model.allocated,
        reserved=model.reserved,
        largest_free=max((nbytes for owner, nbytes, *_ in pool.free if owner == stream), default=0),
        split_segment=wasteful.size if wasteful else 0,
        live_blocks=len(live),
        live_bytes=sum(live),
        cause=cause,
        needed=needed,
    )
