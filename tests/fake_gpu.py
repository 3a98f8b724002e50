"""What PyTorch says of a GPU that is not there: its functions replaced at their boundary, the host in the GPU's place.

`torch.device("cuda:0")` is the host, so the code really runs and PyTorch's own profiler reports its allocations. The
memory history is made of those reports, as the allocator would have kept it, or is a recorded one.
"""

from __future__ import annotations

import copy
import types

import torch
import torch.autograd.profiler as profiler

REAL = torch.device


class _Device(type):
    def __instancecheck__(cls, thing):
        return isinstance(thing, REAL)


class Device(metaclass=_Device):
    """`torch.device`, to which the GPU's name is the host's, while something is measured: a trace means the GPU."""

    measuring = False

    def __new__(cls, *args, **named):
        device = REAL(*args, **named)
        return REAL("cpu") if cls.measuring and device.type == "cuda" else device


class FakeGPU:
    """Puts itself in the place of `torch.cuda`; `log` is what was asked of it, in order.

    Args:
        edit: Called with the history made of the run, before anybody sees it.
        recorded: A snapshot to answer with in place of that of the run.
    """

    total, context = 16 * 10**9, 400 * 2**20

    def __init__(self, monkeypatch, edit=lambda trace: None, recorded=None, on=False):
        Device.measuring = False
        self.log, self.history_on, self.edit, self.recorded = [], on, edit, recorded
        self.workspaces = []  # addresses
        self.before = []  # of the history that the user has begun
        self.peak = self.reserved = None  # unless set, what the history comes to
        answers = {
            torch: {"device": Device},
            torch.cuda: {
                "is_available": self.begin,
                "current_device": lambda: 0,
                "get_device_name": self.end,
                "synchronize": lambda *device: self.log.append("synchronize"),
                "empty_cache": lambda: self.log.append("empty_cache"),
                "reset_peak_memory_stats": lambda device: self.log.append("reset"),
                "memory_allocated": lambda device: 0,
                "max_memory_allocated": lambda device: self.highest(512) if self.peak is None else self.peak,
                "max_memory_reserved": lambda device: self.segments(),
                "memory_reserved": lambda device: self.segments(),
                "mem_get_info": lambda device: (self.total - self.context - self.segments(), self.total),
                "get_device_properties": lambda index: types.SimpleNamespace(
                    total_memory=self.total, major=8, minor=6, multi_processor_count=48, L2_cache_size=4 * 2**20
                ),
                "get_allocator_backend": lambda: "native",
                "is_current_stream_capturing": lambda: False,
                "memory_snapshot": lambda: self.snapshot()["segments"],
            },
            torch.cuda.memory: {"_snapshot": self.snapshot, "_record_memory_history": self.record},
            torch._C: {
                "_cuda_isHistoryEnabled": lambda: self.history_on,
                "_cuda_clearCublasWorkspaces": self.clear,
            },
            profiler: {"_disable_profiler": self.disable_profiler},
        }
        for owner, functions in answers.items():
            for name, function in functions.items():
                monkeypatch.setattr(owner, name, function, raising=False)
        self._disable_profiler = torch._C._autograd._disable_profiler
        self._trace = []
        self._cleared = False

    def begin(self):  # the first that a measurement asks
        Device.measuring = True
        return True

    def end(self, index):  # the last
        Device.measuring = False
        return "NVIDIA RTX A4000"

    def highest(self, unit):
        live = peak = 0
        for event in self._trace:
            if event["action"] in ("alloc", "free_completed"):
                size = -(-event["size"] // unit) * unit
                live += size if event["action"] == "alloc" else -size
                peak = max(peak, live)
        return peak

    def segments(self):
        return -(-self.highest(512) // 2**21) * 2**21 if self.reserved is None else self.reserved

    def record(self, enabled, **how):
        self.history_on = enabled is not None
        self.log.append(("history", enabled, *sorted(how.items())))

    def clear(self):
        self._cleared = bool(self._trace)

    def disable_profiler(self):
        results = self._disable_profiler()
        self._trace = []
        for event in memory_events(results.experimental_event_tree()):
            memory = event.extra_fields
            if memory.alloc_size > 0:
                self._trace.append(entry("alloc", memory.ptr, memory.alloc_size))
            else:
                for action in ("free_requested", "free_completed"):
                    self._trace.append(entry(action, memory.ptr, -memory.alloc_size))
        self.edit(self._trace)
        return results

    def snapshot(self):
        if self.recorded is not None:
            return copy.deepcopy(self.recorded)
        live = {}
        for event in self._trace:
            if event["action"] == "alloc":
                live[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                live.pop(event["addr"], None)
        trace = [*self.before, *self._trace]
        if self._cleared:
            freed = [(at, live.pop(at)) for at in self.workspaces]
            trace += [entry(action, *one) for one in freed for action in ("free_requested", "free_completed")]
        return {"segments": [segment(*block) for block in live.items()], "device_traces": [trace]}


def memory_events(events):
    for event in events:
        if event.name == "[memory]":
            yield event
        yield from memory_events(event.children)


def entry(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0, "frames": list(frames)}


def segment(address, size):
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
    kind = {"segment_type": "small" if size <= 2**20 else "large", "stream": 0, "device": 0}
    return {"address": address, "total_size": size, "blocks": [block], **kind}
