"""What traced code sees of torch: a device that it takes for the real one.

A function mode stands above autograd. It puts new tensors on the meta device, lets traced tensors say that they live on
the device whose rules hold, hands values out, and takes the real device's path through composite functions.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FunctionType, GetSetDescriptorType
from typing import Any, Final, Protocol
from unittest import mock

import numpy as np
import torch
import torch.utils.checkpoint as checkpoint
import torch.utils.data
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

from .attribution import user_line
from .kernels import META
from .kinds import runs_own_code
from .outlines import Outlines, is_large
from .rules import Rules
from .values import UnknownRead, decide_sizes

_FROM_DATA: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_READS: Final = {
    torch.Tensor.item: torch.Tensor.item,
    torch.Tensor.tolist: torch.Tensor.tolist,
    torch.Tensor.numpy: torch.Tensor.numpy,
    torch.Tensor.__array__: torch.Tensor.numpy,
}
_HOST: Final = torch.device("cpu")
_BY_SIZE: Final = frozenset(
    {torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint}
)
"""Functions that make a tensor from its size; where it is large, and on the host, its outline will do."""
_classes_are_asked: Final = torch._C._is_torch_function_enabled
_OPTIM: Final = str(Path(torch.optim.__file__).parent)
_DATA: Final = str(Path(torch.utils.data.__file__).parent)

_PROPERTIES: Final = [p for p in vars(torch._C.TensorBase).values() if isinstance(p, GetSetDescriptorType)]
_LOOKS: Final = frozenset({p.__get__ for p in _PROPERTIES}) | {
    *(torch.Tensor.dim, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.untyped_storage),
    *(torch.is_complex, torch.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_floating_point),
}
"""Calls that only look at a tensor: they make no storage and have one path on every device."""
_LOOK: Final = object()  # what is done with them, which is nothing

_SIZED: Final = (
    frozenset(_device_constructors())
    | {
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in (
            "reshape",
            "narrow",
            "tile",
            "split",
            "chunk",
            "topk",
            "repeat_interleave",
            "select",
            "split_with_sizes",
        )
    }
    | {
        getattr(torch.Tensor, name)
        for name in ("view", "expand", "repeat", "unfold", "new_empty", "new_zeros", "new_ones")
    }
    | {torch.Tensor.new_full, torch._C._nn.pad}
)
"""Calls whose whole numbers are sizes, indices or counts of parts: they decide how much memory is taken."""


class Tracer(Protocol):
    """What the surface needs of the trace under it."""

    unknown_reads: list[UnknownRead]
    not_covered: set[str]
    outlines: Outlines

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call by the path that the rules give."""

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """`Tensor.backward`."""

    def adopt(self, real: torch.Tensor, op: str) -> torch.Tensor:
        """A new traced tensor in the likeness of a real one."""

    def count(self, tensor: torch.Tensor, op: str) -> int:
        """Records a tensor that no op made."""

    def read_out(self, function: Any, tensor: torch.Tensor) -> Any:
        """A tensor's values, as `item`, `tolist` or `numpy` give them."""

    def contents(self, tensor: torch.Tensor) -> str:
        """What is shown of a tensor's values."""

    def outline(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new outline of a tensor, on this device."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory, an outline where its values are not known."""

    def copy_storage(self, tensor: torch.Tensor, op: str) -> torch.UntypedStorage:
        """A new storage with what a traced tensor's whole storage holds."""


@contextmanager
def shown_to(run: Tracer, rules: Rules, default: torch.device | None = None) -> Iterator[Surface]:
    """Puts the surface in place while the block lasts, and everything back as it was after it.

    Args:
        default: Where tensors are made for which no device is named; None for the traced device, or the one that
            `torch.device` or `torch.set_default_device` has set.
    """
    replaced = mock.patch.object
    with ExitStack() as stack:
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            stack.enter_context(replaced(F, name, _of_the_user_s_own))
        for module in (torch.overrides, torch.autograd):
            stack.enter_context(replaced(module, "has_torch_function", _any_of_the_user_s_own))
        for name in ("_has_foreach_support", "_device_has_foreach_support"):
            stack.enter_context(replaced(clip_grad, name, _as_on(rules.device, getattr(clip_grad, name))))
        group = torch._C._group_tensors_by_device_and_dtype
        stack.enter_context(replaced(torch._C, "_group_tensors_by_device_and_dtype", _grouping(rules.device, group)))
        # Checkpointing compares what it saved, seen from inside a call, with what it recomputed, seen from outside.
        stack.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_metadata))
        surface = Surface(run, rules, default)
        hooks = torch.autograd.graph.saved_tensors_hooks
        stack.enter_context(replaced(hooks, "__init__", _under(surface, hooks.__init__)))
        stack.enter_context(replaced(forward_ad, "enter_dual_level", _noting(run, forward_ad.enter_dual_level)))
        stack.enter_context(replaced(torch.Tensor, "_make_wrapper_subclass", staticmethod(surface.wrapper)))
        stack.enter_context(replaced(torch, "set_default_device", surface.set_default_device))
        stack.enter_context(replaced(torch, "get_default_device", surface.get_default_device))
        if not rules.on_host:
            kind, parse = torch.device(rules.device.type), torch._C._nn._parse_to  # of `Module.to`: takes numbers too
            parsed = lambda *args, **kwargs: parse(*(_numbered(kind, arg) for arg in args), **kwargs)  # noqa: E731
            stack.enter_context(replaced(torch._C._nn, "_parse_to", parsed))
            stack.enter_context(replaced(torch, "_has_compatible_shallow_copy_type", lambda tensor, other: True))
        else:
            # The generator's state is a tensor that no op makes; checkpointing keeps one for each segment.
            stack.enter_context(replaced(torch, "get_rng_state", _counting(run, torch.get_rng_state)))
        stack.enter_context(surface)
        yield surface


