"""What kernels return, remembered: the same op on the same shapes returns the same shapes.

PyTorch's meta kernels are mostly Python and cost more than many real kernels; a training step repeats the same few
hundred calls thousands of times. So each distinct call is asked once, and later ones get new empty tensors of the same
description. Views and factories are quick already and are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .rules import Rules

META: Final = torch.device("meta")
ABSENT: Final = object()
"""What a call returns that is not remembered."""
_TENSOR_RETURNS: Final = frozenset({"Tensor", "List[Tensor]"})
_BY_STORAGE: Final = frozenset(f"aten::{name}_scatter" for name in ("select", "slice", "diagonal", "as_strided"))
"""Ops whose result is as large as the storage of their argument."""
_Tensor: Final = torch.Tensor
_empty_strided: Final = torch.empty_strided
_is_grad_enabled: Final = torch.is_grad_enabled
_default_dtype: Final = torch.get_default_dtype


class New(NamedTuple):
    """A tensor that a kernel makes, with what a timeline says of it."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    shape_text: str
    dtype_name: str

    def make(self) -> torch.Tensor:
        return _empty_strided(self.size, self.stride, dtype=self.dtype, device=META)


class Call(NamedTuple):
    """What an op does in a call like one before."""

    returns: Any = ABSENT  # as `make` takes it
    takes: tuple[int, ...] | None = None  # bytes of each piece of its scratch, where its kind of op settles them


_NOT_KNOWN: Final = Call()


class Plan:
    """What runs on meta tensors in an op's place, how its calls are told apart, and what they returned.

    Args:
        func: The op.
        rules: Whose kernel runs, where they state one.
    """

    def __init__(self, func: Any, rules: Rules) -> None:
        kernel = rules.kernel(func)
        self.kernel: Callable[..., Any] = func._op if kernel is func else kernel  # `_op` is what the op itself calls
        self.remembers = _can_be_remembered(func)
        self.iterated = None if func in rules.scratch else rules.iterated(func)
        self._calls: dict[Any, Call] = {}
        # A number's value changes what is computed, never a shape: only its type tells calls apart.
        arguments = [
            (i, a) for i, a in enumerate(func._schema.arguments) if str(a.type) in ("Tensor", "number", "float")
        ]
        self.numbers = frozenset([i for i, _ in arguments] + [a.name for _, a in arguments])

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], int, Any]:
        """Looks at a call's arguments, once for all that depends on them.

        Returns:
            The tensors among them; how many of these are in host memory; and what the call's result depends on, None
            if that cannot be told.
        """
        if not self.remembers:
            found = tensors_in(args, kwargs)
            return found, len([tensor for tensor in found if not tensor.is_meta]), None
        tensors: list[torch.Tensor] = []
        key: list[Any] | None = [_is_grad_enabled(), _default_dtype()]
        of_host, numbers = 0, self.numbers
        for i, arg in enumerate(args):
            if isinstance(arg, _Tensor):
                tensors.append(arg)
                of_host += not arg.is_meta
                key += (arg.shape, arg.stride(), arg.dtype, arg._is_zerotensor())
            elif i in numbers:
                key.append(type(arg))
            elif isinstance(arg, (list, tuple)):
                key.append(_sequence_key(arg))
                among = [item for item in arg if isinstance(item, _Tensor)]
                tensors += among
                of_host += len([tensor for tensor in among if not tensor.is_meta])
            else:
                key.append((type(arg), arg))
        if kwargs:
            among = tensors_in((), kwargs)
            tensors += among
            of_host += len([tensor for tensor in among if not tensor.is_meta])
            for name, arg in kwargs.items():
                value = _sequence_key(arg) if isinstance(arg, (list, tuple)) else None if name in numbers else arg
                key.append((name, type(arg), value))
            if among or kwargs.get("device") not in (None, META):
                return tensors, of_host, None
        return tensors, of_host, None if of_host else tuple(key)

    def known(self, key: Any) -> Call:
        """What is remembered of a call that `look` has looked at."""
        try:
            return self._calls.get(key, _NOT_KNOWN)
        except TypeError:  # cannot be hashed
            return _NOT_KNOWN

    def run(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the kernel returns for a call that `look` has looked at."""
        known = self.known(key)
        if known is not _NOT_KNOWN:
            return make(known.returns, args)
        out = self.kernel(*args, **kwargs)
        if key is not None:
            self.remembers = _is_plain(out, args)
            with suppress(TypeError):  # cannot be hashed
                if self.remembers:
                    takes = None if self.iterated is None else tuple(self.iterated(*args, **kwargs))
                    self._calls[key] = Call(_describe(out, args), takes)
        return out


def tensors_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's arguments, those in lists included."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, _Tensor)]
    return found


def _sequence_key(items: Any) -> Any:
    return tuple(
        [(item.shape, item.stride(), item.dtype) if isinstance(item, _Tensor) else (type(item), item) for item in items]
    )


def _can_be_remembered(func: Any) -> bool:
    schema, tags = func._schema, func.tags
    data_dependent = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    by_storage = schema.name in _BY_STORAGE
    changes_shape = torch.Tag.inplace_view in tags or schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")
    if data_dependent or by_storage or changes_shape or any(arg.is_out for arg in schema.arguments):
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
            if not leaf.is_meta or leaf._is_zerotensor():
                return False
            storage = leaf.untyped_storage()
            twin = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
            if storage._cdata in storages or storage.nbytes() != twin.untyped_storage().nbytes():
                return False
    return True


def _describe(out: Any, args: tuple[Any, ...]) -> Any:
    """The description that `make` needs: of a new tensor what it is like, of an argument its position."""
    if isinstance(out, torch.Tensor):
        for i, arg in enumerate(args):
            if out is arg:
                return i
        size, dtype = out.size(), out.dtype
        nbytes = out.untyped_storage().nbytes()
        return New(size, out.stride(), dtype, nbytes, shape_text(size), dtype_name(dtype))
    if isinstance(out, (tuple, list)):
        return type(out), [_describe(item, args) for item in out]
    return None


def make(description: Any, args: tuple[Any, ...]) -> Any:
    """What a call returns that is like an earlier one: new tensors, and those of its arguments that it gives back."""
    kind = type(description)
    if kind is New:
        return description.make()
    if kind is int:
        return args[description]
    if description is None:
        return None
    kind, items = description
    return kind(make(item, args) for item in items)


@cache
def shape_text(size: torch.Size) -> str:
    """A shape as a timeline writes it: "[8, 50, 256]"."""
    return str(list(size))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as a timeline writes it: "float32"."""
    return str(dtype).removeprefix("torch.")
