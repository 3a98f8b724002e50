"""Data loaders while a run is traced: batches are made in this process, whatever number of workers there would be.

Workers take nothing of the GPU, and a traced tensor has no values that could be sent from one process to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as InThisProcess


@contextmanager
def in_this_process() -> Iterator[None]:
    """While the block lasts, a `DataLoader` starts no workers."""
    with mock.patch.object(DataLoader, "__iter__", _iterate):
        yield


def _iterate(loader: DataLoader[Any]) -> Any:
    told = {name: loader.__dict__[name] for name in ("num_workers", "timeout")}
    try:
        loader.num_workers = loader.timeout = 0
        return InThisProcess(loader)
    finally:
        loader.__dict__.update(told)
