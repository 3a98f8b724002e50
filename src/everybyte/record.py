"""`everybyte record`: the book's cases on this machine's GPU, each predicted by a trace before it is measured.

Each case is a process of its own, forked before anything has touched CUDA: so each has its own context and workspaces,
an allocator without a past, and an end that takes no other with it, for the second or two that a context takes.

    PYTHONPATH=src python -m everybyte.record --out DIR [--only CASE] [--tgz]
    PYTHONPATH=src python -m everybyte.record --check DIR
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from . import gpus, recordings
from .allocator import Allocator
from .caching import MIN_BLOCK
from .cases import FULL, Case, Sizes, cases
from .measure import measure
from .recordings import PROVENANCE, RESULTS, SCHEMA
from .timeline import WORKSPACE, Timeline
from .trace import trace
from .units import format_bytes

BUDGET: Final = 480  # seconds
LONGEST: Final = 120  # seconds of one case
_OTHER_ALLOCATORS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_SETTINGS: Final = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES")


def check(folder: Path) -> list[str]:
    """What speaks against a recording, or against each of those in a folder.

    Raises:
        ValueError: If there is no such folder, or no recording in it.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if _is_meant(folder):
        return recordings.faults(folder)
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and _is_meant(path)]
    if not found:
        raise ValueError(f"{folder} holds no recording: {PROVENANCE}, {RESULTS} and a timeline for each case")
    return [f"{path.name}: {fault}" for path in found for fault in recordings.faults(path)]


def _is_meant(folder: Path) -> bool:
    """Whether somebody took a folder for a recording, whole or not."""
    return (folder / PROVENANCE).exists() or any(folder.glob("*.parquet"))


