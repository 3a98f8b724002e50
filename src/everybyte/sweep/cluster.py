"""Dask: where the runs of a sweep go, and how they come back."""

from __future__ import annotations

import logging
import os
import queue
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from operator import methodcaller
from typing import Any, Final
from unittest import mock

from .grid import SweepError

PATIENCE = 10.0  # seconds, for a scheduler
_PRELOAD: Final = "import os; os.setpgrp()  # Ctrl-C is for the process that ends this one"


@contextmanager
def _connected(scheduler: str | None, jobs: int, resources: Mapping[str, float]) -> Iterator[Any]:
    """A client of the scheduler at an address, or of one here with `jobs` processes, each offering the resources.

    Raises:
        SweepError: If nothing answers at that address, or no worker starts here.
    """
    import dask
    from distributed import Client, LocalCluster
    from distributed.utils import silence_logging_cmgr

    if scheduler:
        with silence_logging_cmgr(logging.CRITICAL):
            try:
                _await(scheduler)
                client = Client(scheduler, timeout=PATIENCE, set_as_default=False)
            except (OSError, ValueError, OverflowError, TypeError) as error:  # TypeError: TLS without certificates
                raise SweepError(f"no Dask scheduler answers at {scheduler}: {error}") from None
            with client:
                yield client
        return
    threads = {f"{library}_NUM_THREADS": max(1, cores() // jobs) for library in ("OMP", "MKL", "OPENBLAS")}
    with ExitStack() as stack:
        # Workers need not run the script that calls this, which may not stand under `if __name__ == "__main__"`.
        stack.enter_context(mock.patch.multiple("__main__", __spec__=None, __file__=None, create=True))
        scratch = tempfile.TemporaryDirectory(prefix="everybyte-sweep-", ignore_cleanup_errors=True)
        stack.enter_context(dask.config.set({"distributed.nanny.pre-spawn-environ": threads}))
        try:
            cluster = LocalCluster(
                n_workers=jobs,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # its port may be another cluster's
                memory_limit=0,  # what needs memory is the kernels, which are processes of their own
                resources=dict(resources),
                local_directory=stack.enter_context(scratch),
                silence_logs=logging.CRITICAL,
                preload=[_PRELOAD],
            )
        except RuntimeError:
            few = "are there too few processes, open files or bytes of memory left?"
            raise SweepError(f"no worker starts here: {few} --jobs 1 takes the least") from None
        yield stack.enter_context(Client(stack.enter_context(cluster), set_as_default=False))


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
    """Calls the function once for each task on workers; yields a task's name and what the function returned, or raised.

    If workers died with a task as often as the scheduler allows, it is distributed's `KilledWorker`. Where a second
    goes by, a text is yielded without a name: what there is to wait for if that is new, or nothing.

    Raises:
        SweepError: If no scheduler answers, or it has gone away.
    """
    if not tasks:
        return
    from toolz import compose

    stamp = time.time_ns()  # a scheduler may remember an earlier sweep
    names = {f"{name}-{stamp}": name for name in tasks}
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _connected(scheduler, jobs, resources) as client:
        # By name, so that a scheduler needs nothing of this library, and a worker without it says so.
        futures = [
            client.submit(
                compose(methodcaller(function.__name__, *tasks[name]), import_module),
                function.__module__,
                key=key,
                resources=dict(resources) or None,
                priority=-place,
            )
            for place, (key, name) in enumerate(names.items())
        ]
        for future in futures:
            future.add_done_callback(ready.put)
        try:
            missing, said = len(futures), ""
            while missing:
                try:
                    future = ready.get(timeout=1)
                except queue.Empty:
                    before, said = said, _awaited(client, resources)
                    yield "", said * (said != before)
                    continue
                missing -= 1
                if future.status not in ("finished", "error"):
                    raise ConnectionError
                yield names[future.key], future.exception() or future.result()
        except OSError:
            raise SweepError("the scheduler has gone away: start one, and run the same again") from None
        finally:
            client.cancel(futures, force=True)


def _awaited(client: Any, resources: Mapping[str, float]) -> str:
    """What there is to wait for, or nothing if a worker offers what is asked of one."""
    workers = client.sync(client.scheduler.identity)["workers"].values()
    if not workers:
        return "no worker is there: waiting for one"
    if any(all(worker["resources"].get(name, 0) >= n for name, n in resources.items()) for worker in workers):
        return ""
    offers = Counter(_offer(worker["resources"]) or "none" for worker in workers)
    there = "; ".join(f"{count} with {offer}" for offer, count in offers.items())
    return f"no worker offers {_offer(resources)} (there: {there}): waiting for one that does"


def _offer(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={n:g}" for name, n in sorted(resources.items()))
