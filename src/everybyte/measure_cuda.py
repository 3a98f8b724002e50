"""What a run really allocates on a GPU: the allocator's own history, told apart by the profiler.

The history (`torch.cuda.memory._record_memory_history`) has each request to the byte, its address, stream and the
Python line, but no operation, and of the thread that runs the backward pass not even a line. The profiler has the
operations, and memory events of whole blocks. Both note an allocation under one lock and one address, in one order
(`c10/cuda/CUDACachingAllocator.cpp`, `alloc_found_block` and `free`), so the profiler's events are found in the history
one after another. What it does not report keeps the phase of what ran before it, and says neither operation nor module.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

import torch
from torch.utils._device import DeviceContext, _device_constructors

from .allocator import OutOfMemory
from .attribution import Attribution
from .measure import ALLOCATION, Measurement, Reader, uncollected
from .places import lines_of
from .rewind import Event
from .snapshot import Snapshot
from .surface import made_for_the_host
from .timeline import WORKSPACE, Timeline

_INACTIVE: Final = "inactive"
_ROWS: Final = {"alloc": True, "free_completed": False}  # what a timeline has rows of


@dataclass(frozen=True)
class Figures:
    """What the allocator and the driver say of a measured run. All are bytes, and none is another's sum.

    Attributes:
        requested: What the run asked for at its peak, workspaces left out: `timeline.without("workspace").peak_bytes`.
        allocated: Whole blocks at their peak, workspaces included (`torch.cuda.max_memory_allocated`).
        reserved: Segments at their peak (`torch.cuda.max_memory_reserved`).
        workspace: What cuBLAS and cuBLASLt hold at the end.
        driver: What is taken of the GPU at the end by all processes (`cudaMemGetInfo`: total less free).
        context: `driver` less what is reserved at that moment: the CUDA context, the kernels loaded, other processes.
        nvml: The driver's figure as nvidia-smi shows it; None where the package nvidia-ml-py is not installed.
        before: Allocated when the run began, and in `allocated` too.
    """

    requested: int
    allocated: int
    reserved: int
    workspace: int
    driver: int
    context: int
    nvml: int | None
    before: int


class CudaMeasurement(Measurement):
    """A measured run on the current GPU. Made by `everybyte.measure(device="cuda")`.

    The block begins with empty caches of the allocator and without workspaces, as in a process of its own; peak
    statistics are reset. New tensors are put on the GPU, as under `with torch.device("cuda")`, but for those that stay
    on the host where no default is set: the step counters of `torch.optim` and what data sets make. Out of memory ends
    the block and raises nothing.

    Attributes:
        figures: What the allocator and the driver say, once the block has ended.
        out_of_memory: The last request that failed, caught in the block or not; None if there was none.
        unattributed: Allocations that the profiler did not report, which have neither operation nor module.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device='cuda': PyTorch finds no GPU; use device='cpu', or trace(rules='cuda')")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native" or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            raise ValueError(
                f"device='cuda': PyTorch's caching allocator, which keeps a history, is off (backend {backend!r}): "
                "unset PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_NO_CUDA_MEMORY_CACHING"
            )
        self._index = torch.cuda.current_device()
        super().__init__(f"cuda:{self._index}")
        self.figures: Figures | None = None
        self.out_of_memory: OutOfMemory | None = None
        self.unattributed = 0

    def _begin(self, stack: ExitStack) -> None:
        _empty_caches()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._before = torch.cuda.memory_allocated(self._index)
        self._known: list[dict[str, Any]] = []  # of a history that the user has begun
        if torch._C._cuda_isHistoryEnabled():
            self._known = self._snapshot()["device_traces"][self._index]
        else:
            stack.callback(torch.cuda.memory._record_memory_history, None)
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
        super()._begin(stack)
        stack.enter_context(_OnGPU(torch.device(self.device)))

    def __exit__(self, exception: type[BaseException] | None, *rest: Any) -> bool:
        failed = exception is not None and issubclass(exception, torch.cuda.OutOfMemoryError)
        super().__exit__(None if failed else exception, *rest)
        return failed and self.out_of_memory is not None

    def _end(self) -> None:
        torch.cuda.synchronize(self._index)
        self._kept_on = torch._C._cuda_isHistoryEnabled()
        self._free, self._total = torch.cuda.mem_get_info(self._index)
        self._reserved = torch.cuda.memory_reserved(self._index)
        self._peaks = torch.cuda.max_memory_allocated(self._index), torch.cuda.max_memory_reserved(self._index)
        self._nvml = _nvml(self._index)
        with uncollected():  # only workspaces are let go between these two: so they are known whatever their size
            held = _active(torch.cuda.memory_snapshot(), self._index)
            _empty_caches()
            self._history = self._snapshot()
        self._kept = held - _active(self._history["segments"], self._index)

    def _snapshot(self) -> dict[str, Any]:
        return torch.cuda.memory._snapshot()

    def _read(self) -> Timeline:
        trace = self._history["device_traces"][self._index]
        known = len(self._known)
        if known and trace[:1] != self._known[:1]:
            raise RuntimeError(
                f"the memory history that was on before has room for {len(trace):,} events only, and lost some of this "
                "run: turn it off (torch.cuda.memory._record_memory_history(None)), and measure() keeps its own"
            )
        snapshot = Snapshot.of({**self._history, "device_traces": [[]] * self._index + [trace[known:]]})
        events = snapshot.traces[self._index]
        reader = _HistoryReader(self._attribution, self._labels, self.device, events, self._kept)
        timeline = self._timeline_of(reader)
        if reader.lost or not self._kept_on:
            raise RuntimeError(
                "the memory history was turned off or begun anew in the block, and lost some of this run: "
                "leave torch.cuda.memory._record_memory_history alone there; measure() keeps its own"
            )
        self.unattributed = reader.unattributed
        if any(event.action == "oom" for event in events):
            failed = snapshot.compare(self._index).out_of_memory[-1]
            rows = sum(event.action in _ROWS for event in events[: failed.event])
            self.out_of_memory = replace(failed, event=min(rows, len(timeline)))
        used = self._total - self._free
        self.figures = Figures(
            requested=timeline.without(WORKSPACE).peak_bytes,
            allocated=self._peaks[0],
            reserved=self._peaks[1],
            workspace=reader.workspace,
            driver=used,
            context=used - self._reserved,
            nvml=self._nvml,
            before=self._before,
        )
        failure = self.out_of_memory and asdict(self.out_of_memory)
        more = {"gpu": torch.cuda.get_device_name(self._index), "figures": asdict(self.figures)}
        return Timeline(timeline.table, {**timeline.info, **more, "out_of_memory": failure})


