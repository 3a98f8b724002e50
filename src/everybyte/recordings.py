"""Recordings of the book's cases on GPUs: what a folder of one holds, whether to believe it, and what it says.

A recording is `book/recordings/<gpu>/`: `results.parquet`, a row a case; the timeline of each case that ran,
`<case>.parquet`; and `provenance.json`, which says on what and how. `everybyte record` writes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils._pytree import tree_leaves

from . import gpus
from .caching import MIN_BLOCK, SMALL_SEGMENT
from .cases import cases
from .timeline import WORKSPACE, Timeline
from .units import format_bytes

FOLDER: Final = Path(__file__).parents[2] / "book" / "recordings"
RESULTS, PROVENANCE = "results.parquet", "provenance.json"

COMPARED: Final = ("requested", "rounded", "allocated", "reserved", "workspace")
"""Quantities that are both predicted and recorded; peaks, but for the last."""

BESIDE: Final = ("context", "driver", "nvml", "before")
STATUS: Final = ("recorded", "out of memory", "skipped", "failed")
RAN: Final = STATUS[:2]  # in which case there is a timeline

SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("case", "what", "status", "reason")),
        *((f"predicted_{name}", pa.int64()) for name in COMPARED),
        *((f"recorded_{name}", pa.int64()) for name in (*COMPARED, *BESIDE)),
        *((f"seconds_{name}", pa.float64()) for name in ("traced", "measured")),
    ]
)
"""The columns of the table of results. Bytes, as `everybyte.measure_cuda.Figures` names them; null where not known."""

KEYS: Final[Mapping[str, type]] = {
    **dict.fromkeys(("gpu", "driver", "cuda", "torch", "python", "commit", "date", "allocator"), str),
    "total": int,
    "capability": list,
    "settings": dict,
    "files": dict,
}
"""What `provenance.json` says, and in which type; `files` has the SHA-256 of each file."""


_MOST_BYTES, _MOST_ROWS, _LONGEST_TEXT = 2**20, 1000, 1000
_FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)  # nothing here is older
_OF_A_DRIVER: Final = re.compile(r"[A-Za-z0-9 ./()_-]+")  # a GPU's name; pages show it
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?|unknown, copied tree")


@dataclass(frozen=True)
class Recording:
    """A recording that has been read.

    Attributes:
        folder: Where it lies.
        provenance: What `KEYS` lists.
        results: The table of `SCHEMA`.
    """

    folder: Path
    provenance: Mapping[str, Any]
    results: pa.Table

    @cached_property
    def gpu(self) -> str:
        return self.provenance["gpu"]

    def rows(self) -> list[dict[str, Any]]:
        return self.results.to_pylist()

    def frame(self) -> pd.DataFrame:
        """For each case that ran, and each quantity, what was predicted and recorded, and their difference.

        A frame with columns `predicted`, `recorded` and `difference`, predicted less recorded, indexed by `case` and
        `quantity`; those that only a GPU can say have no prediction.
        """
        rows = [
            (row["case"], name, row.get(f"predicted_{name}"), row[f"recorded_{name}"])
            for row in self.rows()
            for name in (*COMPARED, *BESIDE)
            if row[f"recorded_{name}"] is not None
        ]
        table = pd.DataFrame(rows, columns=["case", "quantity", "predicted", "recorded"]).astype(
            {"predicted": "Int64", "recorded": "Int64"}
        )
        return table.assign(difference=table["predicted"] - table["recorded"]).set_index(["case", "quantity"])


def read(folder: str | Path) -> Recording:
    """Reads a recording.

    Raises:
        ValueError: If a file of it is missing or is not what its name says.
    """
    folder = Path(folder)
    for name in (PROVENANCE, RESULTS):
        if not _is_plain(folder / name):
            raise ValueError(f"{folder} is no recording: {name} is missing")
        if (folder / name).stat().st_size > _MOST_BYTES:
            raise ValueError(f"{folder} is no recording: {name} has more than {_MOST_BYTES:,} B")
    try:
        text = (folder / PROVENANCE).read_text(encoding="utf-8")
        provenance = json.loads(text, object_pairs_hook=_each_once)
        if pq.read_metadata(folder / RESULTS).num_rows > _MOST_ROWS:
            raise ValueError(f"{RESULTS} has more than {_MOST_ROWS} rows")
        results = pq.read_table(folder / RESULTS)
    except (OSError, ValueError, RecursionError) as error:  # those of arrow, JSON and UTF-8 are ValueErrors
        raise ValueError(f"{folder} is no recording: {error}") from None
    if not isinstance(provenance, dict):
        raise ValueError(f"{folder} is no recording: {PROVENANCE} holds no object")
    return Recording(folder, provenance, results)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{PROVENANCE} says one thing twice, among {', '.join(sorted(key for key, _ in pairs))[:200]}")
    return dict(pairs)


def stored(folder: str | Path | None = None) -> list[Recording]:
    """The recordings of a folder, by name of their GPU; the book's unless one is given."""
    return [read(path.parent) for path in sorted(Path(folder or FOLDER).glob(f"*/{PROVENANCE}"))]


