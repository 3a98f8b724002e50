"""Who keeps a storage alive: the names by which Python reaches it, directly or through the graph of a gradient.

Python's collector knows what every object refers to, so what can be reached is followed from the names a program has:
the locals of each thread's frames, then the globals of modules. Autograd's graph is C++ and hides what it keeps; so
each tensor on the way is asked for its `grad_fn`, and each node for the operands that it saved. Nothing is called that
is the user's: no `__repr__`, no property, no `__getattr__`.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import Node

from .saved import kept_by

_OURS: Final = str(Path(__file__).parent)
_INSTALLED: Final = (_OURS, str(Path(threading.__file__).parent), str(Path(torch.__file__).parents[1]))
_NOTHING_BELOW: Final = (str, bytes, int, float, complex, bool, type(None), CodeType, BuiltinFunctionType, ModuleType)
_C_ATTRIBUTES: Final = (MemberDescriptorType, GetSetDescriptorType)
_LRU_CACHE: Final = type(lru_cache(int))
_ACCUMULATE_GRAD: Final = torch._C._functions.AccumulateGrad


class Holder(NamedTuple):
    """A place that keeps storages alive.

    Attributes:
        path: How Python reaches it, `trainer.cache['k'].grad_fn`. Of places that differ in an index or a key it is one.
        graph: Whether it holds the storage through a gradient graph only, which `detach()` lets go.
    """

    path: str
    graph: bool


def search(
    wanted: set[int], address: Callable[[torch.Tensor], int], marks: list[int], blind: Iterable[Any] = ()
) -> dict[int, list[Holder]]:
    """Finds the holders of storages, nearest name first.

    What a library's modules, or a generator that no name reaches, hold is looked for only where no name of the program
    itself is found; last, what nothing reaches: a cycle of references that the collector has yet to find.

    Args:
        wanted: Addresses of the storages.
        address: Of a tensor's storage.
        marks: Autograd's sequence number when each step began (`torch/csrc/autograd/function.h`, `sequence_nr`).
        blind: Objects that are not looked into.
    """
    found: dict[int, list[Holder]] = {}
    walk = _Walk([wanted, marks, *blind])
    for scopes in (_program, _libraries, _unreached):
        walk.follow(scopes())
        found |= _Graphs(walk, address, marks).holders(wanted - found.keys())
        if wanted == found.keys():
            break
    return found


# -- what Python reaches -----------------------------------------------------------------------------------------------


def _program() -> Iterator[tuple[str, dict[str, Any]]]:
    """The names of the program: locals of the frames that run, innermost first, and globals of its own modules."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_OURS):
                yield "", frame.f_globals if frame.f_locals is frame.f_globals else _locals(frame)
            frame = frame.f_back
    yield from _modules(installed=False)


def _libraries() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _modules(installed=True)
    for each in gc.get_objects():
        if type(each) is GeneratorType and each.gi_frame is not None and not each.gi_running:
            yield f"<generator {each.__name__}>.", _locals(each.gi_frame)


def _unreached() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            yield "", {"<no name reaches it; gc.collect() may free it>": each}