class Surface(TorchFunctionMode):
    """Sees each call of torch's Python face before autograd does."""

    def __init__(self, run: Tracer, rules: Rules, default: torch.device | None) -> None:
        super().__init__()
        self._run = run
        self._rules = rules
        self._outlines = run.outlines
        self._unset = rules.device if default is None else default
        self._default = next((mode.device for mode in _modes() if isinstance(mode, DeviceContext)), self._unset)
        tensor = torch.Tensor
        self._says: dict[Any, Any] = {
            tensor.device.__get__: rules.device,
            tensor.is_cpu.__get__: rules.on_host,
            tensor.is_cuda.__get__: not rules.on_host,
            tensor.is_meta.__get__: False,
            tensor.get_device: -1 if rules.on_host else rules.device.index,
        }
        self._special: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {
            **dict.fromkeys(_device_constructors(), self._make),
            **dict.fromkeys(_LOOKS, _LOOK),
            tensor.grad.__set__: _LOOK,
            **dict.fromkeys(self._says, self._say),
            **dict.fromkeys(_READS, self._read),
            **dict.fromkeys((tensor.__getitem__, tensor.__setitem__), self._take_index),
            tensor.__format__: self._format,
            tensor.__repr__: self._repr,
            tensor.data.__set__: self._set_data,
            tensor.data_ptr: self._data_ptr,
            tensor.backward: self._backward,
            tensor.new_tensor: self._new_tensor,
            tensor.__deepcopy__: self._deepcopy,
            tensor.to: self._to,
            torch.normal: self._draw,
            tensor.cpu: lambda func, args, kwargs: self._to(tensor.to, (args[0], _HOST), {}),
        }
        if not rules.on_host:
            self._special[tensor.cuda] = self._cuda
            self._special[torch.device] = lambda func, args, kwargs: func(*_with_type(rules.device, args), **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and (own := _overriding(types)) and _classes_are_asked():
            with self:  # the code of a tensor's own class sees the device too
                answers = (kind.__torch_function__(func, types, args, kwargs) for kind in own)
                return next((answer for answer in answers if answer is not NotImplemented), NotImplemented)
        if self._run.unknown_reads and func in _SIZED:
            decide_sizes((*args, *kwargs.values()))
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs) if special is not _LOOK else func(*args, **kwargs)
        device = kwargs.get("device") if kwargs else None  # empty_like(), new_zeros(), ...
        if device is not None and _is_meta(device):
            with torch._C._DisableTorchDispatch():
                return self._outlines.add(func(*args, **kwargs), META)
        if device is not None and self._is_own(device) and (_is_traced(args) or not self._rules.on_host):
            kwargs = {**kwargs, "device": META}
        return self._run.call(func, args, kwargs)

    def _is_own(self, device: Any) -> bool:
        """Whether this names the device whose rules hold: by type, or with the number that a single device has."""
        if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
            return False
        named = self._device(device)
        return named.type == self._rules.device.type and named.index in (None, 0)

    def _device(self, named: Any) -> torch.device:
        return torch.device(named if self._rules.on_host else _numbered(self._rules.device, named))

    def _say(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_traced(args):
            return func(*args, **kwargs)
        elsewhere = self._outlines.device(args[0])
        return self._says[func] if elsewhere is None else _SAID_ELSEWHERE[func](elsewhere)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_traced(args):
            return func(*args, **kwargs)
        elsewhere = self._outlines.device(args[0])
        if elsewhere == META:
            return func(*args, **kwargs)  # which PyTorch refuses
        if _READS[func] is torch.Tensor.numpy and not self._rules.on_host and elsewhere is None:
            raise TypeError(
                f"{user_line()}: can't convert {self._rules.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return self._run.read_out(_READS[func], args[0])

    def _format(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_traced(args) and args[0].dim() == 0:
            return format(self._run.read_out(torch.Tensor.item, args[0]), args[1])
        if _is_traced(args) and not args[1]:
            return self._repr(torch.Tensor.__repr__, args[:1], {})
        return func(*args, **kwargs)

    def _repr(self, func: Any, args: Any, kwargs: Any) -> str:
        tensor, given = args[0], kwargs.get("tensor_contents")
        if not _is_traced(args) or given or runs_own_code(type(tensor)) or self.place(tensor) == META:
            return func(*args, **kwargs)
        text = func(tensor, tensor_contents=self._run.contents(tensor))
        of_meta = [rf"size={re.escape(str(tuple(tensor.shape)))}", r"dtype=torch\.(?:int64|bool)"]
        if self.place(tensor).type == "cpu":
            of_meta.append(r"device='[^']*'")
        return re.sub(rf",\s+(?:{'|'.join(of_meta)})", "", text)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        if rest and isinstance(rest[0], torch.Tensor):  # to(other): to its device and its dtype
            rest = [self.place(rest[0]), rest[0].dtype, *rest[1:]]
        first = rest[0] if rest and not isinstance(rest[0], torch.dtype) else None
        named = first if first is not None else kwargs.get("device")
        if named is None:
            return self._run.call(func, (tensor, *rest), kwargs)

        def converted(tensor: torch.Tensor) -> Any:
            here = META if tensor.is_meta else _HOST
            others = {name: here if value is named else value for name, value in kwargs.items()}
            return self._run.call(func, (tensor, *(here if value is named else value for value in rest)), others)

        if self._device(named) == META:
            return converted(tensor if self.place(tensor) == META else self._run.outline(tensor, META))
        if self.place(tensor) == META:
            raise RuntimeError(f"{user_line()}: Cannot copy out of meta tensor; no data! Use Module.to_empty() instead")
        traced = tensor.is_meta and self._outlines.device(tensor) is None
        if not self._is_own(named):
            self._check_host(named)
            return converted(self._run.copy_to_host(tensor) if traced else tensor)
        if traced or self._rules.on_host:
            return converted(tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{user_line()}: a tensor that learns is moved to the device inside the graph, which is not traced; "
                "make it there, or bring it in with run.to_device(...)"
            )
        return self._run.adopt(converted(tensor), "_to_copy")  # converted on the host: `ATen/native/cuda/Copy.cu`

    def place(self, tensor: torch.Tensor) -> torch.device:
        """The device that a tensor says it is on."""
        return (self._outlines.device(tensor) or self._rules.device) if tensor.is_meta else tensor.device

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        return self._to(torch.Tensor.to, (args[0], self._rules.device if device is None else device), {})

    def _data_ptr(self, func: Any, args: Any, kwargs: Any) -> int:
        """An address that only the views of one storage share, as code expects that looks for tied weights."""
        if not _is_traced(args):
            return func(*args)
        with torch._C.DisableTorchFunction():
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].element_size()

    def _set_data(self, func: Any, args: Any, kwargs: Any) -> None:
        """`tensor.data = other`, across host and device too (`Module.to`): the tensor remains the same object."""
        tensor, other = args
        if tensor.is_meta == other.is_meta:
            return self._run.call(func, args, kwargs)
        if tensor.grad is not None or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise NotImplementedError(
                f"{user_line()}: a tensor that has a gradient or hooks moves between host and device; move it before"
            )
        torch._C._swap_tensor_impl(tensor, other.detach().requires_grad_(tensor.requires_grad))

    def in_place(self) -> AbstractContextManager[Any]:
        """The surface for code that runs below a call, where its mode is off, or may be."""
        return nullcontext() if self in _modes() else self

    def wrapper(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor._make_wrapper_subclass`: a tensor round traced ones is, like them, on the meta device."""
        args = tuple(META if isinstance(arg, torch.device) and self._is_own(arg) else arg for arg in args)
        if kwargs.get("device") is not None and self._is_own(kwargs["device"]):
            kwargs["device"] = META
        with torch._C.DisableTorchFunction():
            return torch._C.TensorBase._make_wrapper_subclass(*args, **kwargs)

    def set_default_device(self, device: Any) -> None:
        """`torch.set_default_device`, until the block ends; None goes back to where it began."""
        self._default = self._unset if device is None else self._device(device)

    def get_default_device(self) -> torch.device:
        """`torch.get_default_device`, where none is set as on a machine whose code names this device everywhere."""
        modes = _modes()
        above = modes[modes.index(self) :] if self in modes else []
        device = next((mode.device for mode in reversed(above) if isinstance(mode, DeviceContext)), self._default)
        return self._rules.device if device.type == self._rules.device.type else device

    def _check_host(self, device: Any) -> None:
        if self._device(device).type != "cpu":
            raise ValueError(
                f"{user_line()}: device={str(device)!r} in a trace by {self._rules.name.upper()} rules; use "
                f"{self._rules.device.type!r}, or trace by other rules"
            )

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:  # what Python runs inside (checkpointing, custom functions) is seen as well
            return self._run.backward(*args, **kwargs)

    def makes_its_own(self) -> bool:
        """Whether a tensor for which no device is named is on the traced device."""
        return self._default.type == self._rules.device.type

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies a storage once for all tensors in it, as on a real device: `torch/storage.py`, `__deepcopy__`."""
        tensor, memo = args
        if not tensor.is_meta or _of_the_user_s_own(tensor) or runs_own_code(type(tensor)):
            return self._run.call(func, args, kwargs)
        copies, address = memo.setdefault("torch", {}), tensor.untyped_storage()._cdata
        if tensor.is_leaf and id(tensor) not in memo and address not in copies:
            copies[address] = self._run.copy_storage(tensor, "deepcopy")
        if type(tensor) is torch.Tensor and address in copies and self._outlines.device(tensor) is not None:
            return memo[id(tensor)] if id(tensor) in memo else _outline_copied(tensor, copies[address], memo)
        with self, torch._C.DisableTorchFunctionSubclass():
            return _deepcopied(tensor, memo)

    def _take_index(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not (self._rules.on_host or args[0].is_meta):
            return self._run.call(func, args, kwargs)
        tensor, index, *value = args
        if value and self._rules.on_host and isinstance(value[0], (bool, int, float, complex)):
            with torch._C.DisableTorchFunction():  # before the index, as `python_variable_indexing.cpp` does
                value = [torch.scalar_tensor(value[0], dtype=tensor.dtype, device=tensor.device)]
        index = self._index(index)
        decide_sizes(index)
        return self._run.call(func, (tensor, index, *value), kwargs)

    def _index(self, index: Any) -> Any:
        """Lists and arrays in an index become tensors, as they do in a real run, which then counts; bounds are read."""
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, slice):
            bounds = (index.start, index.stop, index.step)
            return slice(*(self._run.read_out(torch.Tensor.item, at) if _is_traced((at,)) else at for at in bounds))
        if isinstance(index, (list, np.ndarray)) and not any(isinstance(i, torch.Tensor) for i in tree_leaves(index)):
            return self._make(torch.tensor, (index,), {})
        return index

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.normal`, which makes a tensor where both its parameters are numbers."""
        if any(isinstance(leaf, torch.Tensor) for leaf in (*args[:2], kwargs.get("mean"), kwargs.get("std"))):
            return self._run.call(func, args, kwargs)
        return self._make(func, args, kwargs)

    def _new_tensor(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        like, *data = args
        if not like.is_meta:
            return self._run.call(func, args, kwargs)
        return self._make(torch.tensor, data, {"dtype": like.dtype, "device": self._rules.device, **kwargs})

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory") and not self._rules.on_host:
            return self._make(func, args, {"device": _HOST, **kwargs, "pin_memory": False}).pin_memory()
        device = kwargs.get("device")
        if device is None and not self._rules.on_host and made_for_the_host(sys._getframe(2)):
            device = _HOST
        elif device is None and self._default != self._rules.device:
            device = self._default
        if device is not None and self._device(device) == META:  # asked for by the user: takes no memory in a real run
            with torch._C._DisableTorchDispatch():
                return self._outlines.add(func(*args, **{**kwargs, "device": META}), META)
        if device is not None and not self._is_own(device):
            self._check_host(device)
            if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
                return self._to(torch.Tensor.to, (args[0], _HOST), {})
            with torch._C._DisableTorchDispatch():
                if func in _BY_SIZE and not self._rules.on_host and kwargs.get("out") is None:
                    outline = func(*args, **{**kwargs, "device": META})
                    if is_large(outline):
                        return self._outlines.add(outline, _HOST)
                return func(*args, **{**kwargs, "device": _HOST})
        if args and isinstance(args[0], torch.Tensor) and self._outlines.device(args[0]) is not None:
            return self._to(torch.Tensor.to, (args[0], self._rules.device), {})
        if func not in _FROM_DATA or (args and isinstance(args[0], torch.Tensor) and args[0].is_meta):
            return self._run.call(func, args, {**kwargs, "device": META})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(args)):
            numbers = tree_map_only(torch.Tensor, lambda t: self._run.read_out(torch.Tensor.item, t), args)
            return self._run.call(torch.empty_like, (func(*numbers, **{**kwargs, "device": META}),), {})
        with torch._C._DisableTorchDispatch():
            real = func(*args, **{**kwargs, "device": "cpu"})
        if self._rules.on_host and func is not torch.tensor and real.data_ptr() == _memory_of(args[0]):
            return real  # looks at the caller's own memory, as in a real run
        made = self._run.adopt(real, func.__name__)
        return made.requires_grad_() if real.requires_grad else made


def _deepcopied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """`Tensor.__deepcopy__`, without its own check for function modes: what it asks of the tensor, the mode answers."""
    own = vars(torch._tensor) | {"has_torch_function_unary": lambda tensor: False}
    return FunctionType(torch.Tensor.__deepcopy__.__code__, own)(tensor, memo)


def _outline_copied(tensor: torch.Tensor, storage: torch.UntypedStorage, memo: dict[Any, Any]) -> torch.Tensor:
    """The same of an outline, whose storage is not where the tensor says that it is."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made = torch.empty(0, dtype=tensor.dtype, device=META)
        made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride()).requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    made.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    return made


_SAID_ELSEWHERE: Final[dict[Any, Callable[[torch.device], Any]]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    torch.Tensor.is_cuda.__get__: lambda device: False,
    torch.Tensor.is_meta.__get__: lambda device: device.type == "meta",
    torch.Tensor.get_device: lambda device: -1,
}
"""What an outline says of itself."""


def _is_meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device) == META


def _is_traced(args: Any) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta


def _memory_of(data: Any) -> int:
    """Address of an array's or tensor's memory, -1 for other data."""
    if isinstance(data, np.ndarray):
        return data.ctypes.data
    return data.data_ptr() if isinstance(data, torch.Tensor) else -1


def _as_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Asks a question about a device with the rules' own in place of meta."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        args = tuple(device if isinstance(arg, torch.device) and arg == META else arg for arg in args)
        kwargs = {k: device if isinstance(v, torch.device) and v == META else v for k, v in kwargs.items()}
        return function(*args, **kwargs)

    return asked


def _grouping(device: torch.device, group: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors by device and dtype, those on meta on the rules' own."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {(device if on == META else on, dtype): made for (on, dtype), made in group(*args, **kwargs).items()}

    return grouped


def _under(surface: Surface, initialise: Callable[..., None]) -> Callable[..., None]:
    """`saved_tensors_hooks`: autograd calls the hooks from inside an op; the user's own see the device there too."""

    def seeing(hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(value: Any) -> Any:
            with surface:
                return hook(value)

        return hook if hook.__module__ in (checkpoint.__name__, f"{__package__}.saved") else called

    def initialised(hooks: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        initialise(hooks, seeing(pack), seeing(unpack))

    return initialised


def _with_type(kind: torch.device, args: Any) -> Any:
    return (kind.type, *args) if len(args) == 1 and type(args[0]) is int else args


def _numbered(kind: torch.device, named: Any) -> Any:
    """A device that is named by its number alone, which a CPU build of PyTorch does not understand."""
    return torch.device(kind.type, named) if type(named) is int else named


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def made_for_the_host(frame: Any) -> bool:
    """Whether a tensor with no device named is one that stays on the host in a real run.

    Optimizers count their steps there, and data sets, samplers and collate functions know of no device.
    """
    if frame.f_code.co_filename.startswith(_OPTIM):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DATA):
            return True
        frame = frame.f_back
    return False


def _of_the_user_s_own(*tensors: Any) -> bool:
    """Whether some tensor is of a type with `__torch_function__` of its own.

    In place of the check in `torch.nn.functional`, whose Python functions hand themselves over to a function mode as a
    whole and then run with the mode off; with this one the mode sees what they call.
    """
    for tensor in tensors:
        kind = type(tensor)
        if kind in (tuple, list):
            if _of_the_user_s_own(*tensor):
                return True
        elif kind not in _PLAIN and _overrides(kind):
            return True
    return False


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, type(None), str, int, float, bool)


@cache
def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    plain = (torch._C._disabled_torch_function_impl, torch.Tensor.__torch_function__)
    return own is not None and own not in plain and getattr(own, "__func__", own) is not plain[1].__func__


@cache
def _overriding(kinds: tuple[type, ...]) -> tuple[type, ...]:
    return tuple(kind for kind in kinds if _overrides(kind))


def _any_of_the_user_s_own(tensors: Any) -> bool:
    return _of_the_user_s_own(*tensors)


def _noting(run: Tracer, enter: Callable[[], int]) -> Callable[[], int]:
    """Under a dispatch mode the formulas of forward mode go out of place, too."""

    def noting() -> int:
        run.not_covered.add("forward-mode differentiation")
        return enter()

    return noting


def _counting(run: Tracer, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = function(*args, **kwargs)
        run.count(made, function.__name__)
        return made

    return counting