def recorded(case: str, folder: str | Path | None = None) -> str:
    """What recordings say of a case, in a sentence for a page each; that no GPU has run it, where there is none.

    Raises:
        ValueError: If there is no such case.
    """
    said = []
    for recording, row in _of(case, folder):
        off = row["predicted_requested"] - row["recorded_requested"]
        traced = f"the trace has {abs(off):,} B {'more' if off > 0 else 'fewer'}" if off else "as traced"
        said.append(
            f"On {recording.gpu}, {recording.provenance['date'][:10]}: {format_bytes(row['recorded_requested'])} "
            f"requested at the peak, {traced}; {format_bytes(row['recorded_allocated'])} allocated."
        )
    return " ".join(said) or "No GPU has run it yet."


def peaks(case: str, folder: str | Path | None = None) -> dict[str, dict[str, int]]:
    """The bytes that a case asks for at its peak, `traced` and `recorded`, by GPU: rows for `report.ledger`.

    Raises:
        ValueError: If there is no such case.
    """
    kinds = {"traced": "predicted_requested", "recorded": "recorded_requested"}
    return {recording.gpu: {kind: row[n] for kind, n in kinds.items()} for recording, row in _of(case, folder)}


def _of(case: str, folder: str | Path | None) -> Iterator[tuple[Recording, dict[str, Any]]]:
    if case not in cases():
        raise ValueError(f"no case {case!r}; there are {', '.join(cases())}")
    for recording in stored(folder):
        yield from ((recording, row) for row in recording.rows() if (row["case"], row["status"]) == (case, "recorded"))


# -- whether to believe one --------------------------------------------------------------------------------------------


def faults(folder: str | Path) -> list[str]:
    """What speaks against a recording, a line each; none if nothing does."""
    try:
        recording = read(folder)
    except ValueError as error:
        return [str(error)]
    found = list(_in_provenance(recording))
    if recording.results.schema.remove_metadata() != SCHEMA:
        wrong = [f for f in SCHEMA if f not in list(recording.results.schema)] or list(recording.results.schema)[:1]
        return [*found, f"{RESULTS}: its columns are not those of a table of results; look at {wrong[0]}"]
    rows = recording.rows()
    cases_of = Counter(row["case"] for row in rows)
    found += [f"{RESULTS}: case {name!r} is there {count} times" for name, count in cases_of.items() if count > 1]
    if not rows:
        found.append(f"{RESULTS}: no case")
    ran = {f"{row['case']}.parquet" for row in rows if row["status"] in RAN}
    for path in sorted(recording.folder.glob("*.parquet")):
        if path.name not in {RESULTS, *ran}:
            found.append(f"{path.name}: the timeline of no case that ran")
    for row in rows:
        found += [f"{row['case']}: {fault}" for fault in _in_row(row, recording)]
    return found


def _in_provenance(recording: Recording) -> Iterator[str]:
    known = recording.provenance
    for key, kind in KEYS.items():
        if not isinstance(known.get(key), kind) or known[key] in ("", []):
            yield f"{PROVENANCE}: {key!r} is missing, or no {kind.__name__}"
    if not all(_is_text(text) for text in tree_leaves(known) if isinstance(text, str)):
        yield f"{PROVENANCE}: a text has control characters, or more than {_LONGEST_TEXT:,}"
    if not _COMMIT.fullmatch(str(known.get("commit"))):
        yield f"{PROVENANCE}: {str(known.get('commit'))[:60]!r} is no commit"
    if not isinstance(known.get("date"), str) or not isinstance(known.get("gpu"), str):
        return
    try:
        date = datetime.fromisoformat(known["date"])
        if date.tzinfo is None:
            yield f"{PROVENANCE}: the date {known['date']} has no time zone"
        elif not _FIRST < date < datetime.now(UTC):
            yield f"{PROVENANCE}: the date {known['date']} lies in the future, or before {_FIRST:%Y}"
    except ValueError:
        yield f"{PROVENANCE}: {known['date']!r} is no date as ISO 8601 writes it"
    try:
        if not _OF_A_DRIVER.fullmatch(known["gpu"]):
            raise ValueError
        gpu = gpus.find(known["gpu"])
    except ValueError:
        yield f"{PROVENANCE}: no GPU {known['gpu']!r} is known; add its row to src/everybyte/gpus.csv"
    else:
        # Drivers report a little more or less of the same memory; a slice of a GPU is less than half of it.
        if isinstance(known.get("total"), int) and not 9 * gpu.total < 10 * known["total"] < 11 * gpu.total:
            yield f"{PROVENANCE}: {gpu.name} has {gpu.total:,} B of memory, not {known['total']:,}"[:300]
        if known.get("capability") != list(gpu.capability):
            yield f"{PROVENANCE}: {gpu.name} is of capability {list(gpu.capability)}, not {known.get('capability')}"
        if recording.folder.resolve().name != gpu.key:
            yield f"the folder of {gpu.name} is called {gpu.key}"
    listed = known.get("files") if isinstance(known.get("files"), dict) else {}
    there = {path.name: path for path in recording.folder.iterdir() if path.name != PROVENANCE}
    for name in sorted(there.keys() | listed.keys()):
        if name not in listed or name not in there:
            yield f"{name}: {'not listed in ' + PROVENANCE if name in there else 'listed, but not there'}"
        elif not _is_plain(there[name]) or hashlib.sha256(there[name].read_bytes()).hexdigest() != listed[name]:
            yield f"{name}: not the file that {PROVENANCE} lists"