def record(
    out: Path,
    only: Iterable[str] | None = None,
    budget: float = BUDGET,
    tgz: bool = False,
    say: Callable[[str], None] = print,
    sizes: Sizes = FULL,
) -> Path:
    """Records the cases and writes the folder.

    Args:
        out: Where the folder, named after the GPU, is put.
        only: Names of cases; all of them, the most telling first, unless given.
        budget: Seconds after which no case is begun.
        tgz: Whether to pack the folder too.
        say: Called with a line for each case.
        sizes: Of the cases.

    Returns:
        The folder.

    Raises:
        ValueError: If PyTorch finds no GPU, there is no such case, or a recording is there already.
        OSError: If the folder cannot be written.
    """
    began, known = time.monotonic(), cases(sizes)
    wanted = [_known(name, known) for name in only or known]
    described = _apart(_describe, LONGEST)
    if "error" in described:
        raise ValueError(described["error"])
    gpu, provenance = gpus.GPU(**described["gpu"]), described["provenance"]
    folder = out / gpu.key
    if folder.is_dir() and _is_meant(folder):
        raise ValueError(f"{folder} holds a recording already: move it, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    rows, longest = [], 0.0
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as scratch:
        whole = Path(scratch) / gpu.key
        whole.mkdir()
        for name in wanted:
            start, path = time.monotonic(), whole / f"{name}.parquet"
            left = budget - (start - began)
            row = {"case": name, "what": known[name].what}
            if left < longest:
                row |= {"status": "skipped", "reason": f"{budget:.0f} s were almost over"}
            else:
                row |= _apart(_case, min(left, LONGEST), known[name], gpu, described["free"], path)
                longest = max(longest, time.monotonic() - start)
            if "error" in row:
                row |= {"status": "failed", "reason": row.pop("error")}
                path.unlink(missing_ok=True)
            rows.append(row)
            say(_line(row, time.monotonic() - began))
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), whole / RESULTS)
            files = {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(whole.glob("*.parquet"))
            }
            settings = {"budget": budget, "only": list(only or []), **provenance["settings"]}
            document = {**provenance, "settings": settings, "files": files}
            (whole / PROVENANCE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            _publish(whole, folder)  # each time: what has been recorded is there, whatever ends this
        if tgz:
            with tarfile.open(whole.with_name("tgz"), "w:gz") as archive:
                archive.add(folder, arcname=gpu.key)
            whole.with_name("tgz").replace(out / f"{gpu.key}.tgz")
    return folder


def _publish(whole: Path, folder: Path) -> None:
    """Puts a copy of a folder in place of another: at any moment the old one is there, or the new one, or none."""
    new, old = whole.with_name("new"), whole.with_name("old")
    shutil.copytree(whole, new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _known(name: str, known: Mapping[str, Case]) -> str:
    if name not in known:
        raise ValueError(f"no case {name!r}; there are {', '.join(known)}")
    return name


def _line(row: Mapping[str, Any], seconds: float) -> str:
    peak, predicted = row.get("recorded_requested"), row.get("predicted_requested")
    said = row.get("reason") or f"{format_bytes(peak)} asked for, {predicted - peak:+,} B from it to the trace"
    return f"{seconds:6.1f} s  {row['case']}: {row['status']}: {said}"


# -- a process for each case -------------------------------------------------------------------------------------------


def _apart(work: Callable[..., dict[str, Any]], limit: float, *args: Any) -> dict[str, Any]:
    """What some work returns in a process of its own; {"error": …} if it raises, dies, or is not done in time."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work, args))
    try:
        process.start()
        there.close()
        answer = here.recv() if here.poll(limit) else {"error": f"not done in {limit:.0f} s"}
    except EOFError:
        process.join()
        answer = {"error": f"its process died, exit code {process.exitcode}"}
    finally:
        if process.pid:
            process.kill()
            process.join()
    return answer


def _send(to: Connection, work: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    try:
        to.send(work(*args))
    except Exception as error:
        to.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})


def _describe() -> dict[str, Any]:
    """The GPU of this process, as `GPU` and for `provenance.json`."""
    with warnings.catch_warnings(record=True) as said:  # of a driver that is too old, for one
        available = torch.cuda.is_available()
    if not available:
        why = f" ({' '.join(str(said[0].message).split())[:300]})" if said else ""
        return {"error": f"PyTorch finds no GPU here{why}: record on a machine with one; `everybyte trace` needs none"}
    if torch.version.hip:
        return {"error": "this is an AMD GPU: the book's rules are those of NVIDIA's kernels, record on one of theirs"}
    other = [name for name in _OTHER_ALLOCATORS if os.environ.get(name)]
    if other:
        return {"error": f"{other[0]} is set: unset it; the cases are predicted for the allocator as it is by default"}
    try:
        torch.ones(1, device=torch.device("cuda")).add_(
            1
        )  # the first kernel: is this PyTorch made for this GPU, and is it free?
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {"error": f"this PyTorch runs nothing on {torch.cuda.get_device_name(0)}: {str(error).splitlines()[0]}"}
    properties, name = torch.cuda.get_device_properties(0), torch.cuda.get_device_name(0)
    try:
        key = gpus.find(name).key
    except ValueError:
        key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    gpu = {
        "key": key,
        "name": name,
        "total": properties.total_memory,
        "capability": (properties.major, properties.minor),
        "processors": properties.multi_processor_count,
        "l2": properties.L2_cache_size,
        "source": "this machine",
        "context": (0, 0),
    }
    provenance = {
        "gpu": name,
        "total": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "allocator": torch.cuda.get_allocator_backend(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }
    return {"gpu": gpu, "provenance": provenance, "free": torch.cuda.mem_get_info(0)[0]}


def _driver() -> str:
    command = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # another repository may lie around a copied tree
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown, copied tree"


def _case(case: Case, gpu: gpus.GPU, free: int, path: Path) -> dict[str, Any]:
    """Traces a case, and measures it if it fits; writes its timeline to a path and returns its row."""
    row, seconds = predict(case, gpu)
    row["seconds_traced"] = seconds
    if row["predicted_allocated"] > free:
        reason = f"predicted {row['predicted_allocated']:,} B allocated, {free:,} B are free"
        return {**row, "status": "skipped", "reason": reason}
    start = time.perf_counter()
    with measure(device="cuda") as run:
        case.body(run)
    row["seconds_measured"] = time.perf_counter() - start
    timeline = run.timeline
    Timeline(timeline.table, {**timeline.info, "evidence": "recorded"}).to_parquet(path)
    tensors = timeline.without(WORKSPACE)
    figures = {f"recorded_{key}": value for key, value in timeline.info["figures"].items()}
    row |= {**figures, "recorded_rounded": tensors.rounded(MIN_BLOCK).peak_bytes}
    if run.out_of_memory:
        return {**row, "status": "out of memory", "reason": str(run.out_of_memory)}
    return {**row, "status": "recorded", "reason": ""}


def predict(case: Case, gpu: gpus.GPU) -> tuple[dict[str, int], float]:
    """What a trace says of a case, as the columns `predicted_…`, and how many seconds it took."""
    start = time.perf_counter()
    with trace(rules="cuda", gpu=gpu) as run:
        case.body(run)
    timeline = run.timeline
    replay = Allocator().replay(timeline.with_workspaces())
    row = {
        "predicted_requested": timeline.peak_bytes,
        "predicted_rounded": timeline.rounded(MIN_BLOCK).peak_bytes,
        "predicted_allocated": replay.peak_allocated,
        "predicted_reserved": replay.peak_reserved,
        "predicted_workspace": sum(taken.nbytes for taken in run.workspaces),
    }
    return row, time.perf_counter() - start


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["record", *sys.argv[1:]]))
