"""Modules that are changed while a block lasts, whether they are there already or are imported in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest import mock

Change = tuple[Any, str, Any]
"""An object, the name of an attribute of it, and what that is while the block lasts."""


@contextmanager
def changed(changes: Mapping[str, Callable[[ModuleType], Iterator[Change]]]) -> Iterator[None]:
    """Makes the changes of each module named here, and takes them back at the end.

    Args:
        changes: By a module's full name, what is to be changed in it.
    """
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            for owner, name, value in changes[module.__name__](module):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))

        finder = _Finder(set(changes), change)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        for name in changes:
            if (module := sys.modules.get(name)) is not None:
                change(module)
        yield


class _Finder:
    """Finds a module as Python does, and calls back when its code has run."""

    def __init__(self, names: set[str], imported: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._imported(module)

        spec.loader.exec_module = exec_module
        return spec