class _HistoryReader(Reader):
    """Walks the profiler's tree as on a CPU, and records the history's events instead of the profiler's.

    Args:
        events: The history since the block began.
        kept: Addresses of the workspaces, whose last allocation is never freed in the run.
    """

    def __init__(
        self,
        attribution: Attribution,
        labels: list[dict[int | None, str]],
        device: str,
        events: Sequence[Event],
        kept: Iterable[int],
    ) -> None:
        super().__init__(attribution, labels, device)
        self.unattributed = self.workspace = self.lost = 0
        self._name, self._events, self._next = device, events, 0
        self._lines: dict[int, tuple[str, str]] = {}  # by identity: a history shares its stacks
        self._positions: Mapping[tuple[bool, int], list[int]] = defaultdict(list)
        requests = any(event.action == "free_requested" for event in events)
        freed = "free_requested" if requests else "free_completed"
        for i, event in enumerate(events):
            if event.action in ("alloc", freed):
                self._positions[event.action == "alloc", event.address].append(i)
        self._workspaces = {self._positions[True, at][-1] for at in kept if self._positions[True, at]}
        self._kept = {events[i].address: i for i in self._workspaces}

    def read_all(self, roots: list[Any]) -> None:
        """Reads the whole tree, and then what the history has beyond it."""
        main = next((event.start_tid for event in roots if event.name != ALLOCATION), None)
        # An allocation of another thread, below no operation, may stand in another place than the time it was made.
        self._read([event for event in roots if event.name != ALLOCATION or event.start_tid == main])
        self._record_until(len(self._events))

    def _allocation(self, memory: Any) -> None:
        if memory.device != self._device or not memory.alloc_size:
            return
        positions = self._positions[memory.alloc_size > 0, memory.ptr]
        self.lost += memory.alloc_size > 0 and not positions
        found = bisect_left(positions, self._next)
        if found == len(positions):
            return
        at = positions[found]
        self._record_until(at)
        self._note_phase()
        self._record(at, op=self._kernel or "", module=self._module())
        self._next = at + 1
        for event in self._events[at + 1 : at + 2]:  # a request is completed at once, unless another stream waits
            if event.action == "free_completed" and event.address == memory.ptr:
                self._record_until(at + 2)

    def _record_until(self, position: int) -> None:
        for i in range(self._next, position):
            self.unattributed += self._events[i].action == "alloc"
            self._record(i)
        self._next = max(self._next, position)

    def _record(self, position: int, **whose: str) -> None:
        event = self._events[position]
        if event.action == "alloc":
            line, own = self._lines_of(event.frames)
            what = {"device": self._name, "stream": event.stream, "line": line, "own": own}
            storage = self._alloc(event.address, event.size, **what, **whose)
            if position in self._workspaces:
                self.recorder.label(storage, WORKSPACE)
                self.workspace += event.size
        elif event.action == "free_completed" and self._kept.get(event.address, position) >= position:
            self._free(event.address)

    def _lines_of(self, frames: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        if id(frames) not in self._lines:
            self._lines[id(frames)] = lines_of((frame["filename"], frame["line"]) for frame in frames)
        return self._lines[id(frames)]


class _OnGPU(DeviceContext):
    """`with torch.device("cuda")`, but for what optimizers and data sets make without naming a device.

    Checkpointing enters it again where it recomputes (`torch/utils/checkpoint.py`), which PyTorch's own does not undo.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._outer: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        self._outer.append((vars(self).get("old_device"), self.prev_mode))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.old_device, self.prev_mode = self._outer.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = "cpu" if made_for_the_host(sys._getframe(1)) else self.device
        return func(*args, **kwargs)


def _empty_caches() -> None:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _active(segments: Iterable[Mapping[str, Any]], device: int) -> set[int]:
    """Addresses of the blocks that are in use."""
    found = set()
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == device and block["state"] != _INACTIVE:
                found.add(at)
            at += block["size"]
    return found


def _nvml(index: int) -> int | None:
    try:
        return torch.cuda.device_memory_used(index)
    except Exception:  # no nvidia-ml-py; or one of its errors, which cannot be named without it
        return None
