"""Libraries that write numbers by their very type, while a trace runs: a stand-in is a plain number to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

from .importing import Change, changed
from .values import plain

_REPRESENTING: Final = ("yaml.representer", "ruamel.yaml.representer")


def given_plain_numbers() -> AbstractContextManager[None]:
    """While the block lasts, whatever they are given to write."""
    return changed(dict.fromkeys(_REPRESENTING, _representing))


def _representing(module: ModuleType) -> Iterator[Change]:
    yield module.BaseRepresenter, "represent_data", _of_plain(module.BaseRepresenter.represent_data)


def _of_plain(represent: Callable[..., Any]) -> Callable[..., Any]:
    def represented(self: Any, data: Any) -> Any:
        return represent(self, plain(data))

    return represented
