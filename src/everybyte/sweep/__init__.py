"""A notebook run over a grid of parameters by papermill, on Dask: on this machine's cores, or on a cluster.

`run` runs it, and goes on where an earlier call was stopped, in whatever way: nothing finished is lost, and nothing is
finished twice. `collect` gives the results as a table. `folder` says what is stored, `worker` what one run does.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pandas as pd

from . import cluster
from .folder import DONE, FAILED, Folder, as_json, digest
from .grid import SweepError, Value, Values, combinations, parameters, shown, storable
from .worker import ENVIRONMENT, execute, outcome

__all__ = ["Interrupted", "Outcome", "SweepError", "collect", "run"]

_A_CORE: Final = 8  # jobs; each has a kernel, whose memory soon counts more than its time
_ADDRESS: Final = re.compile(r"(\w+://)?[^/\s]+:\d+")

Watch = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What has become of the combinations asked for."""

    out: Path
    combinations: int
    ran: int  # now, failed ones included; the others were stored before
    errors: Mapping[str, str]  # of those that failed, by combination
    damaged: Sequence[str]  # stored results that were damaged, and were made anew

    @property
    def done(self) -> int:
        """Combinations that have a result."""
        return self.combinations - len(self.errors)


class Interrupted(KeyboardInterrupt):
    """The sweep was stopped by Ctrl-C. What was finished is stored."""