def _is_text(text: str) -> bool:
    return text.isprintable() and len(text) <= _LONGEST_TEXT


def _in_row(row: Mapping[str, Any], recording: Recording) -> Iterator[str]:
    if row["case"] not in cases():
        yield "no case of the book"
        return
    if row["status"] not in STATUS:
        yield f"status {row['status']!r} is none of {', '.join(STATUS)}"
        return
    if not all(_is_text(row[name] or "") for name in ("what", "reason")):
        yield f"a text has control characters, or more than {_LONGEST_TEXT:,}"
    numbers = {name: n for name, n in row.items() if name.startswith(("predicted_", "recorded_", "seconds_"))}
    known = {name: n for name, n in numbers.items() if n is not None}
    for name, n in known.items():
        if not 0 <= n < (24 * 3600 if name.startswith("seconds_") else 2**63):
            yield f"{name} is {n}"
    for kind in ("predicted_", "recorded_"):
        figures = {name.removeprefix(kind): n for name, n in known.items() if name.startswith(kind)}
        yield from _in_figures(figures, kind, recording)
    if row["status"] != "recorded" and not row["reason"]:
        yield f"{row['status']}, and no reason given"
    if row["status"] not in RAN:
        recorded = [name for name in known if name.startswith("recorded_")]
        if recorded:
            yield f"{row['status']}, and yet {', '.join(recorded)}"
        return
    missing = [name for name in numbers if name not in known and name != "recorded_nvml"]
    if missing:
        yield f"{row['status']}, but without {', '.join(missing)}"
        return
    path = recording.folder / f"{row['case']}.parquet"
    try:
        yield from _in_timeline(Timeline.from_parquet(path), row, recording)
    except (ValueError, OSError, OverflowError) as error:
        yield f"its timeline cannot be read: {error}"


def _in_figures(n: Mapping[str, int], kind: str, recording: Recording) -> Iterator[str]:
    total = recording.provenance.get("total") if kind == "recorded_" else None
    for less, more in (
        ("requested", "rounded"),
        ("rounded", "allocated"),
        ("workspace", "allocated"),
        ("before", "allocated"),
        ("allocated", "reserved"),
        ("context", "driver"),
    ):
        if n.get(less, 0) > n.get(more, 2**63):
            yield f"{kind}{less} {n[less]:,} B is more than {more} {n[more]:,} B"
    for name, unit in (("rounded", MIN_BLOCK), ("allocated", MIN_BLOCK), ("reserved", SMALL_SEGMENT)):
        if n.get(name, 0) % unit:
            yield f"{kind}{name} {n[name]:,} B is no multiple of {unit:,} B"
    for name in ("reserved", "driver", "nvml"):
        if name in n and isinstance(total, int) and n[name] > total:
            yield f"{kind}{name} {n[name]:,} B is more than the GPU's {total:,} B"[:300]


def _in_timeline(timeline: Timeline, row: Mapping[str, Any], recording: Recording) -> Iterator[str]:
    info = timeline.info
    if info.get("evidence") != "recorded" or not str(info.get("device", "")).startswith("cuda"):
        yield f"its timeline is {info.get('evidence')} on {info.get('device')}, not recorded on a GPU"
    if info.get("gpu") != recording.provenance.get("gpu"):
        yield f"its timeline is of {info.get('gpu')}"
    frame = timeline.frame()
    made = frame[frame["action"] == "alloc"].set_index("storage")["nbytes"]
    freed = frame[frame["action"] == "free"].set_index("storage")["nbytes"]
    if made.index.has_duplicates or freed.index.has_duplicates or not freed.index.isin(made.index).all():
        yield "its timeline frees what it never allocated, or twice"
        return
    if not (made.reindex(freed.index).to_numpy() == freed.to_numpy()).all() or timeline.live_bytes.min(initial=0) < 0:
        yield "its timeline frees other sizes than it allocated, or before it did"
        return
    tensors = timeline.without(WORKSPACE)
    held = frame[(frame["category"] == WORKSPACE) & np.asarray(frame["action"] == "alloc")]["nbytes"].sum()
    for name, n in (
        ("requested", tensors.peak_bytes),
        ("rounded", tensors.rounded(MIN_BLOCK).peak_bytes),
        ("workspace", int(held)),
    ):
        if row[f"recorded_{name}"] != n:
            yield f"{name} is {row[f'recorded_{name}']:,} B, but {n:,} B in its timeline"
    figures = info.get("figures") if isinstance(info.get("figures"), dict) else {}
    for name in (*BESIDE, "allocated", "reserved"):
        if figures.get(name) != row[f"recorded_{name}"]:
            yield f"{name} is {row[f'recorded_{name}']} B, but {figures.get(name)} B in its timeline"
