"""Files while a trace runs: a traced tensor has no values, so none is written, and of what is read only sizes count."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Final, Protocol
from unittest import mock

import torch

from .attribution import user_line
from .importing import Change, changed

_FLATTEN: Final = ("_flatten", "_flatten_as_ptr")  # what safetensors calls first, in one version or another


_NOTHING: Final = object()
"""What safetensors is given to write where that is a traced tensor."""


class Unsaved(NotImplementedError):
    """A traced tensor was to be written."""


class Counter(Protocol):
    """What is needed of the trace."""

    def count(self, tensor: torch.Tensor, op: str) -> int:
        """Records a tensor that no op made."""


@contextmanager
def guarded(run: Counter, device: torch.device) -> Iterator[None]:
    """Lets `torch.load` put on the traced device what belongs there; nothing writes a traced tensor to a file."""
    safetensors = sys.modules.get("safetensors.torch")
    with ExitStack() as stack:
        for owner, name, function in (
            (torch.Tensor, "__reduce_ex__", _pickling(torch.Tensor.__reduce_ex__)),
            (torch, "save", _saving(torch.save)),
            (torch, "load", _loading(run, torch.load) if device.type != "cpu" else torch.load),
            *((safetensors, name, _flattening(getattr(safetensors, name, None))) for name in _FLATTEN if safetensors),
        ):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextmanager
def unwritten(noted: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, a script that saves traced tensors goes on: nothing is written, no earlier file touched.

    Args:
        noted: Called where it would be.
    """

    def of_safetensors(module: ModuleType) -> Iterator[Change]:
        for name in _FLATTEN:
            if (flatten := getattr(module, name, None)) is not None:
                yield module, name, _skipping(flatten, instead=_NOTHING)
        yield module, "serialize_file", _unless_nothing(module.serialize_file, noted)

    def of_lightning(module: ModuleType) -> Iterator[Change]:
        yield module, "_atomic_save", _skipping(module._atomic_save, noted)

    save = torch.save

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.BytesIO):
            return save(obj, f, *args, **kwargs)  # and whoever writes that to a file is the one to skip
        _skipping(save, noted)(obj, f, *args, **kwargs)

    lightning = [f"{name}.plugins.io.torch_io" for name in ("lightning.fabric", "lightning_fabric")]
    with (
        mock.patch.object(torch, "save", saving),
        changed({"safetensors.torch": of_safetensors, **dict.fromkeys(lightning, of_lightning)}),
    ):
        yield


def _skipping(write: Callable[..., Any], noted: Callable[[], None] = lambda: None, instead: Any = None) -> Any:
    def written(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Unsaved:
            noted()
            return instead

    return written


def _unless_nothing(write: Callable[..., Any], noted: Callable[[], None]) -> Callable[..., Any]:
    def written(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return noted() if tensors is _NOTHING else write(tensors, *args, **kwargs)

    return written


def _pickling(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(tensor: torch.Tensor, protocol: int) -> Any:
        _refuse(tensor)
        return reduce(tensor, protocol)

    return reduced


def _flattening(flatten: Callable[..., Any]) -> Callable[..., Any]:
    """safetensors would bring each tensor to the host and write what it finds there."""

    def flattened(tensors: Mapping[str, torch.Tensor], *args: Any) -> Any:
        for tensor in tensors.values():
            _refuse(tensor)
        return flatten(tensors, *args)

    return flattened


def _refuse(tensor: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        traced = tensor.is_meta
    if traced:
        raise Unsaved(
            f"{user_line()}: a traced tensor has no values that could be saved or sent to another process; leave out "
            "saving where a trace runs"
        )


def _saving(save: Callable[..., Any]) -> Callable[..., None]:
    """`torch.save`, which opens no file, an earlier checkpoint for example, before every tensor has been pickled."""

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        written = io.BytesIO()
        save(obj, written, *args, **kwargs)
        with open(f, "wb") if isinstance(f, (str, os.PathLike)) else nullcontext(f) as file:
            file.write(written.getvalue())

    return saving


def _loading(run: Counter, load: Callable[..., Any]) -> Callable[..., Any]:
    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.load is not loading:  # a module that was imported inside the block has kept it
            return load(f, map_location, *args, **kwargs)

        def place(storage: torch.UntypedStorage, saved: str) -> Any:
            if callable(map_location):
                return map_location(storage, saved)
            to = map_location.get(saved, saved) if isinstance(map_location, Mapping) else map_location or saved
            if torch.device(to).type != "cuda":
                return torch.serialization.default_restore_location(storage, str(to))
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                run.count(made, "load")
            return made.untyped_storage()

        return load(f, place, *args, **kwargs)

    return loading
