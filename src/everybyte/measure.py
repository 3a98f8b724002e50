"""What a run really allocates: the same training code, executed, its allocations taken from PyTorch's profiler.

The profiler reports each allocation and release of PyTorch's CPU allocator with its address and the op it happened in
(`torch.autograd.profiler`, `profile_memory=True`). Nothing else watches the run, so nothing about it changes. What is
different on a GPU is in `measure_cuda`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final, Self

import torch
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import tree_leaves

from .attribution import Attribution, storage_of
from .run import Run, empty_caches_of_tensors
from .timeline import Recorder, Timeline

_MARK: Final = "everybyte:"
_OPTIMIZER: Final = "Optimizer.step#"
ALLOCATION: Final = "[memory]"  # also of a release (`torch/csrc/profiler/collection.cpp`, `Result::name`)
_NODE: Final = "autograd::engine::evaluate_function: "

# The profiler's library logs its start and stop to stderr, with a process id, at every level below this.
_QUIET: Final = "99"


def measure(device: str = "cpu") -> Measurement:
    """Executes the training code of a `with` block and records what it allocates. The body is that of `trace`.

        >>> with eb.measure(device="cpu") as run:
        ...     for step in run.steps(1):
        ...         x = torch.ones(1_000)
        ...         y = x + x
        >>> run.timeline.peak_bytes  # two times 1,000 numbers of 4 bytes
        8000

    Args:
        device: "cpu"; "cuda", the current GPU, which gives a `CudaMeasurement`; "auto" for a GPU where PyTorch finds
            one, else the CPU.

    Raises:
        ValueError: If there is no such device, or PyTorch finds no GPU.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device={device!r}: runs are measured on 'cpu', 'cuda' or 'auto', the best there is")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Measurement("cpu")
    from .measure_cuda import CudaMeasurement  # which is made of what is here

    return CudaMeasurement()