def _modules(installed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType and _is_installed(module) is installed:
            yield "" if name == "__main__" else f"{name}.", module.__dict__


def _is_installed(module: ModuleType) -> bool:
    file = module.__dict__.get("__file__")
    return module.__name__ != "__main__" and (not isinstance(file, str) or file.startswith(_INSTALLED))


def _locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, of which none is kept alive by our looking (as `f_locals` does before 3.13)."""
    view = frame.f_locals
    names = dict(view)
    of_the_frame_alone = sys.getrefcount(view) == 3  # the frame, we and the question: nobody called locals()
    if frame.f_code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13) and of_the_frame_alone:
        view.clear()
    return names


class _Walk:
    """Follows references breadth first, so that the path to an object is a shortest one."""

    def __init__(self, blind: list[Any]) -> None:
        self._kept: list[Any] = [blind]  # alive, so that no number is given out twice
        self._seen = {id(each) for each in (self, vars(self), self._kept, *blind)}
        self._scopes: dict[int, str] = {}
        self._parent: dict[int, Any] = {}
        self._names: dict[int, dict[int, str]] = {}
        self._special: dict[type, bool] = {}  # whether more is to be known of a type than the collector does
        self.found: dict[int, tuple[Any, list[Any]]] = {}  # tensors and nodes, and all that refer to them

    def follow(self, scopes: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Follows what can be reached from scopes: of each what its names begin with, and its names."""
        order: list[Any] = []
        self._seen.update(id(module.__dict__) for module in list(sys.modules.values()) if type(module) is ModuleType)
        for prefix, names in scopes:
            if id(names) not in self._scopes:
                self._scopes[id(names)] = prefix
                order.append(names)
        self._kept.append(order)
        for each in order:
            for child in self._referents(each):
                kind, number = type(child), id(child)
                if kind in _NOTHING_BELOW or (number in self._seen and number not in self.found):
                    continue
                if self._is_special(kind) and issubclass(kind, (torch.Tensor, Node)):
                    if issubclass(kind, Node) and _is(each, torch.Tensor, Node):
                        continue  # its grad_fn, which is asked for by that name
                    self.found.setdefault(number, (child, []))[1].append(each)
                if number not in self._seen:
                    self._seen.add(number)
                    self._parent[number] = each
                    order.append(child)

    def _referents(self, holder: Any) -> list[Any]:
        """What an object refers to: as the collector sees it, and what extension types keep from it."""
        below = gc.get_referents(holder)
        if not self._is_special(type(holder)):
            return below
        if _is(holder, list, tuple):
            below.reverse()  # the collector begins at their end
        elif _is(holder, torch.Tensor):
            below += [each for each in (holder._base, holder.grad if holder.is_leaf else None) if each is not None]
        elif _is(holder, np.ndarray):
            below += [holder.base] if holder.base is not None else []
            below += list(holder.flat) if holder.dtype.hasobject else []
        elif _is(holder, threading.local):
            below.append(vars(holder))  # of the thread that asks
        return below

    def _is_special(self, kind: type) -> bool:
        if kind not in self._special:
            self._special[kind] = issubclass(kind, (list, tuple, torch.Tensor, np.ndarray, threading.local, Node))
        return self._special[kind]

    def path(self, holder: Any, child: Any) -> str:
        """The path to a child of a holder, as a user writes it: `model.encoder`, not `model._modules['encoder']`."""
        parts = [self._label(holder, child)]
        while id(holder) not in self._scopes:
            child, holder = holder, self._parent[id(holder)]
            parts.append(self._label(holder, child))
        written = "".join((self._scopes[id(holder)], *reversed(parts)))
        return _REGISTERED.sub(lambda found: f".{found[1]}" if found[1] else f"[{found[2]}]", written)

    def _label(self, holder: Any, child: Any) -> str:
        if id(holder) not in self._names:
            self._names[id(holder)] = self._names_in(holder)
        names = self._names[id(holder)]
        unnamed = "" if type(child) is dict and not _is(holder, *_CONTAINERS) else ".…"
        return names.get(id(child), "(…)" if _is(holder, _LRU_CACHE) else unnamed)

    def _names_in(self, holder: Any) -> dict[int, str]:
        if id(holder) in self._scopes:
            return {id(value): name for name, value in reversed(holder.items())}
        if _is(holder, dict):
            owner = self._parent[id(holder)]
            if self._label(owner, holder) == "" and not _is(owner, *_CONTAINERS):  # an object's attributes
                return {id(value): f".{name}" for name, value in dict.items(holder)}
        if _is(holder, tuple) and _is(owner := self._parent[id(holder)], FunctionType) and holder is owner.__closure__:
            variables = zip(holder, owner.__code__.co_freevars, strict=True)
            return {id(cell): f".{name}" for cell, name in variables}
        return _names(holder)


_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)


def _is(value: Any, *kinds: type) -> bool:
    """`isinstance` that does not ask the object: a lazy proxy answers by loading what it stands for."""
    return issubclass(type(value), kinds)


def _names(holder: Any) -> dict[int, str]:
    """What each thing that an object refers to is called in it."""
    if _is(holder, dict):
        return {id(value): f"[{_key(key)}]" for key, value in dict.items(holder)}
    if _is(holder, list, tuple, deque):
        fields = getattr(type(holder), "_fields", None)
        names = [f".{name}" for name in fields] if isinstance(fields, tuple) else None
        values = next(kind for kind in (list, tuple, deque) if _is(holder, kind)).__iter__(holder)
        return {id(value): names[i] if names else f"[{i}]" for i, value in enumerate(values)}
    if _is(holder, set, frozenset):
        return {id(value): "{…}" for value in holder}
    if _is(holder, torch.Tensor):
        named = {id(holder._base): "._base", id(holder.grad) if holder.is_leaf else 0: ".grad"}
        return named | {id(value): f".{name}" for name, value in vars(holder).items()}
    if _is(holder, np.ndarray):
        elements = enumerate(holder.flat) if holder.dtype.hasobject else ()
        return {id(holder.base): ".base"} | {id(value): f"[{i}]" for i, value in elements}
    if _is(holder, GeneratorType):
        return {id(value): f".gi_frame.{name}" for name, value in _locals(holder.gi_frame).items()}
    if _is(holder, FrameType):
        return {id(value): f".{name}" for name, value in _locals(holder).items()}
    return _attributes(holder)


def _attributes(holder: Any) -> dict[int, str]:
    """Attributes of an object that no code of the user's computes: its `__dict__`, its slots, and those of C types."""
    named: dict[int, str] = {}
    for kind in reversed(type(holder).__mro__):
        for name, descriptor in list(vars(kind).items()):
            if type(descriptor) in _C_ATTRIBUTES and name != "__dict__":
                with suppress(Exception):  # an empty slot, or what a C type refuses to say
                    named[id(descriptor.__get__(holder, kind))] = "" if name == "cell_contents" else f".{name}"
    with suppress(AttributeError, TypeError):
        attributes = vars(holder) if _is(holder, type) else object.__getattribute__(holder, "__dict__")
        named |= {id(value): f".{name}" for name, value in list(attributes.items())}
    return named


