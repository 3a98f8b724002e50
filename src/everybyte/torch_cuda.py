"""`torch.cuda` of a GPU that is not there: what training code asks of it during a trace.

Most of `torch.cuda` and `torch.accelerator` is Python over a few functions of `torch._C`. Those are answered, and
PyTorch's own Python does the rest, by whatever name a script has imported it. What a CPU build lacks is there while the
block lasts; what a CUDA build has is put back after it, untouched. Threads that ran before the block hear the truth.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final, Protocol
from unittest import mock

import torch
import torch.utils.data
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from .attribution import user_line
from .elsewhere import told
from .gpus import GPU
from .memory_stats import MemoryStats
from .processes import followed
from .rules.cuda_attention import takes

_DTYPES: Final = {
    **{"FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16},
    **{"BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "BoolTensor": torch.bool},
    **{"ShortTensor": torch.int16, "IntTensor": torch.int32, "LongTensor": torch.int64},
}
"""The old types of tensors, `torch.cuda.FloatTensor` and so on."""

_NOT_FOLLOWED: Final = "a trace does not follow settings of the allocator; give them to everybyte.Allocator afterwards"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_STREAMS: Final = 32  # kStreamsPerPool of `c10/cuda/CUDAStream.cpp`: the 33rd stream is the first again
_CUDA: Final = 1  # `c10::DeviceType`

_c10d: Final = getattr(torch.distributed, "distributed_c10d", None)  # not in every build

_OF_SEVERAL: Final = (
    (torch.multiprocessing, "spawn", "other processes are not traced; call the function itself, as rank 0 of 1"),
    (torch.distributed, "init_process_group", "a trace is of one process; run the script without a process group"),
    (torch.nn.parallel.DistributedDataParallel, "__init__", "a trace is of one process; use the module itself"),
    (FakeTensorMode, "__init__", "a trace inside a trace, whose tensors take no memory; leave it out"),
    *([(_c10d, "rendezvous", "a trace is of one process; run the script without a process group")] if _c10d else []),
)
_OF_CUDA: Final = (
    (torch.cuda.CUDAGraph, "__new__", "a CUDA graph's private memory has no rule; run the step without it"),
    (torch.cuda.MemPool, "__new__", "a private memory pool has no rule; leave it out"),
    (torch.cuda.memory.CUDAPluggableAllocator, "__init__", "another allocator has no rule; leave it out"),
)
"""What ends a trace: where it is, and why."""

_WITHOUT_ANSWER: Final = (
    *("getCurrentBlasHandle", "getCurrentSolverHandle", "getStreamFromExternal", "hostMemoryStats"),
    "cudaCachingAllocator_raw_alloc",
)
"""Of `torch._C._cuda_*`, of which a CUDA build has many more."""


class Run(Protocol):
    """What `torch.cuda` needs of the trace under way."""

    gpu: GPU
    stream: int
    left_out: set[str]

    def remark(self, text: str | None) -> None:
        """Notes what is worth knowing of a call."""

    def unknown_number(self, op: str) -> float:
        """A number that nobody knows, which tells if it decides something."""

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot` would return."""


@contextmanager
def believable(run: Run, stats: MemoryStats) -> Iterator[None]:
    """Puts the answers in place while the block lasts, and everything back as it was after it."""
    with _in_place((*_answers(run, stats), *_refusals(_OF_CUDA))), told(run), followed(run), refusing():
        yield