class Measurement(Run):
    """A measured run under way, or done. Made by `measure`.

    Attributes:
        device: Where it runs.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self._attribution = Attribution(self._on_module, self._on_optimizer, self._label_module)
        self._labels: list[dict[int | None, str]] = []  # at each label mark: address -> category
        self._steps_marked = 0
        self._timeline: Timeline | None = None

    def __enter__(self) -> Self:
        if _running:
            raise RuntimeError("a measurement is already running; measurements do not nest")
        if self._timeline is not None:
            raise RuntimeError("this measurement is over; make a new one with everybyte.measure(...)")
        empty_caches_of_tensors()
        gc.collect()  # what was dropped before dies before, and not as an unknown block of this run
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        with ExitStack() as stack:
            gc.freeze()  # as in a trace; collecting before step 0 then costs nothing
            stack.callback(gc.unfreeze)
            stack.callback(_running.clear)
            _running.append(self)
            self._begin(stack)
            self._watching = stack.enter_context(ExitStack())
            self._profile = self._watching.enter_context(profile(profile_memory=True))
            self._watching.enter_context(self._attribution.following())
            self._exit = stack.pop_all()
        return self

    def __exit__(self, exception: type[BaseException] | None, *rest: Any) -> bool | None:
        with self._exit:
            with self._watching:
                self._label_roots()
            if exception is None:
                self._end()
        if exception is None:
            self._timeline = self._read()
        del self._profile

    def _begin(self, stack: ExitStack) -> None:
        """What comes before the block; `stack` is closed after `_end`."""

    def _end(self) -> None:
        """What comes right after a block that raised nothing."""

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError("the measurement is still running (or failed); read its timeline after the with block")
        return self._timeline

    def live_storages(self) -> dict[int, int]:
        return {address: storage for address, (storage, _) in self._left.items()}

    def address(self, tensor: torch.Tensor) -> int:
        """0 also for another size than was allocated there: then another tensor has taken the address since."""
        storage = storage_of(tensor)
        address = storage.data_ptr() if storage is not None else 0
        return address if address in self._left and self._left[address][1] == storage.nbytes() else 0

    # -- marks left in the profile while the code runs -----------------------------------------------------------------

    def _begin_step(self, step: int, *, over: bool = False) -> None:
        self._label_roots()  # the model may be gone before anything else happens
        self._steps_marked = max(self._steps_marked, step)
        _mark("after" if over else "step", step)

    def _on_module(self, path: str | None) -> None:
        _mark("leave") if path is None else _mark("enter", path)

    def _place(self, host: torch.Tensor, category: str) -> torch.Tensor:
        placed = host.detach().to(torch.device(self.device), copy=True)
        self._leave_labels({placed.untyped_storage().data_ptr(): category})
        return placed

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        labels = _parameter_labels(parameters)
        for value in tree_leaves([optimizer.state[p] for p in parameters if p in optimizer.state]):
            if isinstance(value, torch.Tensor):
                labels.setdefault(_address(value), "optimizer state")
        self._leave_labels(labels)

    def _label_roots(self) -> None:
        for root in self._attribution.roots:
            self._label_module(root)

    def _label_module(self, module: torch.nn.Module) -> None:
        labels = _parameter_labels(list(module.parameters()))
        for buffer in module.buffers():
            labels.setdefault(_address(buffer), "buffer")
        self._leave_labels(labels)

    def _leave_labels(self, labels: dict[int | None, str]) -> None:
        _mark("labels", len(self._labels))
        self._labels.append(labels)

    # -- reading the profile -------------------------------------------------------------------------------------------

    def _read(self) -> Timeline:
        return self._timeline_of(Reader(self._attribution, self._labels, self.device))

    def _timeline_of(self, reader: Reader) -> Timeline:
        with uncollected():  # the tree is large and has no cycles
            reader.read_all(self._profile.kineto_results.experimental_event_tree())
        self._left = reader.live()
        return reader.recorder.finish(
            {
                "evidence": "measured",
                "device": self.device,
                "torch": torch.__version__.split("+")[0],
                "steps": self._steps_marked,
            }
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's collector from running."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Reader:
    """Walks the profiler's tree of events, which is in order of time, and records a device's allocations in it."""

    def __init__(self, attribution: Attribution, labels: list[dict[int | None, str]], device: str) -> None:
        self.recorder = Recorder()
        self._device = torch.device(device)
        self._attribution = attribution
        self._labels = labels
        self._at: dict[int, int] = {}  # address -> storage that lives there
        self._modules: list[str] = []
        self._node: int | None = None  # sequence number of the backward node that is running
        self._optimizer = False
        self._kernel: str | None = None
        self._made_in_kernel: list[int] = []

    def live(self) -> dict[int, tuple[int, int]]:
        """By address the storage that lives there now, and its bytes."""
        return {address: (storage, self.recorder.nbytes(storage)) for address, storage in self._at.items()}

    def read_all(self, roots: list[Any]) -> None:
        """Reads the whole tree."""
        self._read(roots)

    def _read(self, events: list[Any]) -> None:
        """Reads the events of one level of the tree and what lies below them."""
        for event in events:
            name = event.name
            if name == ALLOCATION:
                self._allocation(event.extra_fields)
            elif children := event.children:
                if self._kernel is None:
                    self._inside(name, event, children)
                else:  # whatever a kernel calls is its own affair
                    self._read(children)
            elif self._kernel is None and name.startswith(_MARK):
                self._mark(*name.removeprefix(_MARK).split(":", 1))

    def _inside(self, name: str, event: Any, children: list[Any]) -> None:
        if name.startswith(_NODE):
            self._node = event.extra_fields.sequence_number
            self._read(children)
            self._node = None
        elif name.startswith(_OPTIMIZER):
            self._optimizer = True
            self._read(children)
            self._optimizer = False
            self.recorder.end_update()
        elif _has_kernel(name) and not (_is_composite_too(name) and any(child.name == name for child in children)):
            self._in_kernel(name, children)
        else:
            self._read(children)

    def _in_kernel(self, name: str, children: list[Any]) -> None:
        self._kernel, self._made_in_kernel = name.split("::")[1], []
        self._read(children)
        self._kernel = None
        for storage in self._made_in_kernel:
            if not self.recorder.is_live(storage):
                self.recorder.label(storage, "scratch")

    def _mark(self, kind: str, text: str) -> None:
        match kind:
            case "enter":
                self._modules.append(text)
            case "leave":
                del self._modules[-1:]
            case "step":
                self.recorder.begin_step(int(text))
            case "after":
                self.recorder.begin_step(int(text), over=True)
            case "labels":
                for address, category in self._labels[int(text)].items():
                    if address in self._at:
                        self.recorder.label(self._at[address], category)

    def _allocation(self, memory: Any) -> None:
        if memory.device != self._device:
            return
        if memory.alloc_size < 0 and memory.ptr in self._at:
            self._note_phase()
            self._free(memory.ptr)
        elif memory.alloc_size > 0:
            self._note_phase()
            self._alloc(memory.ptr, memory.alloc_size, op=self._kernel or "", module=self._module())

    def _alloc(self, address: int, nbytes: int, **what: Any) -> int:
        storage = self._at[address] = self.recorder.alloc(nbytes, **what)
        if self._kernel is not None:
            self._made_in_kernel.append(storage)
        return storage

    def _free(self, address: int) -> None:
        storage = self._at.pop(address, None)
        if storage is not None:
            self.recorder.free(storage)

    def _note_phase(self) -> None:
        module = self._modules[-1] if self._modules else ""
        self.recorder.enter_phase(backward=self._node is not None, optimizer=self._optimizer, module=module)

    def _module(self) -> str:
        if self._modules:
            return self._modules[-1]
        return self._attribution.module_of_node(self._node) if self._node is not None and self._node >= 0 else ""


def _mark(kind: str, text: object = "") -> None:
    with record_function(f"{_MARK}{kind}:{text}"):
        pass


_running: Final[list[Measurement]] = []  # the one measurement whose block is running


def _address(tensor: torch.Tensor) -> int | None:
    storage = storage_of(tensor)
    try:
        return storage.data_ptr() if storage is not None else None
    except RuntimeError:  # a wrapper round other tensors, such as a quantized weight
        return None


def _parameter_labels(parameters: list[torch.Tensor]) -> dict[int | None, str]:
    labels = {_address(p): "parameter" for p in parameters}
    return labels | {_address(p.grad): "gradient" for p in parameters if p.grad is not None}


@cache
def _composite(name: str) -> tuple[bool, ...]:
    """Of each overload of a profiled op, whether it is a composite of ops that a dispatch mode would see."""
    namespace, _, op = name.partition("::")
    if not op or not hasattr(torch.ops, namespace):
        return (True,)
    packet = getattr(getattr(torch.ops, namespace), op, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    qualified = [name if o == "default" else f"{name}.{o}" for o in overloads if "out" not in o.split("_")]
    return tuple(
        torch._C._dispatch_has_kernel_for_dispatch_key(q, "CompositeImplicitAutograd")
        for q in qualified
        if torch._C._dispatch_has_kernel(q)
    )


@cache
def _has_kernel(name: str) -> bool:
    return not all(_composite(name))


@cache
def _is_composite_too(name: str) -> bool:
    """Whether a name has overloads of both sorts. The profiler gives no overload, but the composite one calls its own
    name (`where` with a number calls `where` with tensors)."""
    return any(_composite(name))
