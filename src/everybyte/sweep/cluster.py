"""Dask: where the runs of a sweep go, and how they come back."""

from __future__ import annotations

import logging
import os
import queue
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .grid import SweepError

PATIENCE = 10.0  # seconds, for a scheduler


@contextmanager
def _connected(scheduler: str | None, jobs: int, resources: Mapping[str, float]) -> Iterator[Any]:
    """A client of the scheduler at an address, or of one here with `jobs` processes, each offering the resources.

    Raises:
        SweepError: If nothing answers at that address.
    """
    import dask
    from distributed import Client, LocalCluster

    if scheduler:
        try:
            _await(scheduler)
            client = Client(scheduler, timeout=PATIENCE, set_as_default=False)
        except (OSError, ValueError, OverflowError, TypeError) as error:  # TypeError: TLS without certificates
            raise SweepError(f"no Dask scheduler answers at {scheduler}: {error}") from None
        with client:
            yield client
        return
    threads = {f"{library}_NUM_THREADS": max(1, cores() // jobs) for library in ("OMP", "MKL", "OPENBLAS")}
    with (
        tempfile.TemporaryDirectory(prefix="everybyte-sweep-", ignore_cleanup_errors=True) as scratch,
        dask.config.set({"distributed.nanny.pre-spawn-environ": threads}),
        LocalCluster(
            n_workers=jobs,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # its port may be another cluster's
            memory_limit=0,  # what needs memory is the kernels, which are processes of their own
            resources=dict(resources),
            local_directory=scratch,
            silence_logs=logging.CRITICAL,
            preload=["import os; os.setpgrp()"],  # Ctrl-C is for this process, which ends them
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _await(address: str) -> None:
    """Waits until something answers there, at most `PATIENCE`: a client that fails takes half a minute to close."""
    host, port = address.rpartition("://")[2].rsplit(":", 1)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def completed(
    function: Callable[..., Any],
    tasks: Mapping[str, tuple[Any, ...]],
    scheduler: str | None,
    jobs: int,
    resources: Mapping[str, float],
) -> Iterator[tuple[str, Any]]:
    """Calls the function once for each task on workers; yields a task's name with what the function returned.

    If workers died with a task as often as the scheduler allows, it is that error. Where a second goes by, a text is
    yielded without a name: what there is to wait for, or nothing.

    Raises:
        SweepError: If no scheduler answers, or it has gone away.
        Exception: What the function raised.
    """
    if not tasks:
        return
    from distributed import KilledWorker

    stamp = time.time_ns()  # a scheduler may remember an earlier sweep
    names = {f"{name}-{stamp}": name for name in tasks}
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _connected(scheduler, jobs, resources) as client:
        futures = [
            client.submit(function, *tasks[name], key=key, resources=dict(resources) or None)
            for key, name in names.items()
        ]
        for future in futures:
            future.add_done_callback(ready.put)
        try:
            missing = len(futures)
            while missing:
                try:
                    future = ready.get(timeout=1)
                except queue.Empty:
                    yield "", "" if client.nthreads() else "no worker is there yet: waiting for one"
                    continue
                missing -= 1
                if future.status not in ("finished", "error"):
                    raise SweepError("the scheduler has gone away: start one, and run the same again")
                error = future.exception()
                if error is not None and not isinstance(error, KilledWorker):
                    raise error
                yield names[future.key], error or future.result()
        finally:
            client.cancel(futures, force=True)