@contextmanager
def refusing() -> Iterator[None]:
    """Ends a trace, by any rules, where the code compiles or asks for other processes."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # runs what was compiled before the trace
    answers: list[tuple[Any, str, Any]] = [(torch, "compile", _compile), *_refusals(_OF_SEVERAL)]
    answers += [(os, name, _staying(name)) for name in ("_exit", "execv", "execve")]
    if compiler is not None:
        uncompiled = compiler._callback_from_stance
        answers.append((compiler, "_callback_from_stance", lambda code: _compile() if code else uncompiled(code)))
    with _in_place(answers):
        yield


@contextmanager
def _in_place(answers: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    elsewhere = frozenset(threading.enumerate()) - {threading.current_thread()}

    def heard(owner: Any, name: str, answer: Any) -> Any:
        truth = getattr(owner, name, None)
        if not callable(answer) or isinstance(answer, (type, staticmethod)):
            return answer

        def asked(*args: Any, **kwargs: Any) -> Any:
            in_place = getattr(owner, name, None) is asked  # or else a module that was imported inside has kept it
            if in_place and threading.current_thread() not in elsewhere:
                return answer(*args, **kwargs)
            if truth is None and name != "_cuda_getDeviceCount":
                raise AssertionError("Torch not compiled with CUDA enabled")
            return truth(*args, **kwargs) if truth is not None else 0

        return asked

    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, heard(owner, name, answer), create=True))
        yield


def _answers(run: Run, stats: MemoryStats) -> Iterator[tuple[Any, str, Any]]:
    stream, event = _streams(run)
    in_c: dict[str, Any] = {
        "_has_cuda": True,
        "_is_flash_attention_available": lambda: True,
        "_can_use_flash_attention": lambda params, *_: takes(SDPBackend.FLASH_ATTENTION, params),
        "_can_use_mem_efficient_attention": lambda params, *_: takes(SDPBackend.EFFICIENT_ATTENTION, params),
        "_can_use_cudnn_attention": lambda params, *_: takes(SDPBackend.CUDNN_ATTENTION, params),
        "_get_accelerator": lambda: torch.device("cuda"),
        "_scatter": lambda tensor, *_: (tensor.to("cuda"),),
        **{f"_accelerator_{name}": answer for name, answer in _of_accelerator(run, stats, stream).items()},
        **{f"_cuda_{name}": answer for name, answer in _of_cuda(run, stats).items()},
    }
    yield from ((torch._C, name, answer) for name, answer in in_c.items())
    yield torch.version, "cuda", torch.version.cuda or "13.0"
    yield torch.backends.mps, "is_available", lambda: False
    yield torch.backends.cudnn, "is_available", lambda: True
    cudnn_version = torch.backends.cudnn.version
    yield torch.backends.cudnn, "version", lambda: cudnn_version() or 91002  # a CPU build has none
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: False  # by rules, not by handle
    activities = {*torch.autograd.ProfilerActivity.__members__.values()}
    yield torch.autograd.profiler, "_supported_activities", lambda: activities
    yield torch.cuda, "_initialized", True
    yield torch.cuda, "_cached_device_count", None
    yield torch.cuda, "_cudart", _runtime(stats)
    yield torch.cuda, "_get_device_properties", lambda index: Properties(run.gpu)
    yield torch.cuda, "_check_bf16_tensor_supported", lambda device: True  # it makes a tensor, once a process
    yield torch.cuda, "_exchange_device", _the_only_one
    yield torch.cuda, "_maybe_exchange_device", _the_only_one
    yield torch.cuda, "default_generators", (Generator("cuda"),)
    yield torch.nn.parallel._functions, "_streams", None
    yield torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False
    yield torch.cuda.nvtx, "_nvtx", _quiet("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA")
    yield torch.cuda.Stream, "__new__", staticmethod(lambda cls, *args, **kwargs: stream(*args, **kwargs))
    yield torch.cuda.Event, "__new__", staticmethod(lambda cls, *args, **kwargs: event(None, *args, **kwargs))
    yield from ((torch, kind.__name__, kind) for kind in (stream, event, Generator))
    address = torch.UntypedStorage.data_ptr  # what is at 0 is tied, for code that looks for tied weights
    yield torch.UntypedStorage, "data_ptr", lambda at: at._cdata if at.device.type == "meta" else address(at)
    yield from ((torch.Tensor, name, method) for name, method in _methods(run).items())
    yield from ((torch.cuda, name, _tensor_type(name, dtype)) for name, dtype in _DTYPES.items())
    yield torch, "set_default_tensor_type", _set_default_tensor_type
    known = {*dir(torch._C), *(f"_cuda_{name}" for name in _WITHOUT_ANSWER)}
    unknown = {name for name in known if name.startswith("_cuda_")} - set(in_c)
    refused = [(torch._C, name, "what it does on a GPU has no rule; leave the call out") for name in unknown]
    yield from _refusals(refused)


def _of_cuda(run: Run, stats: MemoryStats) -> dict[str, Callable[..., Any]]:
    """`torch._C._cuda_*` (`torch/csrc/cuda/Module.cpp`)."""

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        run.stream = stream_id

    return {
        "init": _nothing,
        "getDeviceCount": _counting(run),
        "getDevice": lambda: 0,
        "setDevice": _the_only_one,
        "exchangeDevice": _the_only_one,
        "maybeExchangeDevice": _the_only_one,
        "canDeviceAccessPeer": lambda device, peer: False,
        "getArchFlags": lambda: "sm_{}{}".format(*run.gpu.capability),
        "getCompiledVersion": lambda: 13000,
        "synchronize": _nothing,
        "sleep": _nothing,
        "ipc_collect": _nothing,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": _nothing,
        "getCurrentStream": lambda device: (run.stream, 0, _CUDA),
        "getCurrentRawStream": lambda device: run.stream,
        "getDefaultStream": lambda device: (0, 0, _CUDA),
        "setStream": set_stream,
        "memoryStats": _of_the_only_one(stats.nested),
        "resetPeakMemoryStats": _of_the_only_one(stats.reset_peak),
        "resetAccumulatedMemoryStats": _of_the_only_one(stats.reset_accumulated),
        "emptyCache": lambda *pool: stats.empty_cache(),
        "clearCublasWorkspaces": lambda: run.remark("the workspaces of the matrix products stay in the trace"),
        "getAllocatorBackend": lambda: "native",
        "getMemoryFraction": lambda device: 1.0,
        "setMemoryFraction": lambda fraction, device: run.remark(_NOT_FOLLOWED),
        "attachOutOfMemoryObserver": _nothing,
        "isHistoryEnabled": lambda: False,
        "record_memory_history": _nothing,
        "record_memory_history_legacy": _nothing,
        "memorySnapshot": lambda *pool, **_: run.snapshot(),
    }


def _of_accelerator(run: Run, stats: MemoryStats, stream: type) -> dict[str, Callable[..., Any]]:
    """`torch._C._accelerator_*` (`torch/csrc/DeviceAccelerator.cpp`)."""

    def set_stream(chosen: Any) -> None:
        run.stream = chosen.stream_id

    return {
        "getAccelerator": lambda: torch.device("cuda"),
        "getDeviceIndex": lambda: 0,
        "setDeviceIndex": _the_only_one,
        "exchangeDevice": _the_only_one,
        "maybeExchangeDevice": _the_only_one,
        "getStream": lambda device: stream(stream_id=run.stream),
        "setStream": set_stream,
        "synchronizeDevice": _nothing,
        "isAllocatorInitialized": lambda: True,
        "getDeviceStats": _of_the_only_one(stats.nested),
        "resetPeakStats": _of_the_only_one(stats.reset_peak),
        "resetAccumulatedStats": _of_the_only_one(stats.reset_accumulated),
        "emptyCache": lambda *pool: stats.empty_cache(),
        "emptyHostCache": _nothing,
        "setAllocatorSettings": lambda settings: run.remark(_NOT_FOLLOWED),
        "getMemoryInfo": _of_the_only_one(stats.free_and_total),
    }


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Waits, histories and caches of handles take no memory that a trace follows."""


