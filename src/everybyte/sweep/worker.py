"""What a Dask worker does: it executes the notebook once, and stores the result."""

from __future__ import annotations

import errno
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .folder import DONE, FAILED, Folder, as_json, digest
from .glued import glued, text
from .grid import Value

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
ENVIRONMENT: Final = {  # of the kernels: this environment's own, without a remark of the debugger's
    "JUPYTER_PREFER_ENV_PATH": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
_DIE_WITH_PARENT: Final = (  # PR_SET_PDEATHSIG, SIGKILL
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


def execute(
    out: str, name: str, values: Mapping[str, Value], kernel: str, home: str, stale: str = ""
) -> dict[str, Any]:
    """Executes the notebook with some values and stores the result, unless one is there by now.

    The combination's lock is held from before the first cell until the result is in place.

    Args:
        out: The sweep's folder.
        name: The combination's.
        values: Of its parameters.
        kernel: The Jupyter kernel's name.
        home: The folder to run in.
        stale: Digest of a result to replace; any other that is there stays, and is returned.

    Raises:
        OSError: The result could not be stored.
    """
    import nbformat
    import papermill

    folder = Folder(Path(out))
    os.environ.update(ENVIRONMENT)
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # the result says what went wrong
    with folder.lock(name) as live:
        result, _ = folder.result(name)
        if result and digest(as_json(result)) != stale:
            return result
        live.write_bytes((folder.path / "notebook.ipynb").read_bytes())
        started, clock, error = datetime.now(UTC), time.perf_counter(), None
        try:
            papermill.execute_notebook(
                nbformat.read(live, as_version=4),
                str(live).replace("{", "{{").replace("}", "}}"),  # papermill takes it for a format
                parameters=dict(values),
                kernel_name=kernel,
                progress_bar=False,
                resources={"metadata": {"path": home}},  # and not cwd, which is the whole process's
                kernel_manager_class=_mortal(),
                shutdown_kernel="immediate",  # what ends after its last cell and before it is stored runs again
            )
        except papermill.PapermillExecutionError as failed:
            error = f"{failed.ename}: {failed.evalue} (cell {failed.exec_count})"
        except Exception as failed:  # a kernel that died or did not start
            if isinstance(failed, OSError) and failed.errno in NO_ROOM:
                raise
            error = f"{type(failed).__name__}: {failed}"
        executed, kept = live.read_bytes(), f"notebooks/{name}.ipynb"
        result = outcome(
            values,
            error,
            seconds=round(time.perf_counter() - clock, 3),
            started=started.isoformat(timespec="milliseconds"),
            host=platform.node(),
            notebook=kept,
            notebook_sha256=digest(executed),
            glued=glued(nbformat.reads(executed.decode(), as_version=4)),
        )
        folder.write(kept, executed)
        folder.store(name, result)
        live.unlink()
        return result


def outcome(values: Mapping[str, Value], error: str | None, **known: Any) -> dict[str, Any]:
    """A result, what is stored of one run; `known` may be its time, its place, its notebook and what that glued."""
    return {
        "parameters": dict(values),
        "status": FAILED if error else DONE,
        "error": error and " ".join(text(error).split()),
        **dict.fromkeys(("seconds", "started", "host", "notebook", "notebook_sha256")),
        "glued": {},
        **known,
    }


def _mortal() -> type:
    """A kernel manager whose kernels die with the worker: no notebook goes on, unwatched, to its end."""
    from jupyter_client import AsyncKernelManager

    class Mortal(AsyncKernelManager):
        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            command = super().format_kernel_cmd(extra_arguments)
            if "ipykernel" in " ".join(command):
                command.append("--log-level=50")  # it warns of its own transport at each start
            if sys.platform != "linux":  # elsewhere it looks once a second whether its parent lives
                return command
            return [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, *command]

    return Mortal
