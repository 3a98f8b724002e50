"""A GPU's allocator written a second time from `c10/cuda/CUDACachingAllocator.cpp`, by another road than the library's.

No sorted pools and no links: each question is answered by looking at every part of every segment. It records as
PyTorch does. `program(kind, seed)` runs a random program on it, made to meet what is rare: a card that other processes
nearly fill, graphs' pools, streams that are waited for, oversize blocks, garbage collection.
"""

import random

from everybyte.units import MiB

FREE, ALLOCATED, PENDING, UNMAPPED = "inactive", "active_allocated", "active_awaiting_free", "unmapped"


def up(size, unit):
    return -(-size // unit) * unit


class Part:
    def __init__(self, segment, address, size, state):
        self.segment, self.address, self.size, self.state = segment, address, size, state
        self.requested = self.born = 0

    def beside(self, step):
        i = self.segment.parts.index(self) + step
        return self.segment.parts[i] if 0 <= i < len(self.segment.parts) else None

    def split(self, size):
        rest = Part(self.segment, self.address + size, self.size - size, self.state)
        self.size = size
        self.segment.parts.insert(self.segment.parts.index(self) + 1, rest)
        return rest


class Segment:
    def __init__(self, base, size, expandable, pool, stream):
        self.base, self.size, self.expandable, self.pool, self.stream = base, size, expandable, pool, stream
        self.page = (2 if pool[1] else 20) * MiB
        self.parts = [Part(self, base, size, UNMAPPED if expandable else FREE)]


class SimulatedGpu:
    def __init__(
        self, rng, total, expandable=False, max_split=None, divisions=0, allowed=None, threshold=0.0, rising=0
    ):
        self.rng, self.total, self.expandable, self.max_split = rng, total, expandable, max_split
        self.divisions, self.allowed, self.threshold, self.rising = divisions, allowed, threshold, rising
        self.segments, self.events, self.calls, self.ended_pools = [], [], {}, []
        self.others = 0  # bytes that other processes take
        self.capturing = False

    def log(self, action, address, size, stream, pool):
        where = "device_free" if action == "oom" else "addr"
        self.events.append({"action": action, where: address, "size": size, "stream": stream, "pool_id": pool[0]})

    def parts(self, pool=None, stream=None, state=FREE):
        every = (part for segment in self.segments for part in segment.parts if part.state == state)
        found = [p for p in every if pool in (None, p.segment.pool) and stream in (None, p.segment.stream)]
        return sorted(found, key=lambda p: (p.segment.stream, p.size if state == FREE else 0, p.address))

    @property
    def reserved(self):
        return sum(part.size for s in self.segments for part in s.parts if part.state != UNMAPPED)

    def new_segment(self, size, expandable, pool, stream):
        base = 0x7F00_0000_0000 + self.rising
        self.rising += up(size, 2 * MiB)
        if self.rng.random() < 0.5:  # the driver need not go up
            base = 0x7F00_0000_0000 - self.rising
        self.segments.append(Segment(base, size, expandable, pool, stream))
        return self.segments[-1].parts[0]

    def round(self, size):
        if self.divisions and size > 512 * self.divisions:
            return up(size, 2 ** (size.bit_length() - 1) // self.divisions)
        return max(up(size, 512), 512)

    def malloc(self, requested, stream=0, pool_id=(0, 0)):
        size = self.round(requested)
        pool = pool_id, size <= MiB
        part = self.cached(pool, size, stream)
        if part is None:
            if self.threshold:
                self.collect_garbage()
            part = self.fresh(pool, size, stream)
            if part is None and self.max_split and self.release_oversize(pool, size, stream):
                part = self.fresh(pool, size, stream)
            if part is None and not self.capturing:
                self.empty_cache()
                part = self.fresh(pool, size, stream)
            if part is None:
                self.log("oom", max(self.total - self.others - self.reserved, 0), requested, stream, pool)
                return None
        rest = part.size - size
        if rest >= 512 if pool[1] or self.expandable else size < (self.max_split or 2**62) and rest > MiB:
            part.split(size).born = self.calls.get(pool, 0)
        part.state, part.requested = ALLOCATED, requested
        self.log("alloc", part.address, requested, stream, pool)
        return part

    def cached(self, pool, size, stream):
        self.calls[pool] = self.calls.get(pool, 0) + 1
        fits = [part for part in self.parts(pool, stream) if part.size >= size]
        if not fits:
            return None

        def could_be(part):
            after = part.beside(1)
            return part.size + (after.size if after and after.state == UNMAPPED else 0)

        i = 0
        while fits[i].segment.expandable and i + 1 < len(fits) and could_be(fits[i + 1]) < could_be(fits[i]):
            i += 1
        oversize = self.max_split or 2**62
        if size < oversize <= fits[i].size or (size >= oversize and fits[i].size >= size + 20 * MiB):
            return None
        return fits[i]

    def fresh(self, pool, size, stream):
        new = 2 * MiB if size <= MiB else 20 * MiB if size < 10 * MiB else up(size, 2 * MiB)
        if self.allowed and self.reserved + new > self.allowed:
            return None
        if self.expandable:
            return self.grown(pool, size, stream)
        if self.reserved + self.others + new > self.total:
            return None
        part = self.new_segment(new, False, pool, stream)
        self.log("segment_alloc", part.address, new, stream, pool)
        return part

    def grown(self, pool, size, stream):
        for part in self.parts(pool, stream, UNMAPPED):
            before = part.beside(-1)
            part = before if before and before.state == FREE else part
            room, end = 0, part
            while room < size and end and end.state in (FREE, UNMAPPED):
                room, end = room + end.size, end.beside(1)
            if room >= size:
                break
        else:
            space = up(self.total + self.total // 8, (2 if pool[1] else 20) * MiB)
            part = self.new_segment(space, True, pool, stream)
        if part.state == UNMAPPED:
            part = self.map(part, min(part.size, size))
        while part is not None and part.size < size:
            part = self.map(part.beside(1), min(size - part.size, part.beside(1).size))
        return part

    def map(self, part, size):
        size = up(size, part.segment.page)
        if self.reserved + self.others + size > self.total:
            return None
        if size < part.size:
            part.split(size)
        self.log("segment_map", part.address, size, part.segment.stream, part.segment.pool)
        return self.become(part, FREE)

    def become(self, part, state):
        part.state, part.born = state, self.calls.get(part.segment.pool, 0)
        for other in (part.beside(-1), part.beside(1)):
            if other is not None and other.state == state:
                part.address, part.size = min(part.address, other.address), part.size + other.size
                part.segment.parts.remove(other)
        return part

    def free(self, part, others_use_it=False):
        self.log("free_requested", part.address, part.requested, part.segment.stream, part.segment.pool)
        part.state = PENDING
        if not others_use_it:
            self.complete(part)

    def complete(self, part):
        self.log("free_completed", part.address, part.requested, part.segment.stream, part.segment.pool)
        self.become(part, FREE)

    def release(self, part):
        self.log("segment_free", part.address, part.size, part.segment.stream, part.segment.pool)
        self.segments.remove(part.segment)

    def release_oversize(self, pool, size, stream):
        wanted, got = max(size, self.max_split), 0
        free = self.parts(pool, stream)
        large = [part for part in free if part.size >= wanted]
        if large and large[0].segment.expandable:
            return False
        for part in large[:1] or free[::-1]:
            if got >= wanted or part.size < self.max_split:
                break
            if not part.segment.expandable:
                got += part.size
                self.release(part)
        return got >= wanted

    def empty_cache(self):
        for part in self.parts(state=PENDING):  # the streams are waited for
            self.complete(part)
        for pool in [((0, 0), False), ((0, 0), True)] + [
            (i, small) for i in self.ended_pools for small in (True, False)
        ]:
            free = self.parts(pool)
            for part in free:
                if not part.segment.expandable and len(part.segment.parts) == 1:
                    self.release(part)
            for part in free:
                if part.segment.expandable:
                    self.unmap(part)

    def unmap(self, part):
        segment = part.segment
        begin = segment.base + up(part.address - segment.base, segment.page)
        end = segment.base + (part.address + part.size - segment.base) // segment.page * segment.page
        if end <= begin:
            return
        if begin > part.address:
            part = part.split(begin - part.address)
        if end < part.address + part.size:
            part.split(end - part.address)
        self.become(part, UNMAPPED)
        self.log("segment_unmap", begin, end - begin, segment.stream, segment.pool)
        if len(segment.parts) == 1:
            self.segments.remove(segment)

    def collect_garbage(self):
        target = self.reserved - int(self.threshold * self.allowed)
        free = [part for part in self.parts(((0, 0), False)) if len(part.segment.parts) == 1]
        ages = {part: self.calls[part.segment.pool] - part.born for part in free}
        got, some = 0, True
        while got < target and some and ages:
            mean = sum(ages.values()) / len(ages)
            some = [part for part in ages if ages[part] >= mean]
            for part in some:
                got += part.size
                del ages[part]
                self.release(part)

    @property
    def allocated(self):
        return sum(part.size for part in self.parts(state=ALLOCATED))

    def snapshot(self, begin):
        """What `_dump_snapshot` writes, of the events from `begin` on."""
        segments = []
        for segment in sorted(self.segments, key=lambda segment: segment.base):
            run = []
            for part in [*segment.parts, None]:
                if part is not None and part.state != UNMAPPED:
                    run.append(part)
                elif run:
                    segments.append(self.mapped(segment, run))
                    run = []
        return {
            "segments": segments,
            "device_traces": [self.events[begin:]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": self.max_split or -1,
                "garbage_collection_threshold": self.threshold,
                "expandable_segments": self.expandable,
                "roundup_power2_divisions": {str(2**i): self.divisions for i in range(16)},
            },
        }

    def mapped(self, segment, run):
        blocks = [
            {"size": p.size, "requested_size": p.requested if p.state != FREE else 0, "state": p.state} for p in run
        ]
        return {
            "device": 0,
            "address": run[0].address,
            "total_size": sum(part.size for part in run),
            "stream": segment.stream,
            "segment_type": "small" if segment.pool[1] else "large",
            "segment_pool_id": segment.pool[0],
            "is_expandable": segment.expandable,
            "blocks": blocks,
        }


KINDS = {
    "full": {"expandable": True, "totals": (300, 400, 600, 1000)},
    "graphs": {"expandable": True, "totals": (400, 800)},
    "garbage": {"allowed": 800 * MiB, "threshold": 0.5, "totals": (1000,)},
    "fixed": {"totals": (600, 2000, 6000)},
}


def program(kind, seed):
    """A random program of a kind, run: the GPU, and for moments of it (events, bytes allocated, bytes reserved)."""
    rng = random.Random(f"{kind} {seed}")
    settings = dict(KINDS[kind])
    total = rng.choice(settings.pop("totals")) * MiB
    if not settings.get("expandable"):
        settings["max_split"] = rng.choice([None, None, 32 * MiB, 100 * MiB])
    gpu = SimulatedGpu(rng, total, **settings, divisions=rng.choice([0, 0, 4]))
    streams = rng.choice([[0], [0, 9], [0, 7, 9]])
    pool_ids = [(0, 0), (0, 1), (0, 2)] if kind == "graphs" else [(0, 0)]
    ranges = [(1, MiB), (MiB + 1, 12 * MiB), (10 * MiB, 90 * MiB)]
    usual = [rng.randint(*rng.choice(ranges)) for _ in range(rng.randint(2, 12))]
    live, pending, moments = [], [], [(0, 0, 0)]
    for _ in range(rng.choice([60, 150, 300])):
        action = rng.random()
        pending = [part for part in pending if part.state == PENDING]
        if pending and rng.random() < 0.5:
            gpu.complete(pending.pop(rng.randrange(len(pending))))
        if kind in ("full", "graphs") and rng.random() < 0.05:
            gpu.others = rng.choice([0, total // 8, total // 4])
        if action < 0.56:
            pool_id = rng.choice([i for i in [*pool_ids, (0, 0), (0, 0)] if i not in gpu.ended_pools])
            gpu.capturing = pool_id != (0, 0)
            size = rng.choice(usual) if rng.random() < 0.7 else rng.randint(1, 40 * MiB)
            part = gpu.malloc(size, rng.choice(streams), pool_id)
            gpu.capturing = False
            live += [part] if part else []
            for _ in range(0 if part else min(len(live), 3)):
                gpu.free(live.pop(rng.randrange(len(live))))
        elif action < 0.95 and live:
            part = live.pop(rng.randrange(len(live)))
            others_use_it = len(streams) > 1 and rng.random() < 0.3
            gpu.free(part, others_use_it)
            pending += [part] if others_use_it else []
        elif action < 0.965:
            gpu.empty_cache()
        elif action < 0.975 and len(pool_ids) > 1 and not pending:  # a graph is deleted
            ended = [part for part in live if part.segment.pool[0] == pool_ids[-1]]
            live = [part for part in live if part not in ended]
            for part in ended:
                gpu.free(part)
            gpu.ended_pools = [pool_ids[-1]]
        moments.append((len(gpu.events), gpu.allocated, gpu.reserved))
    return gpu, moments
