"""The storages a trace has seen: each is recorded when it appears, and its end through a weak reference."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .attribution import storage_of
from .kernels import New, dtype_name, shape_text
from .timeline import Recorder


class _Tracked(weakref.ref):
    """A storage that is alive: its address, its number in the recorder, and its size."""

    __slots__ = ("address", "event", "nbytes")


class Storages:
    """Storages by address, from their first appearance to their end."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._tracked: dict[int, _Tracked] = {}
        self._on_death = self._die  # bound once

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is already recorded, or holds nothing (`ATen/native/TensorFactories.cpp`,
        `_efficientzerotensor`)."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._tracked or storage.nbytes() == 0 or tensor._is_zerotensor()

    def record(self, tensor: torch.Tensor, **what: Any) -> int:
        """Records the tensor's storage as allocated now. `what` says op, module and line."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        event = self.recorder.alloc(nbytes, shape=shape_text(tensor.shape), dtype=dtype_name(tensor.dtype), **what)
        self.follow(storage, event, nbytes)
        return event

    def record_made(self, tensor: torch.Tensor, like: New, op: str, **what: Any) -> int:
        """`record` of a tensor that is new and known to be like this."""
        event = self.recorder.alloc(like.nbytes, shape=like.shape_text, dtype=like.dtype_name, op=op, **what)
        self.follow(tensor.untyped_storage(), event, like.nbytes)
        return event

    def follow(self, storage: torch.UntypedStorage, event: int, nbytes: int) -> None:
        """Lets an allocation that is already recorded end when this storage does."""
        tracked = _Tracked(storage, self._on_death)
        tracked.address, tracked.event, tracked.nbytes = storage._cdata, event, nbytes
        self._tracked[tracked.address] = tracked

    def weakly(self) -> dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]]:
        """By address the number of each storage that lives, and a reference that tells when it dies."""
        alive = [(address, tracked.event, tracked()) for address, tracked in self._tracked.items()]
        return {address: (event, weakref.ref(storage)) for address, event, storage in alive if storage is not None}

    def _die(self, tracked: _Tracked) -> None:
        if self._tracked.get(tracked.address) is tracked:
            del self._tracked[tracked.address]
            self.recorder.free(tracked.event)

    def has_grown(self, tensor: torch.Tensor) -> bool:
        """Whether an op that wrote into a tensor gave its storage another size (`resize_`, `out=`)."""
        storage = tensor.untyped_storage()
        tracked = self._tracked.get(storage._cdata)
        return storage.nbytes() != (tracked.nbytes if tracked is not None else 0)

    def record_growth(self, tensor: torch.Tensor, **what: Any) -> None:
        """Records that a storage has grown: a new one, made before the old one is released (`ATen/native/Resize.h`)."""
        before = self._tracked.pop(tensor.untyped_storage()._cdata, None)
        self.record(tensor, **what)
        if before is not None:
            self.recorder.free(before.event)

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Says what the tensors' storages are for, of those that are ours."""
        tracked, say = self._tracked, self.recorder.label
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and (known := tracked.get(storage._cdata)) is not None:
                say(known.event, category)

    def label_lost(self, made: list[int]) -> None:
        """Says of an op's results which died before it returned that they were scratch.

        Recomputation stops in the middle of the op that saves the last tensor it needs (`torch/utils/checkpoint.py`,
        `_recomputation_hook`); what the op returns beside that tensor reaches nobody.
        """
        for event in made:
            if not self.recorder.is_live(event):
                self.recorder.label(event, "scratch")