def _counting(run: Run) -> Callable[[], int]:
    """How many GPUs there are: one, if the code has not hidden it before it asks for the first time, as in `cuInit`.

    What the environment said before the trace is of this machine, which need not have the GPU that is followed.
    """
    before, counted = os.environ.get(_VISIBLE), []

    def count() -> int:
        if not counted:
            now = os.environ.get(_VISIBLE)
            hidden = now != before and now is not None and now.strip() in ("", "-1")
            counted.append(0 if hidden else 1)
            if hidden:
                run.remark(f"the code hides every GPU before it looks for one, by {_VISIBLE}={now!r}")
        return counted[0]

    return count


def _the_only_one(index: int) -> int:
    if index > 0:
        raise RuntimeError(f"{user_line()}: CUDA error: invalid device ordinal {index}; a trace has one GPU, cuda:0")
    return min(index, 0)


def _of_the_only_one(ask: Callable[[], Any]) -> Callable[[int], Any]:
    def asked(index: int) -> Any:
        _the_only_one(index)
        return ask()

    return asked


def _runtime(stats: MemoryStats) -> Any:
    runtime = _quiet("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    runtime.cudaError = SimpleNamespace(success=0)
    runtime.cudaMemGetInfo = _of_the_only_one(stats.free_and_total)
    return runtime


def _quiet(*names: str) -> SimpleNamespace:
    """Functions that do nothing and succeed."""
    return SimpleNamespace(**{name: lambda *args: 0 for name in names})


class Properties:
    """What `torch.cuda.get_device_properties` tells of a GPU; what the table of GPUs does not know is no attribute."""

    def __init__(self, gpu: GPU) -> None:
        self.name, self.total_memory, self.multi_processor_count = gpu.name, gpu.total, gpu.processors
        self.major, self.minor = gpu.capability
        self.max_threads_per_multi_processor, self.shared_memory_per_multiprocessor = gpu.threads, gpu.shared_memory
        self.L2_cache_size, self.warp_size, self.is_integrated, self.is_multi_gpu_board = gpu.l2, 32, 0, 0

    def __repr__(self) -> str:
        return f"_CudaDeviceProperties({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the table of GPUs does not say {name!r} of {self.__dict__.get('name')}")


