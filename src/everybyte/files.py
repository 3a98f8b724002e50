"""Files while a trace runs: a traced tensor has no values, so none is written, and of what is read only sizes count."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol
from unittest import mock

import torch

from . import checkpoints
from .attribution import user_line
from .importing import Change, changed

_FLATTEN: Final = ("_flatten", "_flatten_as_ptr")  # what safetensors calls first, in one version or another


@dataclass(frozen=True)
class _Unwritten:
    """What safetensors is given to write where that is a traced tensor."""

    tensors: Any


class Unsaved(NotImplementedError):
    """A traced tensor was to be written."""


class Tracer(checkpoints.Tracer, Protocol):
    """What is needed of the trace."""

    kept: checkpoints.Kept


@contextmanager
def guarded(run: Tracer, device: torch.device) -> Iterator[None]:
    """Lets what is loaded come where it belongs, as an outline if it is large; nothing writes a traced tensor."""
    place, over = checkpoints.placing(run, device), []

    def of_safetensors(module: ModuleType) -> Iterator[Change]:
        for name in _FLATTEN:
            yield module, name, _flattening(getattr(module, name, None))
        yield module, "safe_open", checkpoints.opening(module.safe_open, place, run.kept)

    def of_its_package(module: ModuleType) -> Iterator[Change]:
        yield module, "safe_open", checkpoints.opening(module.safe_open, place, run.kept)

    with ExitStack() as stack:
        stack.callback(over.append, True)
        for owner, name, function in (
            (torch.Tensor, "__reduce_ex__", _pickling(torch.Tensor.__reduce_ex__)),
            (torch, "save", _saving(torch.save, run.kept)),
            (torch, "load", _loading(torch.load, run.kept, place, over)),
            (os.path, "exists", _there_too(os.path.exists, run.kept)),
            (os.path, "isfile", _there_too(os.path.isfile, run.kept)),
            (Path, "exists", _there_too(Path.exists, run.kept)),
            (Path, "is_file", _there_too(Path.is_file, run.kept)),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(changed({"safetensors": of_its_package, "safetensors.torch": of_safetensors}))
        yield


@contextmanager
def unwritten(kept: checkpoints.Kept | None, noted: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, a script that saves traced tensors goes on: nothing is written, no earlier file touched.

    Args:
        kept: Where it is kept instead, so that it can be loaded; None in a run whose tensors are real.
        noted: Called where it would be written.
    """
    save = torch.save

    def keep(saved: Any, f: Any) -> None:
        noted()
        path = getattr(f, "name", f)
        if kept is not None and isinstance(path, (str, os.PathLike)):
            kept.keep(saved, path)

    def of_safetensors(module: ModuleType) -> Iterator[Change]:
        for name in _FLATTEN:
            if (flatten := getattr(module, name, None)) is not None:
                yield module, name, _or_unwritten(flatten)
        yield module, "serialize_file", _unless_unwritten(module.serialize_file, keep)

    def of_lightning(module: ModuleType) -> Iterator[Change]:
        yield module, "_atomic_save", _keeping(module._atomic_save, keep)

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.BytesIO):
            return save(obj, f, *args, **kwargs)  # and whoever writes that to a file is the one to skip
        _keeping(save, keep)(obj, f, *args, **kwargs)

    lightning = [f"{name}.plugins.io.torch_io" for name in ("lightning.fabric", "lightning_fabric")]
    with (
        mock.patch.object(torch, "save", saving),
        changed({"safetensors.torch": of_safetensors, **dict.fromkeys(lightning, of_lightning)}),
    ):
        yield


def _keeping(write: Callable[..., Any], keep: Callable[[Any, Any], None]) -> Callable[..., Any]:
    def written(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return write(obj, f, *args, **kwargs)
        except Unsaved:
            return keep(obj, f)

    return written


def _or_unwritten(flatten: Callable[..., Any]) -> Callable[..., Any]:
    def flattened(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return flatten(tensors, *args, **kwargs)
        except Unsaved:
            return _Unwritten(tensors)

    return flattened


def _unless_unwritten(write: Callable[..., Any], keep: Callable[[Any, Any], None]) -> Callable[..., Any]:
    def written(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, _Unwritten):
            return keep(tensors.tensors, filename)
        return write(tensors, filename, *args, **kwargs)

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


def _saving(save: Callable[..., Any], kept: checkpoints.Kept) -> Callable[..., None]:
    """`torch.save`, which opens no file, an earlier checkpoint for example, before every tensor has been pickled."""

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        written = io.BytesIO()
        save(obj, written, *args, **kwargs)
        with open(f, "wb") if isinstance(f, (str, os.PathLike)) else nullcontext(f) as file:
            file.write(written.getvalue())
        kept.forget(f)

    return saving


def _there_too(exists: Callable[..., bool], kept: checkpoints.Kept) -> Callable[..., bool]:
    """Whether there is a file, one that the traced code has saved included."""

    def there(path: Any, *args: Any, **kwargs: Any) -> bool:
        return exists(path, *args, **kwargs) or path in kept

    return there


def _loading(load: Callable[..., Any], kept: checkpoints.Kept, place: checkpoints.Place, over: list[bool]) -> Any:
    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if over:  # a module that was imported inside the block has kept it
            return load(f, map_location, *args, **kwargs)
        path = checkpoints.file_of(f)
        if path in kept:
            return kept.give(path, place, map_location)
        mapped = checkpoints.can_be_mapped(path)
        if mapped:
            kwargs["mmap"] = True
        numbers = torch.serialization.safe_globals([int, float])  # as what stands for one is written
        with checkpoints.beside_the_trace(), checkpoints.with_addresses(), numbers:
            loaded = load(path if mapped else f, checkpoints.restoring(place, map_location), *args, **kwargs)
        if mapped and path is not f and hasattr(f, "seek"):
            f.seek(0, os.SEEK_END)
        return loaded

    return loading
