"""Checkpoints while a run is traced: of what is read the sizes count, and what is saved is kept in memory.

A file is mapped and not read, and of a large tensor only the outline is made, on the device where it belongs. What the
traced code saves has no values that could be written. It is kept as what it was, so that a part of the program that
loads it again finds it.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from unittest import mock

import torch

from . import values
from .kernels import META
from .kinds import runs_own_code
from .outlines import WHOLE_LIMIT

_HOST: Final = torch.device("cpu")
_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
"""How a header of safetensors names dtypes."""

Place = Callable[[int, torch.UntypedStorage | None, torch.device], torch.UntypedStorage]


class Tracer(Protocol):
    """What is needed of the trace."""

    def adopt(self, real: torch.Tensor, op: str) -> torch.Tensor:
        """A new traced tensor in the likeness of a real one or an outline."""

    def outline(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new outline of a tensor, on this device."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory, an outline where its values are not known."""


def beside_the_trace() -> AbstractContextManager[Any]:
    """While the block lasts, tensors are what they are, and no op is traced."""
    stack = ExitStack()
    stack.enter_context(torch._C._DisableTorchDispatch())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


@contextmanager
def with_addresses() -> Iterator[None]:
    """While the block lasts, a storage of the meta device has an address: `torch.load` makes what is at 0 once more."""
    address = torch.UntypedStorage.data_ptr
    own = lambda storage: storage._cdata if storage.device.type == "meta" else address(storage)  # noqa: E731
    with mock.patch.object(torch.UntypedStorage, "data_ptr", own):
        yield


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def placing(run: Tracer, device: torch.device) -> Place:
    """Makes what the storages of a file become, on the device where they belong.

    Args:
        run: The trace.
        device: The one that it follows.

    Returns:
        A function of the bytes, the real storage (None if nobody knows what it holds) and the device. What PyTorch
        reads of a file besides (`data.pkl`, some words about its format), and gives back at once, is not counted.
    """

    def place(nbytes: int, real: torch.UntypedStorage | None, where: torch.device) -> torch.UntypedStorage:
        shape = torch.empty(nbytes, dtype=torch.uint8, device=META)
        if where.type == "meta":
            return run.outline(shape, META).untyped_storage()
        if where.type == device.type != "cpu":
            known = real is not None and nbytes <= values.LIMIT
            return run.adopt(bytes_in(real) if known else shape, "load").untyped_storage()
        if where.type != "cpu":
            return torch.serialization.default_restore_location(real, str(where))
        large = real is None or nbytes > WHOLE_LIMIT
        if device.type == "cpu":  # which remembers what small ones hold
            return run.adopt(shape if large else bytes_in(real), "load").untyped_storage()
        return run.outline(shape, _HOST).untyped_storage() if large else real.clone()

    return place


def restoring(place: Place, map_location: Any) -> Callable[[torch.UntypedStorage, str], Any]:
    """`map_location` for `torch.load`, so that each storage comes where the one that was given puts it."""

    def restore(storage: torch.UntypedStorage, saved: str) -> Any:
        to = saved
        if callable(map_location):
            chosen = map_location(storage, saved)
            if chosen is not None and chosen is not storage:
                return chosen
            to = saved if chosen is None else "cpu"
        elif map_location is not None:
            to = map_location.get(saved, saved) if isinstance(map_location, Mapping) else map_location
        return place(storage.nbytes(), storage, torch.device(to))

    return restore


def file_of(source: Any) -> str | None:
    """The path of a file that is to be read from its beginning; None for anything else."""
    if isinstance(source, (str, os.PathLike)):
        return os.path.abspath(source)
    name = getattr(source, "name", None)
    is_file = isinstance(source, io.BufferedReader) and isinstance(name, str)
    return os.path.abspath(name) if is_file and source.tell() == 0 else None


def can_be_mapped(path: str | None) -> bool:
    """Whether this is a file as `torch.save` writes it today (`torch.load`, `mmap`)."""
    return path is not None and not path.endswith(".safetensors") and os.path.isfile(path) and zipfile.is_zipfile(path)


# -- what is saved -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """A storage that was saved: its bytes, where it was, and what it held, if that is known."""

    nbytes: int
    device: str
    real: torch.UntypedStorage | None