def _methods(run: Run) -> dict[str, Any]:
    """Methods of tensors, for those on the host and those on the GPU."""
    pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    kind_of, shown, shared = torch.Tensor.type, torch.Tensor.__repr__, torch.Tensor.share_memory_

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if tensor.is_cuda:
            raise RuntimeError(f"{user_line()}: cannot pin {tensor.type()!r} only dense CPU tensors can be pinned")
        pinned.add(tensor.untyped_storage())
        return tensor

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        run.left_out.add("record_stream: how much later a block is given back that another stream uses")

    def type_(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        if dtype is None:
            return kind_of(tensor).replace(".meta.", ".cuda.")
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype)
        device, kind = _device_and_dtype(dtype)
        return tensor.to(device, kind)

    def no_memory(tensor: torch.Tensor, **_: Any) -> Any:
        if not tensor.is_cuda:
            raise AttributeError("Can't get __cuda_array_interface__ on non-CUDA tensor")
        raise NotImplementedError(f"{user_line()}: a traced tensor has no memory that another library could be given")

    return {
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, device=None: tensor.untyped_storage() in pinned,
        "record_stream": record_stream,
        "share_memory_": lambda tensor: tensor if tensor.is_cuda else shared(tensor),
        "type": type_,
        "__repr__": lambda tensor, **kwargs: shown(tensor, **kwargs).replace("device='meta'", "device='cuda:0'"),
        "__cuda_array_interface__": property(no_memory),
    }


# -- objects -----------------------------------------------------------------------------------------------------------