def _key(key: Any) -> str:
    """A key as it is written, if it is one of Python's own kinds; of others only the kind."""
    if type(key) is tuple:
        return f"({', '.join(map(_key, key))})"
    written = repr(key) if type(key) in (str, int, float, bool, bytes, type(None)) else f"<{type(key).__name__}>"
    return written if len(written) <= 40 else f"{written[:39]}…"


_REGISTERED: Final = re.compile(r"\._(?:modules|buffers|parameters)\[(?:'([A-Za-z_]\w*)'|'(\d+)')\]")
_OPEN: Final = re.compile(r"\[[^\]]*\]")


# -- what graphs hold --------------------------------------------------------------------------------------------------


class _Graphs:
    """Which storages the tensors in each place hold, themselves or through the graphs they are the results of."""

    def __init__(self, walk: _Walk, address: Callable[[torch.Tensor], int], marks: list[int]) -> None:
        self._address = address
        self._marks = marks
        self._keeps: dict[Any, tuple[int, ...]] = {}
        self._carried: set[int] = set()
        self._places: dict[str, list[tuple[str, Any]]] = defaultdict(list)  # by path with indices and keys left open
        for member, holders in walk.found.values():
            for holder in holders:
                path = walk.path(holder, member)
                self._places[_OPEN.sub("[…]", path)].append((path, member))

    def holders(self, wanted: set[int]) -> dict[int, list[Holder]]:
        """For each storage that is held, its holders.

        A graph may reach back into the graphs of earlier steps, through a tensor that one step hands to the next (a
        hidden state, a running sum). Then all that came after it reaches back too, the last loss for one; but only the
        tensor handed over keeps the past when the next step runs. It is told by its node's place in the order of its
        step: the same as that of the node in the earlier step at which the graph goes over into it.
        """
        held = [(place, *self._held([member for _, member in place])) for place in self._places.values()]
        found: dict[int, list[Holder]] = defaultdict(list)
        passed_on: dict[int, list[Holder]] = defaultdict(list)
        for place, themselves, own, earlier in held:
            path = min((path for path, _ in place), key=lambda path: (len(path), path))
            for storage in wanted & themselves:
                found[storage].append(Holder(path, graph=False))
            through_graph = Holder(f"{path}.grad_fn", graph=True)
            for storage in wanted & own - themselves:
                found[storage].append(through_graph)
            carries = any(self._number_in_step(node) in self._carried for _, member in place if (node := _node(member)))
            for storage in wanted & earlier - own - themselves:
                (found if carries else passed_on)[storage].append(through_graph)
        return {**passed_on, **found}

    def _held(self, members: list[Any]) -> tuple[set[int], set[int], set[int]]:
        """Storages of the tensors themselves, of their graphs, and of graphs of earlier steps that those reach."""
        themselves = {self._address(member) for member in members if isinstance(member, torch.Tensor)}
        roots = {node for node in map(_node, members) if node is not None}
        own, earlier = self._reach(roots, within_step=True)
        self._carried |= {self._number_in_step(node) for node in earlier}
        before, _ = self._reach(earlier - own, within_step=False)
        return themselves, self._storages(own), self._storages(before)

    def _reach(self, roots: set[Any], *, within_step: bool) -> tuple[set[Any], set[Any]]:
        """The nodes that are reached from roots, and those of earlier steps at which it was stopped."""
        reached, earlier, frontier = set(roots), set(), list(roots)
        while frontier:
            node = frontier.pop()
            for parent, _ in node.next_functions:
                if parent is None or parent in reached:
                    continue
                if within_step and self._step(parent) < self._step(node):
                    earlier.add(parent)
                    continue
                reached.add(parent)
                frontier.append(parent)
        return reached, earlier

    def _storages(self, nodes: set[Any]) -> set[int]:
        return {storage for node in nodes for storage in self._kept(node)}

    def _kept(self, node: Any) -> tuple[int, ...]:
        if node not in self._keeps:
            if isinstance(node, _ACCUMULATE_GRAD):
                tensors = [each for each in (node.variable, node.variable.grad) if each is not None]
            else:
                tensors = kept_by(node)
            self._keeps[node] = tuple(self._address(tensor) for tensor in tensors)
        return self._keeps[node]

    def _step(self, node: Any) -> int:
        return bisect_right(self._marks, node._sequence_nr()) - 1

    def _number_in_step(self, node: Any) -> int:
        step = self._step(node)
        return node._sequence_nr() - self._marks[step] if step >= 0 else -1


def _node(member: Any) -> Any:
    return member.grad_fn if isinstance(member, torch.Tensor) else member
