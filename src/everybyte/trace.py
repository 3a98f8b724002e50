"""What a run would allocate: the real training code on the meta device, where nothing is computed.

Every op that reaches a kernel passes through one dispatch mode. It lets the op run on meta tensors, which have shapes
and storages but no memory, and notes each new storage and, through a weak reference, its end. What real kernels do
otherwise is stated in `rules`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import values
from .attribution import Attribution, user_frame, user_line
from .kernels import META, Kernels
from .rules import cpu, engine
from .run import Run
from .timeline import Recorder, Timeline
from .values import DataDependentShape, KnownValues, UnknownRead

_RULES: Final = ("cpu",)
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_current_node = torch._C._current_autograd_node


def trace(rules: str = "cpu", gpu: str | None = None) -> Trace:
    """Runs the training code of a `with` block on the meta device and records what it would allocate.

        with everybyte.trace(rules="cpu") as run:
            model = Net()
            optimizer = torch.optim.Adam(model.parameters())
            x = run.to_device(batch)
            for step in run.steps(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        run.timeline.peak_bytes

    Args:
        rules: Whose kernels' rules the trace follows; "cpu".
        gpu: The GPU to follow; for `rules="cuda"`.

    Raises:
        ValueError: If there are no such rules.
    """
    if rules not in _RULES:
        known = " or ".join(repr(name) for name in _RULES)
        raise ValueError(f"rules={rules!r}: this version traces by the rules {known}")
    if gpu is not None:
        raise ValueError(f"gpu={gpu!r} has no meaning under rules={rules!r}; leave it out")
    return Trace(rules)


@dataclass(frozen=True)
class _Op:
    """What the tracer needs to know of an op, once."""

    name: str  # without namespace and overload
    aliases: bool  # every output is a view of, or is, an argument: no storage can be new
    mutates: bool
    tensor_slots: tuple[int, ...]  # positions of arguments that are tensors even where a number was given


@cache
def _describe(func: Any) -> _Op:
    schema = func._schema
    slots = tuple(i for i, arg in enumerate(schema.arguments) if str(arg.type) == "Tensor")
    aliases = bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)
    return _Op(schema.name.split("::")[1], aliases, schema.is_mutable, slots)


class Trace(Run):
    """A trace under way, or done. Made by `trace`.

    Attributes:
        rules: Whose kernels' rules it follows.
        unknown_reads: Every place where the code asked for a value that nobody knows (it got the type's zero).
        conditional: Lines at which such a value decided a branch: a real run may go the other way.
        not_covered: Functions and backward nodes that the run used and that allocate otherwise in a real run.
    """

    def __init__(self, rules: str) -> None:
        self.rules = rules
        self.unknown_reads: list[UnknownRead] = []
        self.conditional: list[str] = []
        self.not_covered: set[str] = set()
        self.known = KnownValues()
        self._kernels = Kernels()
        self._recorder = Recorder()
        self.attribution = Attribution(on_optimizer=self._on_optimizer)
        self._storages: dict[int, _Tracked] = {}  # by address of the storage
        self._foreign: dict[int, torch.Tensor] = {}  # twins on meta of real tensors that met traced ones
        self._scalars: list[tuple[int, int]] = []  # (node that may keep it, id) of numbers that became tensors
        self._calls: list[
            tuple[Any, Any]
        ] = []  # open Python calls into torch: the function, the backward node it is in
        self._optimizing = False
        self._steps_marked = 0
        self._timeline: Timeline | None = None

    # -- the with block ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _active is not None:
            raise RuntimeError("a trace is already running; traces do not nest")
        engine.unshared()
        self._exit = ExitStack()
        self._exit.enter_context(self.attribution.following())
        self._exit.enter_context(cpu.in_force())
        self._exit.enter_context(_open_functional())
        self._exit.enter_context(_counted(self, "get_rng_state"))
        self._exit.enter_context(_Functions(self))
        self._exit.enter_context(_Ops(self))
        _set_active(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _set_active(None)
        self._exit.close()
        self._label_modules()
        self._timeline = self._recorder.finish(self._info())
        self._recorder = Recorder()  # what dies from here on is no event of this run

    def _info(self) -> dict[str, Any]:
        return {
            "evidence": "traced",
            "rules": self.rules,
            "torch": torch.__version__.split("+")[0],
            "steps": self._steps_marked,
            "conditional": list(self.conditional),
            "not_covered": sorted(self.not_covered),
        }

    @property
    def timeline(self) -> Timeline:
        return self._timeline if self._timeline is not None else self._recorder.finish(self._info())

    def _begin_step(self, step: int, *, over: bool = False) -> None:
        self._recorder.begin_step(step, over=over)
        self._steps_marked = max(self._steps_marked, step)

    def _place(self, host: torch.Tensor) -> torch.Tensor:
        return self.adopt(host, "to_device", "input")

    def adopt(self, host: torch.Tensor, op: str, category: str | None = None) -> torch.Tensor:
        """A new traced tensor in the likeness of a real one, its value remembered if it is small."""
        placed = self._likeness(host)
        self._note_phase(_current_node())
        self._count_new(placed, op, category=category)
        return placed

    # -- ops -----------------------------------------------------------------------------------------------------------

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lets one op run on the meta device and records the storages it makes."""
        op = _describe(func)
        node = _current_node()
        if func in engine.WRITES and engine.takes_over(func, args, node, self._calls[-1][0] if self._calls else None):
            return args[0]
        self._note_phase(node)
        if node is not None and node.name() in engine.NOT_REPRODUCED:
            self.not_covered.add(node.name())
        tensors = _tensors(args, kwargs)
        if func is _ITEM:
            return self._read(tensors[0], op.name)
        args, kwargs = self._meet(tensors, args, kwargs)
        self._make_scalars(op, args, node)
        real = self.known.follow(func, args, kwargs) if self.known.covers(tensors) else None
        try:
            out = self._kernels(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            out = self._data_dependent(func, args, kwargs, real, error)
        if not op.aliases:
            self._count_outputs(out, op, node)
        if op.mutates:
            self._count_resized(tensors, op, node)
            if real is None:
                self._forget_written(func, args)
        elif real is not None:
            self._remember_outputs(out, real)
        return out

    def _count_outputs(self, out: Any, op: _Op, node: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._count_new(out, op.name, node)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._count_new(item, op.name, node)

    def _count_new(self, tensor: torch.Tensor, op: str, node: Any = None, category: str | None = None) -> None:
        """Records the tensor's storage if it has not been seen before."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        module, line = self._whose(node)
        event = self._recorder.alloc(
            nbytes,
            op=op,
            module=module,
            shape=str(list(tensor.shape)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            line=line,
        )
        if category is not None:
            self._recorder.label(event, category)
        self._storages[address] = _Tracked(event, nbytes, weakref.ref(storage, self._on_death(address)))

    def count_host(self, tensor: torch.Tensor, op: str) -> None:
        """Records a tensor in host memory that a function made without an op."""
        node = _current_node()
        self._note_phase(node)
        self._count_new(tensor, op, node)

    def _on_death(self, address: int) -> Callable[[Any], None]:
        def die(_: Any) -> None:
            tracked = self._storages.pop(address, None)
            self.known.forget(address)
            if tracked is not None:
                self._recorder.free(tracked.event)

        return die

    def _whose(self, node: Any) -> tuple[str, str]:
        """Module and line that the op running now belongs to."""
        if node is None or self.attribution.module:
            return self.attribution.module, user_line()
        if isinstance(node, _ACCUMULATE_GRAD):
            return self.attribution.owner(node.variable), user_line()
        return self.attribution.module_of_node(node._sequence_nr()), user_line()

    def _note_phase(self, node: Any) -> None:
        if node is None and self._recorder.phase == "backward":
            self._label_gradients()
        self._recorder.enter_phase(
            backward=node is not None, optimizer=self._optimizing, module=self.attribution.module
        )

    def _count_resized(self, tensors: list[torch.Tensor], op: _Op, node: Any) -> None:
        """An op may give a tensor it writes into a larger storage (`resize_`, `out=`): first a new one is made."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            tracked = self._storages.get(storage._cdata)
            nbytes = storage.nbytes()
            if tracked is None and nbytes:
                self._count_new(tensor, op.name, node)
            elif tracked is not None and tracked.nbytes != nbytes:
                del self._storages[storage._cdata]
                self._count_new(tensor, op.name, node)
                self._recorder.free(tracked.event)

    # -- values --------------------------------------------------------------------------------------------------------

    def _remember(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        if tensor.is_meta and tensor.stride() == real.stride() and tensor.dtype == real.dtype:
            self.known.remember(tensor.untyped_storage()._cdata, real)

    def _remember_outputs(self, out: Any, real: Any) -> None:
        if isinstance(out, torch.Tensor):
            out, real = (out,), (real,)
        if isinstance(out, (tuple, list)):
            for traced, value in zip(out, real, strict=True):
                if isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor):
                    self._remember(traced, value)

    def _forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and position < len(args) and isinstance(args[position], torch.Tensor):
                self.known.forget(args[position].untyped_storage()._cdata)

    def _read(self, tensor: torch.Tensor, op: str) -> Any:
        """The value of a one-element tensor; the type's zero, recorded, if it is unknown."""
        real = self.known.twin(tensor)
        if real is not None:
            with torch._C._DisableTorchDispatch():
                return real.item()
        self.unknown_reads.append(UnknownRead(user_line(), op))
        if tensor.dtype == torch.bool or values.decides_branch(*user_frame()):
            self._decided(user_line())
        return _zero(tensor.dtype)

    def read_out(self, function: Any, tensor: torch.Tensor) -> Any:
        """`item`, `tolist`, `numpy`: real values where they are known, else zeros that tell if they decide anything."""
        real = self.known.twin(tensor)
        with torch._C._DisableTorchDispatch():
            if real is not None:
                return function(real.detach())
            zeros = function(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"))
        line = user_line()
        self.unknown_reads.append(UnknownRead(line, function.__name__))
        if tensor.dtype == torch.bool:
            self._decided(line)
        return tree_map_only((int, float), lambda zero: values.unknown(zero, lambda: self._decided(line)), zeros)

    def _decided(self, line: str) -> None:
        if line not in self.conditional:
            self.conditional.append(line)

    def _data_dependent(self, func: Any, args: Any, kwargs: Any, real: Any, error: Exception) -> Any:
        """What an op returns whose result's shape depends on values, where they are known.

        Raises:
            DataDependentShape: If they are not.
        """
        tags = func.tags
        if torch.Tag.dynamic_output_shape not in tags and torch.Tag.data_dependent_output not in tags:
            raise error
        if real is not None:
            return tree_map_only(torch.Tensor, self._likeness, real)
        if func is torch.ops.aten.index.Tensor and (positions := self._positions(args[1])) is not None:
            return func(args[0], positions)
        raise DataDependentShape(
            f"{user_line()}: the shape of {_describe(func).name}'s result depends on values, which a trace has not; "
            "index with a small constant tensor, or use a form of fixed size (torch.where, a mask multiplied in)"
        ) from None

    def _positions(self, indices: Any) -> list[torch.Tensor | None] | None:
        """Indices in which every mask of known values is replaced by the positions at which it is true."""
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
            elif (mask := self.known.twin(index)) is None:
                return None
            else:
                with torch._C._DisableTorchDispatch():
                    positions += [self._likeness(at) for at in mask.nonzero(as_tuple=True)]
        return positions

    def _likeness(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor in the likeness of a real one, not yet counted."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            likeness = torch.empty_strided(real.size(), _dense_strides(real), dtype=real.dtype, device=META)
            if not real.is_meta:
                self._remember(likeness, real.detach().clone(memory_format=torch.preserve_format))
            return likeness

    # -- strangers and numbers -----------------------------------------------------------------------------------------

    def _meet(self, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Lets real tensors from outside meet traced ones: meta tensors stand in for them and are not counted."""
        strangers = [t for t in tensors if not t.is_meta]
        if not strangers or len(strangers) == len(tensors):
            return args, kwargs

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
            if tensor.is_contiguous():
                self._remember(twin, tensor.detach())
            return twin

        return tree_map_only(torch.Tensor, stand_in, args), tree_map_only(torch.Tensor, stand_in, kwargs)

    def _make_scalars(self, op: _Op, args: tuple[Any, ...], node: Any) -> None:
        """A number that Python hands to an op of tensors becomes a tensor, which stays if the op's gradient needs it.

        A number that a gradient formula hands over is such a tensor already.
        """
        if not op.tensor_slots or not self._calls or self._calls[-1][1] != node:
            return
        maker = torch._C._autograd._get_sequence_nr() - 1
        for slot in op.tensor_slots:
            if slot < len(args) and isinstance(args[slot], (bool, int, float, complex)):
                nbytes = _scalar_nbytes(args[slot])
                event = self._recorder.alloc(nbytes, op=op.name, module=self.attribution.module, shape="[]")
                self._scalars.append((maker, event))

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a Python-level call into torch, then follows the numbers that its graph kept."""
        if function in cpu.NOT_REPRODUCED:
            self.not_covered.add(function.__name__)
        self._calls.append((function, _current_node()))
        try:
            out = cpu.FUNCTIONS.get(function, function)(*args, **kwargs)
        finally:
            self._calls.pop()
        if self._scalars:
            pending, self._scalars = self._scalars, []
            kept = _saved_scalars(out, {maker for maker, _ in pending}) if torch.is_grad_enabled() else {}
            for maker, event in pending:
                storages = kept.get(maker)
                if storages:
                    storage = storages.pop()
                    address = storage._cdata
                    self._storages[address] = _Tracked(event, 8, weakref.ref(storage, self._on_death(address)))
                else:
                    self._recorder.free(event)
        return out

    # -- categories ----------------------------------------------------------------------------------------------------

    def _label(self, tensor: torch.Tensor, category: str) -> None:
        tracked = self._storages.get(tensor.untyped_storage()._cdata)
        if tracked is not None:
            self._recorder.label(tracked.event, category)

    def _label_modules(self) -> None:
        for root in self.attribution.roots:
            for parameter in root.parameters():
                self._label(parameter, "parameter")
            for buffer in root.buffers():
                self._label(buffer, "buffer")
        self._label_gradients()

    def _label_gradients(self) -> None:
        for root in self.attribution.roots:
            for parameter in root.parameters():
                if parameter.grad is not None:
                    self._label(parameter.grad, "gradient")

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        self._optimizing = begins
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if begins:
            for parameter in parameters:
                self._label(parameter, "parameter")
                if parameter.grad is not None:
                    self._label(parameter.grad, "gradient")
        for value in tree_leaves([optimizer.state[p] for p in parameters if p in optimizer.state]):
            if isinstance(value, torch.Tensor):
                self._label(value, "optimizer state")


@dataclass
class _Tracked:
    event: int
    nbytes: int
    alive: weakref.ref = field(repr=False)


_ACCUMULATE_GRAD: Final = torch._C._functions.AccumulateGrad
_active: Trace | None = None


def active() -> Trace | None:
    """The trace whose `with` block is running, if any."""
    return _active


def _set_active(run: Trace | None) -> None:
    global _active
    _active = run


class _Ops(TorchDispatchMode):
    """Hands every op that reaches a kernel to the trace."""

    def __init__(self, run: Trace) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run.on_op(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees calls before autograd does: puts new tensors on the meta device, and asks `cpu` for other paths."""

    def __init__(self, run: Trace) -> None:
        super().__init__()
        self.run = run
        self._factories = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._factories:
            return self._make(func, args, kwargs)
        if func is torch.Tensor.cpu:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(META if _is_host(a) else a for a in args)
            if _is_host(kwargs.get("device")):
                kwargs = {**kwargs, "device": META}
        if func in _FACE and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return _FACE[func]
        if func in _READS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self.run.read_out(func, args[0])
        if func is torch.Tensor.backward:
            with self:  # what Python code runs inside (checkpointing, custom functions) is seen as well
                return _backward(*args, **kwargs)
        return self.run.call(func, args, kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and not _is_host(device) and torch.device(device) != META:
            raise ValueError(
                f"{user_line()}: device={str(device)!r} in a trace by CPU rules; use 'cpu', or trace by other rules"
            )
        if func in (torch.tensor, torch.asarray, torch.as_tensor):
            return self._from_data(func, args, {**kwargs, "device": "cpu"})
        return self.run.call(func, args, {**kwargs, "device": META})

    def _from_data(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self.run.call(func, args, {**kwargs, "device": META})
        with torch._C._DisableTorchDispatch():
            real = func(*args, **kwargs)
        placed = self.run.adopt(real, func.__name__)
        return placed.requires_grad_(real.requires_grad) if real.requires_grad else placed


_READS: Final = frozenset({torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy})
_FACE: Final = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_cpu.__get__: True,
    torch.Tensor.is_meta.__get__: False,
}
"""What a traced tensor says of itself, so that code which looks goes the way it goes on the real device."""


@contextmanager
def _open_functional() -> Iterator[None]:
    """Lets a function mode see into `torch.nn.functional`.

    Its Python functions hand themselves over to a mode as a whole, and then run with the mode off. Here they hand
    themselves over only to tensor types of the user's own.
    """

    def overridden(*tensors: Any) -> bool:
        kinds = {type(t) for t in tree_leaves(tensors)} - {torch.Tensor, torch.nn.Parameter}
        plain = torch._C._disabled_torch_function_impl
        return any(getattr(kind, "__torch_function__", plain) is not plain for kind in kinds)

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    before = {name: getattr(F, name) for name in names}
    for name in names:
        setattr(F, name, overridden)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


@contextmanager
def _counted(run: Trace, name: str) -> Iterator[None]:
    """Counts what a function of `torch` returns, which allocates without an op that a mode could see."""
    function = getattr(torch, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        run.count_host(made, name)
        return made

    setattr(torch, name, counting)
    try:
        yield
    finally:
        setattr(torch, name, function)


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward` without its own check for function modes."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _is_host(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cpu"
    return isinstance(device, torch.device) and device.type == "cpu"


def _zero(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0j if dtype.is_complex else 0


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _scalar_nbytes(number: complex) -> int:
    """Size of the tensor that a Python number becomes (`c10/core/ScalarTypeToTypeMeta.h`: bool, int64, double)."""
    return 1 if isinstance(number, bool) else 16 if isinstance(number, complex) else 8


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides a copy of the tensor gets: the same if it is dense, else those of a contiguous one."""
    if engine.is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.size(), device=META).stride()


def _saved_scalars(out: Any, makers: set[int]) -> dict[int, list[torch.UntypedStorage]]:
    """Storages of the 0-dimensional host tensors that graph nodes keep, by the nodes' sequence numbers."""
    first = min(makers)
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    frontier = [o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    found: dict[int, list[torch.UntypedStorage]] = {}
    seen = set()
    while frontier:
        node = frontier.pop()
        number = node._sequence_nr()
        if number < first or number in seen or isinstance(node, _ACCUMULATE_GRAD):
            continue
        seen.add(number)
        frontier += [parent for parent, _ in node.next_functions if parent is not None]
        if number in makers:
            for name in ("_saved_other", "_saved_self", "_saved_tensor1", "_saved_tensor2"):
                saved = getattr(node, name, None)
                if isinstance(saved, torch.Tensor) and saved.dim() == 0 and not saved.is_meta:
                    found.setdefault(number, []).append(saved.untyped_storage())
    return found
