"""Calls of an optimizer that reach the trace directly, past PyTorch's argument parser and dispatcher.

An optimizer's loop makes tens of thousands of calls such as `weight.mul_(0.9)`, of which autograd records nothing. What
such a call becomes is settled by its function, the types of its numbers and the dispatch keys, shapes and dtypes of its
tensors (`c10/core/DispatchKeySet.h`). So where one has come down as the op of its own name with its own arguments, the
next one of its kind is that op too, and need not take the way there again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad

from .kernels import ABSENT, Call
from .ops import Op

_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS: Final = frozenset({bool, int, float})
_dispatch_keys: Final = torch._C._dispatch_keys
_default_dtype: Final = torch.get_default_dtype
_is_grad_enabled: Final = torch.is_grad_enabled
_is_inference: Final = torch.is_inference_mode_enabled
_is_autocast: Final = torch.is_autocast_enabled
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_transform: Final = torch._C._functorch.maybe_current_level


HOST: Final = object()
"""Returned by an op on the host's own tensors beside the device, which really runs."""


class Known(NamedTuple):
    """What a kind of call becomes, and does."""

    op: Op
    call: Call | object  # or `HOST`


class Watched(NamedTuple):
    """A call while it runs."""

    kind: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    came: list[Op | None]  # the ops that have come down, None for one with other arguments


class Direct:
    """What each kind of call becomes.

    Args:
        device: The traced device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self.known: dict[tuple[Any, ...], Known | None] = {}  # None for what becomes something else
        self.watched: Watched | None = None

    def kind(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """What settles what a call becomes; None if more than its function and arguments does."""
        if (
            _is_grad_enabled()
            or _is_inference()
            or _is_autocast(self._device)
            or _dispatch_modes() != 1
            or _function_modes()
            or _transform() is not None
            or forward_ad._current_level >= 0
        ):
            return None
        kind = [function, _default_dtype()]
        try:
            for arg in args:
                type_ = type(arg)
                if type_ in _NUMBERS:
                    kind.append(type_)
                elif type_ in _TENSORS and (len(kind) == 2 or arg.dim()):  # without dimensions it may pass for a number
                    kind += (_dispatch_keys(arg).raw_repr(), arg.shape, arg.stride(), arg.dtype)
                else:
                    return None
        except RuntimeError:  # one has no sizes or no strides
            return None
        for name, arg in kwargs.items():
            if type(arg) not in _NUMBERS:
                return None
            kind += (name, type(arg))
        return tuple(kind)

    def watch(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begins to watch what a call becomes, if that is to be learned and no other call is watched."""
        if self.watched is not None or kind in self.known:
            return False
        self.watched = Watched(kind, args, kwargs, [])
        return True

    def note(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes an op that comes down during the call that is watched; keeps none of its tensors alive."""
        _, given, named, came = self.watched
        alike = len(args) == len(given) and named.keys() == kwargs.keys()
        alike = alike and all(map(_same, given, args)) and all(_same(named[name], kwargs[name]) for name in named)
        came.append(op if alike else None)

    def learn(self) -> None:
        """Remembers what the call that is watched has become."""
        kind, args, kwargs, came = self.watched
        self.known[kind] = None
        function, op = kind[0], came[0] if len(came) == 1 else None
        if op is None or op.special or op.name != function.__name__ or hasattr(function, "__code__"):
            return  # a function in Python may do what it likes
        positions = [i for i, arg in enumerate(args) if type(arg) in _NUMBERS]
        if op.plan.numbers.issuperset((*positions, *kwargs)):  # no shape depends on their values
            tensors, of_host, key = op.plan.look(args, kwargs)
            beside = self._device != "cpu" and of_host == len(tensors)
            call = HOST if beside else op.plan.known(key)
            if call is HOST or (call.returns is not ABSENT and not of_host):
                self.known[kind] = Known(op, call)


def _same(given: Any, had: Any) -> bool:
    return given is had if isinstance(given, torch.Tensor) else type(given) is type(had) and given == had