class Kept:
    """What traced code has saved, by the path to which a real run writes it."""

    def __init__(self, run: Tracer, says: Callable[[torch.Tensor], torch.device]) -> None:
        self._run = run
        self._says = says
        self._saved: dict[str, tuple[bytes, list[_Held]]] = {}

    def __contains__(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path) in self._saved

    def forget(self, path: Any) -> None:
        """After something real has been written there."""
        if path in self:
            del self._saved[os.path.abspath(path)]

    def keep(self, saved: Any, path: str | os.PathLike[str]) -> None:
        """Keeps anything that can be pickled."""
        written, pickler = io.BytesIO(), None
        with beside_the_trace():
            pickler = _Pickler(written, self._hold)
            pickler.dump(saved)
        self._saved[os.path.abspath(path)] = written.getvalue(), pickler.held

    def give(self, path: str | os.PathLike[str], place: Place, map_location: Any = None) -> Any:
        """What was saved, its storages where `map_location` puts them."""
        written, held = self._saved[os.path.abspath(path)]
        made: dict[int, Any] = {}

        def of(number: int) -> Any:
            if number not in made:
                one = held[number]
                to = one.device
                if isinstance(map_location, Mapping):
                    to = map_location.get(to, to)
                elif map_location is not None:
                    to = _HOST if callable(map_location) else map_location
                made[number] = place(one.nbytes, one.real, torch.device(to))
            return made[number]

        with beside_the_trace():
            unpickler = pickle.Unpickler(io.BytesIO(written))
            unpickler.persistent_load = of
            return unpickler.load()

    def _hold(self, tensor: torch.Tensor) -> _Held:
        storage = tensor.untyped_storage()
        real = self._run.copy_to_host(bytes_in(storage)) if tensor.is_meta else bytes_in(storage).clone()
        said = self._says(tensor)
        device = said.type if said.type == "cpu" else str(said)
        return _Held(storage.nbytes(), device, None if real.is_meta else real.untyped_storage())


class _Storage:
    """Stands for a storage among what is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    """Pickles tensors as views of storages, which it only numbers."""

    def __init__(self, file: io.BytesIO, hold: Callable[[torch.Tensor], _Held]) -> None:
        super().__init__(file)
        self._hold = hold
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no other one takes an address
        self.held: list[_Held] = []

    def persistent_id(self, obj: Any) -> int | None:
        return obj.number if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or runs_own_code(type(obj)):
            return NotImplemented
        storage = obj.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.held)
            self._alive.append(storage)
            self.held.append(self._hold(obj))
        view = obj.dtype, obj.storage_offset(), tuple(obj.size()), obj.stride()
        learns, kind = obj.requires_grad, type(obj)
        return _viewed, (_Storage(self._numbers[storage._cdata]), view, kind, learns, vars(obj) or None)


def _viewed(storage: torch.UntypedStorage, view: Any, kind: type, learns: bool, own: dict[str, Any] | None) -> Any:
    dtype, *where = view
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)
    made = torch.nn.Parameter(tensor, learns) if issubclass(kind, torch.nn.Parameter) else tensor.requires_grad_(learns)
    if own:
        vars(made).update(own)
    return made


# -- safetensors -------------------------------------------------------------------------------------------------------


def opening(open_: Callable[..., Any], place: Place, kept: Kept) -> Callable[..., Any]:
    """`safetensors.safe_open`: shapes come from the header, and what is large is not read."""

    def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch"):
            return open_(filename, framework, device=device, **options)
        where = torch.device(f"cuda:{device}" if type(device) is int else device)
        if filename in kept:
            return _Given(kept.give(filename, place, where))
        return _Opened(open_(filename, framework, device="cpu", **options), Path(filename).stat().st_size, place, where)

    return opened


class _Given(dict[str, torch.Tensor]):
    """A file that was saved in the trace, as `safe_open` gives one."""

    get_tensor = dict.__getitem__
    get_slice = dict.__getitem__

    def offset_keys(self) -> list[str]:
        return list(self)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self)

    def metadata(self) -> None:
        """None was kept."""

    def __enter__(self) -> _Given:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Opened:
    """A file of safetensors whose large tensors are outlines; all else is asked of the real one.

    On the host they lie in one mapped file (`UntypedStorage.from_file`), which is what is counted there.
    """

    def __init__(self, file: Any, nbytes: int, place: Place, where: torch.device) -> None:
        self._file = file
        self._place = place
        self._where = where
        self._nbytes = nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 (no mapping)

    def get_tensor(self, name: str) -> torch.Tensor:
        part = self._file.get_slice(name)
        shape, dtype = part.get_shape(), _DTYPES.get(part.get_dtype())
        if dtype is None:
            return self._file.get_tensor(name)
        with beside_the_trace():
            like = torch.empty(shape, dtype=dtype, device=META)
            nbytes = like.untyped_storage().nbytes()
            small = nbytes <= (WHOLE_LIMIT if self._where.type == "cpu" else values.LIMIT)
            real = self._file.get_tensor(name).clone().untyped_storage() if small else None
            storage = self._place(nbytes, real, self._where)
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, like.size(), like.stride())