class _OfGenerators(type(torch.Generator)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_OfGenerators):
    """A generator that says it is the GPU's; what is drawn with it is drawn on the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cuda":
            return torch._C.Generator(device)
        return super().__new__(cls, device="cpu")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def _streams(run: Run) -> tuple[type, type]:
    """The classes of streams and events: nothing waits, and an allocation belongs to the stream that is current."""
    made = 0

    class Stream:
        """`torch.cuda.Stream` and `torch.Stream`."""

        __class__ = property(lambda self: torch.cuda.Stream)  # what isinstance() goes by
        device, device_index, device_type = torch.device("cuda", 0), 0, _CUDA

        def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
            nonlocal made
            if stream_id is None:
                stream_id, made = made % _STREAMS + 1, made + 1
                run.left_out.add("streams: when work on one waits for another, and what backward allocates on them")
            self.stream_id = self.cuda_stream = self.native_handle = stream_id
            self.priority, self._outer = priority, []

        def __enter__(self) -> Any:
            self._outer.append(run.stream)
            run.stream = self.stream_id
            return self

        def __exit__(self, *exception: Any) -> None:
            run.stream = self._outer.pop()

        def __eq__(self, other: object) -> bool:
            return getattr(other, "stream_id", None) == self.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        wait_event = wait_stream = synchronize = _nothing
        query = staticmethod(lambda: True)
        is_capturing = staticmethod(lambda: False)
        priority_range = staticmethod(lambda: (0, -5))

    class Event:
        """`torch.cuda.Event` and `torch.Event`."""

        __class__ = property(lambda self: torch.cuda.Event)
        device = torch.device("cuda", 0)

        def __init__(self, device: Any = None, enable_timing: bool = False, *_: Any, **__: Any) -> None:
            self._timed, self._recorded = enable_timing, False

        def record(self, stream: Any = None) -> None:
            self._recorded = True

        def elapsed_time(self, end: Any) -> float:
            if not (self._timed and end._timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self._recorded and end._recorded):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return run.unknown_number("elapsed_time")

        wait = synchronize = _nothing
        query = staticmethod(lambda: True)

    return Stream, Event


def _tensor_type(name: str, dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor` and the like: a constructor, and what isinstance() asks."""

    def make(cls: type, *args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="cuda")
        return torch.empty(args or (0,), dtype=dtype, device="cuda")

    def is_one(cls: type, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.dtype == dtype

    kind = type(f"{name}Type", (type,), {"__instancecheck__": is_one})
    return kind(name, (), {"__new__": make, "__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})


def _device_and_dtype(kind: Any) -> tuple[str, torch.dtype]:
    """Of an old type, or of its name."""
    *package, name = (kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}").split(".")
    if name not in _DTYPES:
        raise ValueError(f"invalid type: {kind!r}")
    return "cuda" if package == ["torch", "cuda"] else "cpu", _DTYPES[name]


def _set_default_tensor_type(kind: Any) -> None:
    device, dtype = _device_and_dtype(kind)
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)


def _compile(model: Any = None, *, disable: bool = False, **options: Any) -> Any:
    if not disable:
        why = "its kernels allocate by a plan of their own; trace the model uncompiled"
        raise NotImplementedError(f"{user_line()}: torch.compile is not covered: {why}")
    return model if model is not None else lambda model: model


def _refusals(refused: Iterable[tuple[Any, str, str]]) -> Iterator[tuple[Any, str, Any]]:
    for owner, name, why in refused:
        answer = _refusing(owner, name, why)
        yield owner, name, staticmethod(answer) if name == "__new__" else answer


def _staying(name: str) -> Callable[..., Any]:
    """What ends a process at once, or makes another program of it, does so to those that the code has forked alone."""
    own, ends = os.getpid(), getattr(os, name)

    def stayed(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != own:
            return ends(*args, **kwargs)
        why = "the process would end, and the answer with it; end with sys.exit()"
        raise NotImplementedError(f"{user_line()}: os.{name} is not covered: {why}")

    return stayed


def _refusing(owner: Any, name: str, why: str) -> Callable[..., Any]:
    what = owner.__name__ if name in ("__new__", "__init__") else f"{owner.__name__}.{name}"

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{user_line()}: {what} is not covered: {why}")

    return refused
