"""What kernels return, remembered: the same op on the same shapes returns the same shapes.

PyTorch's meta kernels are mostly Python and cost more than many real kernels; a training step repeats the same few
hundred calls thousands of times. So each distinct call is asked once, and later ones get new empty tensors of the same
description. Views and factories are quick already and are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from .rules import Rules

META: Final = torch.device("meta")
_TENSOR_RETURNS: Final = frozenset({"Tensor", "List[Tensor]"})
_ABSENT: Final = object()  # a call that cannot be remembered


class Kernels:
    """Runs ops on meta tensors, by the rules' kernels where a rule states one, and remembers what they return."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._plans: dict[int, _Plan] = {}  # by the op's identity: its own hash is a call of Python

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = _Plan(func, self._rules)
        key = plan.key(args, kwargs) if plan.remembers else None
        if key is None:
            return plan.kernel(*args, **kwargs)
        known = plan.returns.get(key, _ABSENT)
        if known is _ABSENT:
            out = plan.kernel(*args, **kwargs)
            if _is_plain(out, args):
                plan.returns[key] = _describe(out, args)
            else:
                plan.remembers = False
            return out
        return _make(known, args)


class _Plan:
    """What runs in an op's place, how its calls are told apart, and what they returned."""

    def __init__(self, func: Any, rules: Rules) -> None:
        self.kernel: Callable[..., Any] = rules.kernel(func)
        self.remembers = _can_be_remembered(func)
        self.returns: dict[Any, Any] = {}  # by call
        # A number's value changes what is computed, never a shape: only its type tells calls apart.
        self.numbers = frozenset(
            i for i, arg in enumerate(func._schema.arguments) if str(arg.type) in ("Tensor", "number", "float")
        )

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call's result depends on, or None if it cannot be told or is not on the meta device."""
        parts: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        numbers = self.numbers
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                if not arg.is_meta:
                    return None
                parts.append((arg.shape, arg.stride(), arg.dtype))
            elif i in numbers:
                parts.append(type(arg))
            elif isinstance(arg, (list, tuple)):
                parts.append(_sequence_key(arg))
            else:
                parts.append((type(arg), arg))
        for name, arg in kwargs.items():
            if isinstance(arg, torch.Tensor) or (name == "device" and arg not in (None, META)):
                return None
            parts.append((name, type(arg), _sequence_key(arg) if isinstance(arg, (list, tuple)) else arg))
        try:
            key = tuple(parts)
            hash(key)
        except TypeError:
            return None
        return None if _REAL in key else key


_REAL: Final = "a real tensor"


def _sequence_key(items: Any) -> Any:
    if any(isinstance(item, torch.Tensor) and not item.is_meta for item in items):
        return _REAL
    return tuple(
        (item.shape, item.stride(), item.dtype) if isinstance(item, torch.Tensor) else (type(item), item)
        for item in items
    )


def _can_be_remembered(func: Any) -> bool:
    schema, tags = func._schema, func.tags
    data_dependent = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    changes_shape = torch.Tag.inplace_view in tags or schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")
    if data_dependent or changes_shape or any(arg.is_out for arg in schema.arguments):
        return False
    if not any("Tensor" in str(arg.type) for arg in schema.arguments):
        return False
    for returned in schema.returns:
        alias = returned.alias_info
        if str(returned.type) not in _TENSOR_RETURNS or (alias is not None and not alias.is_write):
            return False
    return True


def _is_plain(out: Any, args: tuple[Any, ...]) -> bool:
    """Whether every output is an argument or a new tensor on the meta device that fills its storage.

    Some ops return views without their schema saying so (`_unsafe_view`), or a storage larger than the tensor in it.
    """
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and not any(leaf is tensor for tensor in given):
            if not leaf.is_meta:
                return False
            storage = leaf.untyped_storage()
            twin = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
            if storage._cdata in storages or storage.nbytes() != twin.untyped_storage().nbytes():
                return False
    return True


def _describe(out: Any, args: tuple[Any, ...]) -> Any:
    """The description that `_make` needs: of a new tensor its size, strides and dtype, of an argument its position."""
    if isinstance(out, torch.Tensor):
        for i, arg in enumerate(args):
            if out is arg:
                return i
        return out.size(), out.stride(), out.dtype
    if isinstance(out, (tuple, list)):
        return type(out), [_describe(item, args) for item in out]
    return None


def _make(description: Any, args: tuple[Any, ...]) -> Any:
    if description is None:
        return None
    if isinstance(description, int):
        return args[description]
    if len(description) == 3:
        size, stride, dtype = description
        return torch.empty_strided(size, stride, dtype=dtype, device=META)
    kind, items = description
    return kind(_make(item, args) for item in items)
