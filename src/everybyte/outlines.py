"""Tensors of which a trace knows only the outline, and which are not on the traced device.

A model as people build it begins in host memory. To trace that, its shapes are enough: a large tensor there, or one
that comes back from the GPU with values that nobody knows, is a meta tensor that says it is on the host. It is not
counted, and no memory is taken for it. The same holds for what the code itself puts on PyTorch's meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

LIMIT: Final = 2**20
"""A host tensor that is made by its size alone is real up to so many bytes: what small tables hold may matter."""

WHOLE_LIMIT: Final = 2**24
"""The same for whole numbers and truth values: tokens, labels, positions, masks."""


class _Place(weakref.ref):
    """A storage that is alive, its address, and the device that its tensors say they are on."""

    __slots__ = ("address", "device")


class Outlines:
    """The storages that are outlines, by address."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Says that a meta tensor, and every view of it, is on this device, an outline."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._places:
            place = _Place(storage, self._die)
            place.address, place.device = storage._cdata, device
            self._places[place.address] = place
        return tensor

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """Where an outline is; None for every other tensor."""
        if not self._places or not tensor.is_meta:
            return None
        place = self._places.get(tensor.untyped_storage()._cdata)
        return place.device if place is not None else None

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        """The devices of those tensors that are outlines."""
        return [device for tensor in tensors if (device := self.device(tensor)) is not None] if self._places else []

    def _die(self, place: Any) -> None:
        if self._places.get(place.address) is place:
            del self._places[place.address]


def is_large(tensor: torch.Tensor) -> bool:
    """Whether no real tensor is made in host memory in this one's likeness."""
    fractional = tensor.is_floating_point() or tensor.is_complex()
    return tensor.untyped_storage().nbytes() > (LIMIT if fractional else WHOLE_LIMIT)