def run(
    notebook: str | Path,
    grid: Mapping[str, Values],
    *,
    out: str | Path,
    zipped: bool = False,
    append: bool = False,
    retry_failed: bool = False,
    jobs: int | None = None,
    scheduler: str | None = None,
    resources: Mapping[str, float] | None = None,
    kernel: str | None = None,
    watch: Watch = lambda finished, of, line: None,
) -> Outcome:
    """Runs the notebook once for each combination that has no result in `out` yet.

    Args:
        notebook: An .ipynb with a cell tagged `parameters`. It runs in its own folder, and is not written to.
        grid: Values by parameter, as `grid.Parameter.values` takes them. The others keep their defaults.
        out: The folder of the results. It may hold earlier results of the same sweep, which are kept.
        zipped: Combine the first values, then the second ones, ..., instead of each with each.
        append: Let the combinations join other ones of the same notebook that `out` holds.
        retry_failed: Run those again that failed.
        jobs: How many run at a time on this machine; half as many as there are cores unless given.
        scheduler: Address of a Dask scheduler to run on instead. Its workers must see `out` and the notebook's folder
            under the same paths.
        resources: What a worker must offer to run one, as in `dask worker --resources GPU=1`.
        kernel: A Jupyter kernel in place of the one that the notebook names.
        watch: Called about once a second with how many combinations are finished, of how many, and a line to show,
            empty where there is no news.

    Raises:
        SweepError: The sweep cannot be run as asked, or not to its end. What was finished is stored.
        Interrupted: Ctrl-C. What was finished is stored.
    """
    for where in (notebook, out):
        if not storable(str(where)):
            raise SweepError(f"{str(where)!a} cannot be a path here: name it in Unicode")
    source, path = _read(Path(notebook)), Path(notebook).resolve()
    known = parameters(source, path.name)
    asked = combinations(known, grid, zipped=zipped)
    most = _A_CORE * cluster.cores()
    if jobs is not None and not 1 <= jobs <= most:
        raise SweepError(f"jobs is {jobs:,}: from one to {most}, {_A_CORE} a core, run at a time here")
    if jobs is not None and scheduler:
        raise SweepError("jobs is for this machine: a scheduler has workers of its own")
    if scheduler is not None and not _ADDRESS.fullmatch(scheduler):
        raise SweepError(f"{scheduler!r} is no scheduler's address: write it as tcp://host:8786")
    folder = Folder(Path(out).resolve())
    try:
        kernel = _kernel(kernel or source.metadata.kernelspec.name)
        with folder.claimed():
            names = folder.admit(source, path.name, known, asked, append)
            results, stale, damaged = _stored(folder, names, retry_failed)
            tasks = {
                name: (str(folder.path), name, values, kernel, str(path.parent), stale.get(name, ""))
                for name, values in names.items()
                if name not in results
            }
            labels = {name: shown(values) for name, values in zip(names, asked, strict=True)}
            plural = "s" * (len(names) > 1)
            watch(len(results), len(names), f"{len(names):,} combination{plural}, {len(tasks):,} to run")
            for why in damaged:
                watch(len(results), len(names), f"{why}: its combination runs again")
            try:
                jobs = min(jobs or max(1, cluster.cores() // 2), len(tasks))
                for name, result in cluster.completed(execute, tasks, scheduler, jobs, resources or {}):
                    if isinstance(result, Exception):
                        result = _lost(folder, name, names[name], result)
                    if isinstance(result, dict):
                        results[name] = result
                        result = _line(labels[name], result)
                    watch(len(results), len(names), result)
            finally:
                if (folder.path / "results").exists():  # some may be stored that were not yet heard of
                    folder.write_table()
            shutil.rmtree(folder.path / "running", ignore_errors=True)
            failed = {labels[name]: results[name]["error"] for name in names if results[name]["status"] == FAILED}
            return Outcome(folder.path, len(names), len(tasks), failed, damaged)
    except KeyboardInterrupt:
        raise Interrupted("what was finished is stored, and the same again goes on from there") from None
    except OSError as error:
        raise SweepError(f"{error.filename or folder.path}: {error.strerror or error}") from None


def _stored(
    folder: Folder, names: Iterable[str], retry_failed: bool
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Results to keep, the digests of those to replace, and what is wrong with others that are there."""
    results, stale, damaged = {}, {}, []
    for name in names:
        result, why = folder.result(name)
        if why:
            damaged.append(why)
        elif result and retry_failed and result["status"] == FAILED:
            stale[name] = digest(as_json(result))
        elif result:
            results[name] = result
    return results, stale, damaged


def _line(label: str, result: Mapping[str, Any]) -> str:
    return f"{label}: done in {result['seconds']:.1f} s" if result["status"] == DONE else f"{label}: {result['error']}"


def _lost(folder: Folder, name: str, values: Mapping[str, Value], error: Any) -> dict[str, Any]:
    """Stores, and returns, the result of a combination with which workers died; any other error ends the sweep."""
    if not hasattr(error, "allowed_failures"):
        said = " ".join(str(error).split())
        why = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else said
        raise SweepError(f"a worker cannot go on ({type(error).__name__}: {why}): mend that, and run the same again")
    result = outcome(values, f"its worker died {error.allowed_failures + 1} times: is there too little memory?")
    folder.store(name, result)
    return result


def collect(out: str | Path) -> pd.DataFrame:
    """The results in a folder as a table: a row a combination, in the order in which they were asked for.

    Its columns are the notebook's parameters, then `run.status` ("done" or "failed"), `run.error`, `run.seconds` and
    `run.notebook`, then what the notebook glued. A glued column is of whole numbers if all its values are, as
    `eb.format_bytes` writes them too ("1,024 B (1.024 KB, 1.000 KiB)" is 1024); of numbers if all are; else of text.

    Raises:
        SweepError: If it holds no sweep.
    """
    return Folder(Path(out)).table()


def _read(path: Path) -> Any:
    """The notebook, without outputs, and of a kernel where it names none."""
    try:
        import dask  # noqa: F401
        import distributed  # noqa: F401
        import nbformat
        import papermill  # noqa: F401
    except ImportError as error:
        raise SweepError(f"a sweep needs {error.name}: pip install 'everybyte[sweep]'") from None
    if path.suffix != ".ipynb":
        other = path.parent / f"{path.stem}.ipynb"
        raise SweepError(f"{path} is no notebook: name an .ipynb{f', such as {other}' * other.exists()}")
    try:
        notebook = nbformat.from_dict(nbformat.read(path, as_version=4))
        nbformat.validate(notebook)
    except OSError as error:
        raise SweepError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # of several libraries
        raise SweepError(f"{path} is no notebook: {' '.join(str(error).split())[:200]}") from None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    spec = notebook.metadata.get("kernelspec", {})
    language = notebook.metadata.get("language_info", {}).get("name") or spec.get("language") or "python"
    if language.lower() != "python":
        raise SweepError(f"{path} is in {language}: a sweep reads the parameters of notebooks in Python")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"} | spec
    return notebook


def _kernel(name: str) -> str:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    with mock.patch.dict(os.environ, ENVIRONMENT):
        try:
            KernelSpecManager().get_kernel_spec(name)
        except NoSuchKernel:
            there = ", ".join(KernelSpecManager().find_kernel_specs()) or "none; install ipykernel"
            raise SweepError(f"there is no Jupyter kernel {name!r} to run with; there is {there}") from None
    return name
