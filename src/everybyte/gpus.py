"""GPUs by name: the memory that a driver reports, what a process has of it, and what PyTorch's kernels choose by.

`gpus.csv` holds a row for each, from a public report that the row names: `deviceQuery` of the CUDA samples, OpenXLA's
target configurations, what PyTorch prints. Drivers differ in what they report, newer ones less; a row is one of them.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from typing import Final

from .units import MiB

CONTEXT: Final = (112 * MiB, 614 * MiB)
"""Bytes that a process takes of a GPU beside PyTorch's allocator: the least and the most reported of any.

The driver keeps a context there, and the kernels that have run: since 1.13 PyTorch has them loaded as they are first
needed (`torch/cuda/__init__.py`, `CUDA_MODULE_LOADING`). A first tensor cost 266 MB so, and 646 MB with all kernels
(pytorch/pytorch#86509, less the allocator's 20 MiB). A GPU's range is what error messages leave for it,
"this process has" less what is allocated and what is reserved, each rounded to 0.01 GiB.
"""

_OF_CAPABILITY: Final = {  # threads and bytes of shared memory of a multiprocessor
    (6, 0): (2048, 64 * 1024),
    (6, 1): (2048, 96 * 1024),
    (7, 0): (2048, 96 * 1024),
    (7, 5): (1024, 64 * 1024),
    (8, 0): (2048, 164 * 1024),
    (8, 6): (1536, 100 * 1024),
    (8, 9): (1536, 100 * 1024),
    (9, 0): (2048, 228 * 1024),
    (10, 0): (2048, 228 * 1024),
    (10, 3): (2048, 228 * 1024),
    (12, 0): (1536, 100 * 1024),
}
"""CUDA C++ Programming Guide, technical specifications per compute capability."""


@dataclass(frozen=True)
class GPU:
    """A GPU as PyTorch sees it.

    Attributes:
        key: A short name, as `find` takes it.
        name: As the driver gives it, `torch.cuda.get_device_name()`.
        total: Bytes of its memory, `torch.cuda.get_device_properties(0).total_memory`.
        capability: Compute capability, major and minor.
        processors: Streaming multiprocessors.
        l2: Bytes of its second-level cache.
        context: Bytes that a process takes beside PyTorch's allocator, at least and at most (`CONTEXT`).
        source: Who reported it.
        precision: 0 where `total` is exact; else what the report rounds to: the GPU has less than so much more.

    Raises:
        ValueError: If a size or the number of multiprocessors is none, or the compute capability is not known.
    """

    key: str
    name: str
    total: int
    capability: tuple[int, int]
    processors: int
    l2: int
    source: str
    context: tuple[int, int] = CONTEXT
    precision: int = 0

    def __post_init__(self) -> None:
        for field in ("total", "processors"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) <= 0:
                raise ValueError(f"{field} is a positive whole number, not {getattr(self, field)!r}")
        if self.capability not in _OF_CAPABILITY:
            known = ", ".join(f"({major}, {minor})" for major, minor in _OF_CAPABILITY)
            raise ValueError(f"capability={self.capability!r}: there are {known}")
        least, most = self.context
        if not 0 <= least <= most < self.total:
            raise ValueError(f"context={self.context!r}: two counts of bytes, the least and the most, within the total")

    @property
    def usable(self) -> tuple[int, int]:
        """Bytes that are left for PyTorch's allocator, at least and at most."""
        least, most = self.context
        return self.total - most, self.total - least

    @property
    def threads(self) -> int:
        """Threads that one multiprocessor holds at once."""
        return _OF_CAPABILITY[self.capability][0]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of one multiprocessor."""
        return _OF_CAPABILITY[self.capability][1]


def _read() -> Iterator[GPU]:
    with (resources.files(__package__) / "gpus.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            major, minor = row.pop("capability").split(".")
            least, most = row.pop("context_least"), row.pop("context_most")
            yield GPU(
                key=row.pop("key"),
                name=row.pop("name"),
                source=row.pop("source"),
                capability=(int(major), int(minor)),
                context=(int(least), int(most)) if least else CONTEXT,
                **{field: int(value) for field, value in row.items()},
            )


TABLE: Final = tuple(_read())
"""The GPUs that are known, by compute capability."""

DEFAULT: Final = "a100-80gb"
"""The GPU that is assumed where none is named."""


def find(gpu: str | GPU) -> GPU:
    """The GPU of a name: "a4000", "RTX A4000", "NVIDIA A100-SXM4-80GB"; a `GPU` is returned as it is.

        >>> eb.gpus.find("RTX A4000").total
        16756244480

    Raises:
        TypeError: If it is neither.
        ValueError: If there is no such GPU, or the name is that of several.
    """
    if isinstance(gpu, GPU):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"a GPU is named or described by an everybyte.gpus.GPU, not {gpu!r}")
    wanted = _plain(gpu)
    whole = [row for row in TABLE if wanted in (_plain(row.key), _plain(row.name))]
    found = whole or [row for row in TABLE if wanted == _plain(row.key.partition("-")[0])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"gpu={gpu!r}: say which, {' or '.join(row.key for row in found)}")
    keys = {_plain(row.key): row.key for row in TABLE}
    near = [keys[match] for match in difflib.get_close_matches(wanted, keys, n=4, cutoff=0.5)]
    raise ValueError(f"gpu={gpu!r} is not in the table; it has {', '.join(near or keys.values())}")


_BESIDE: Final = re.compile(r"nvidia|tesla|quadro|geforce|rtx|laptop|gpu|pcie|sxm\d?|hbm\d?e?|[^a-z0-9]|(?<=\d)gb")


def _plain(name: str) -> str:
    """A name without what makers and drivers put around it."""
    return _BESIDE.sub("", name.lower())


_followed: ContextVar[GPU | None] = ContextVar("the GPU that a trace follows", default=None)


def followed() -> GPU:
    """The GPU whose kernels' choices a trace follows at this moment."""
    return _followed.get() or find(DEFAULT)


@contextmanager
def following(gpu: GPU | None) -> Iterator[None]:
    """Lets the rules follow a GPU while the block lasts."""
    token = _followed.set(gpu)
    try:
        yield
    finally:
        _followed.reset(token)
