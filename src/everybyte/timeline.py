"""The stream of allocations of a run: the one thing that tracing, measuring and reading a recording produce.

A `Timeline` is a table with a row for each allocation and each release, in the order in which they happened. Every
figure and table in the book is a question put to it. Three peaks are never mixed: *requested* (`peak_bytes`, the sum of
the bytes asked for), *rounded* (`rounded(512).peak_bytes`), and *allocated* (whole allocator blocks).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .units import round_up

if TYPE_CHECKING:
    from .allocator import Allocator

CATEGORIES: Final = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "input",
    "scratch",
)
"""What a storage is for. *Scratch* is made inside a kernel and released before it returns; `op` names the kernel."""

WORKSPACE: Final = "workspace"
"""The category of what `Timeline.with_workspaces` puts in, which is no tensor's."""

PHASES: Final = ("forward", "backward", "optimizer", "other")

_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA: Final = pa.schema(
    [
        ("step", pa.int32()),  # -1 before the loop over steps
        ("phase", _TEXT),
        ("action", _TEXT),  # alloc | free
        ("storage", pa.int64()),  # never reused within a timeline
        ("nbytes", pa.int64()),  # requested, positive for both actions
        ("device", _TEXT),
        ("stream", pa.int32()),
        ("op", _TEXT),
        ("module", _TEXT),
        ("category", _TEXT),
        ("shape", _TEXT),  # "[8, 50, 256]"
        ("dtype", _TEXT),
        ("line", _TEXT),  # file:line outside of PyTorch that asked; in backward, of the forward pass
        ("own", _TEXT),  # file:line of the user's own code that led there, the same where it is that
    ]
)


class Timeline:
    """Allocations and releases of a run, in order.

        >>> with eb.trace() as run:
        ...     x = torch.ones(1_000)
        ...     y = x + x
        ...     del x
        >>> run.timeline.live_bytes.tolist(), run.timeline.peak_bytes
        ([4000, 8000, 4000], 8000)

    Args:
        table: An Arrow table with the columns of `SCHEMA`.
        info: What is known of the run as a whole, for example `evidence` ("traced" or "measured"), `start_event` and
            `end_event`, the numbers of events before step 0 and until the last step's end. Stored with the table in
            Parquet.

    Raises:
        ValueError: If a column is missing or a count of bytes is negative.
    """

    def __init__(self, table: pa.Table, info: Mapping[str, Any] | None = None) -> None:
        if "own" not in table.column_names:  # older files
            table = table.append_column("own", pa.array([""] * len(table), pa.string()))
        missing = [name for name in SCHEMA.names if name not in table.column_names]
        if missing:
            raise ValueError(f"not a timeline: column {missing[0]!r} is missing; a timeline has {SCHEMA.names}")
        self.table = table.select(SCHEMA.names).cast(SCHEMA)
        self.info = dict(info or {})
        if len(self.table) and self._nbytes.min() < 0:
            raise ValueError("not a timeline: a count of bytes is negative")

    # -- the stream as arrays ------------------------------------------------------------------------------------------

    @cached_property
    def _nbytes(self) -> np.ndarray:
        return self.table["nbytes"].to_numpy()

    @cached_property
    def _is_alloc(self) -> np.ndarray:
        return self._text("action") == "alloc"

    def _text(self, column: str) -> np.ndarray:
        return np.asarray(self.table[column].cast(pa.string()).to_pandas(), dtype=object)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Bytes live after each event, `[events]`, counted from the moment the context began.

        Raises:
            ValueError: If they are more than 2**63 - 1.
        """
        changes = np.where(self._is_alloc, self._nbytes, -self._nbytes)
        live = np.cumsum(changes)
        if np.abs(live - np.cumsum(changes, dtype=float)).max(initial=0) > 2**62:  # 64 bits have run over
            raise ValueError("more than 2**63 - 1 bytes are live at once; give smaller sizes")
        return live

    # -- the numbers ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.table)

    @property
    def start_bytes(self) -> int:
        """Bytes live when step 0 began; the whole stream's beginning where no step was marked."""
        start = int(self.info.get("start_event", 0))
        return int(self.live_bytes[start - 1]) if start else 0

    @property
    def peak(self) -> int:
        """The event at which most bytes are live (the first such event); -1 in an empty timeline."""
        return int(self.live_bytes.argmax()) if len(self) else -1

    @property
    def peak_bytes(self) -> int:
        """Requested bytes live at the peak, since the context began."""
        return int(self.live_bytes.max()) if len(self) else 0

    @property
    def peak_above_start(self) -> int:
        """What the steps added at their peak: `peak_bytes - start_bytes`."""
        return self.peak_bytes - self.start_bytes

    def rounded(self, granularity: int) -> Timeline:
        """The same stream with every size rounded up, as an allocator of that granularity would."""
        rounded = pa.array([round_up(int(n), granularity) for n in self._nbytes], pa.int64())
        return Timeline(self.table.set_column(self.table.column_names.index("nbytes"), "nbytes", rounded), self.info)

    def without(self, *categories: str) -> Timeline:
        """The same stream with the storages of some categories left out, for example `without("scratch")`."""
        unknown = set(categories) - {*CATEGORIES, WORKSPACE}
        if unknown:
            raise ValueError(f"no category {sorted(unknown)[0]!r}; there are {', '.join(CATEGORIES)}")
        return self._only(~np.isin(self._text("category"), categories))

    def on(self, device: str) -> Timeline:
        """The events of one device ("cuda:1")."""
        return self._only(self._text("device") == device)

    def _only(self, keep: np.ndarray) -> Timeline:
        info = dict(self.info)
        for mark in info.keys() & {"start_event", "end_event"}:
            info[mark] = int(keep[: info[mark]].sum())
        for taken in (workspaces := [dict(taken) for taken in info.get("workspaces", [])]):
            taken["event"] = int(keep[: taken["event"]].sum())
        info["workspaces"] = workspaces
        return Timeline(self.table.filter(pa.array(keep)), info)

    def with_workspaces(self) -> Timeline:
        """The same stream with the workspaces that its threads take to multiply (`everybyte.workspace`), each kept.

        For the allocator, in which they lie beside the tensors: `Allocator(...).replay(timeline.with_workspaces())`.
        """
        table, info = self.table, {**self.info, "workspaces": []}
        for number, taken in enumerate(sorted(self.info.get("workspaces", []), key=lambda w: w["event"])):
            at = taken["event"] + number
            beside = table.slice(max(at - 1, 0), 1).to_pylist()[0]
            row = {
                **beside,
                "action": "alloc",
                "storage": len(table) + len(self),  # more than any other
                "nbytes": taken["nbytes"],
                "op": f"{taken['library']} ({taken['thread']})",
                "module": "",
                "category": WORKSPACE,
                "shape": "",
                "dtype": "",
                "line": taken["line"],
                "own": taken.get("own", ""),
            }
            table = pa.concat_tables([table.slice(0, at), pa.Table.from_pylist([row], SCHEMA), table.slice(at)])
            for mark in info.keys() & {"start_event", "end_event"}:
                info[mark] += at < info[mark]
        return Timeline(table.unify_dictionaries(), info)

    # -- tables --------------------------------------------------------------------------------------------------------

    def frame(self) -> pd.DataFrame:
        """One row an event, in order, with the columns of `SCHEMA`."""
        return self.table.to_pandas()

    def live(self, event: int) -> pd.DataFrame:
        """The storages live after `event`, a row each, largest first.

        Raises:
            IndexError: If there is no such event.
        """
        if not -len(self) <= event < len(self):
            raise IndexError(f"event {event} of a timeline of {len(self)} events")
        upto = self.table.slice(0, event % len(self) + 1)
        storages = upto["storage"].to_numpy()
        alloc = self._is_alloc[: len(upto)]
        alive = alloc & ~np.isin(storages, storages[~alloc])
        rows = upto.filter(pa.array(alive)).to_pandas().drop(columns="action")
        return rows.sort_values("nbytes", ascending=False, kind="stable").reset_index(drop=True)

    def by(self, key: str, event: int | None = None) -> pd.DataFrame:
        """Who holds the peak: bytes and number of storages for each value of a column, largest first.

        Args:
            key: "module", "op", "category" or any other column that describes a storage.
            event: An event other than the peak.

        Returns:
            A frame indexed by `key` with columns `nbytes` and `storages`; the bytes sum to what is live there.
        """
        columns = [name for name in SCHEMA.names if name not in ("action", "nbytes")]
        if key not in columns:
            raise ValueError(f"no column {key!r}; choose one of {', '.join(columns)}")
        if not len(self):
            return pd.DataFrame({"nbytes": [], "storages": []}, index=pd.Index([], name=key), dtype="int64")
        rows = self.live(self.peak if event is None else event)
        groups = rows.groupby(rows[key].astype(object).fillna(""), sort=True)["nbytes"]
        table = pd.DataFrame({"nbytes": groups.sum(), "storages": groups.count()})
        return table.sort_values("nbytes", ascending=False, kind="stable")

    def growth_per_step(self) -> pd.DataFrame:
        """What each step left behind: live bytes at its start and end, its own peak, and the growth, a row a step."""
        steps = self.table["step"].to_numpy()
        rows = []
        counted = self.info.get("steps", np.inf)  # what follows the loop carries the next number
        for step in np.unique(steps[(steps >= 0) & (steps < counted)]):
            first, last = np.flatnonzero(steps == step)[[0, -1]]
            before = int(self.live_bytes[first - 1]) if first else 0
            after = int(self.live_bytes[last])
            rows.append((int(step), before, int(self.live_bytes[first : last + 1].max()), after, after - before))
        return pd.DataFrame(rows, columns=["step", "start", "peak", "end", "growth"]).set_index("step")

    def allocations(self, at_least: int = 1) -> pd.Series:
        """How often each size was allocated: counts indexed by `nbytes`, largest size first."""
        sizes = self._nbytes[self._is_alloc]
        return pd.Series(sizes[sizes >= at_least]).value_counts().sort_index(ascending=False).rename_axis("nbytes")

    # -- storing -------------------------------------------------------------------------------------------------------

    def to_parquet(self, path: str | Path) -> None:
        """Writes the table and what is known of the run to one Parquet file."""
        with open(path, "wb") as file:  # pyarrow would remove what it cannot write to
            pq.write_table(self.table.replace_schema_metadata({b"everybyte": json.dumps(self.info).encode()}), file)

    @classmethod
    def from_parquet(cls, path: str | Path) -> Timeline:
        """Reads what `to_parquet` wrote.

        Raises:
            ValueError: If the file is no Parquet file or no timeline.
        """
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{path} is not a Parquet file") from None
        info = json.loads((table.schema.metadata or {}).get(b"everybyte", b"{}"))
        try:
            return cls(table, info)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_snapshot(self, path: str | Path, allocator: Allocator | None = None) -> None:
        """Writes what the caching allocator does with this timeline as a snapshot for PyTorch's memory viewer.

        Open it at https://pytorch.org/memory_viz or by `python -m torch.cuda._memory_viz trace_plot FILE`.

        Args:
            path: Where to.
            allocator: The allocator's settings; PyTorch's defaults and memory without end unless given.
        """
        from . import snapshot_file  # reads timelines itself

        snapshot_file.write(self, path, allocator)

    def __repr__(self) -> str:
        evidence = self.info.get("evidence", "a timeline")
        return f"<Timeline {evidence}: {len(self):,} events, peak {self.peak_bytes:,} B>"


_OF_STORAGES: Final = ("phase", "nbytes", "device", "stream", "op", "module", "shape", "dtype", "line", "own")
_PHASE, _NBYTES, _, _STREAM = range(4)


class Recorder:
    """Collects events while a run goes on, and labels its storages as their purpose becomes known.

    A purpose is often known late: a tensor is a gradient once it hangs on a parameter, an activation once the backward
    pass has begun and it is still there. `finish` therefore fills the category in at the end.
    """

    def __init__(self) -> None:
        self._events: list[int] = []  # storage n is allocated: n; it is released: ~n
        self._moments: list[tuple[int, int, str]] = []  # number of the first event in a step and phase
        self._storages: list[tuple[Any, ...]] = []  # columns of `_OF_STORAGES`
        self._renamed: dict[int, str] = {}
        self._category: dict[int, str] = {}
        self._kept_for_backward: set[int] = set()
        self._live: set[int] = set()
        self.live_bytes = 0
        self._in_loop = False
        self._updated = False  # the optimizer's step is over, and no module has run since
        self._enter(-1, "other")
        self.start_event: int | None = None
        self.end_event: int | None = None

    def alloc(
        self,
        nbytes: int,
        *,
        op: str = "",
        module: str = "",
        shape: str = "",
        dtype: str = "",
        device: str = "cpu",
        stream: int = 0,
        line: str = "",
        own: str = "",
    ) -> int:
        """Records an allocation and returns the storage's id."""
        storage = len(self._storages)
        self._storages.append((self.phase, nbytes, device, stream, op, module, shape, dtype, line, own))
        self._events.append(storage)
        self._live.add(storage)
        self.live_bytes += nbytes
        return storage

    def free(self, storage: int) -> None:
        """Records the release of a storage; a second release of the same one is ignored."""
        if storage in self._live:
            self._live.remove(storage)
            self.live_bytes -= self._storages[storage][_NBYTES]
            self._events.append(~storage)

    def events_from(self, start: int) -> Iterator[tuple[str, int, int, int]]:
        """The events from one on: action, storage, bytes and stream."""
        for event in itertools.islice(self._events, start, None):
            storage = max(event, ~event)
            what = self._storages[storage]
            yield "alloc" if event >= 0 else "free", storage, what[_NBYTES], what[_STREAM]

    def label(self, storage: int, category: str) -> None:
        """Says what a storage is for. The first label of a storage counts."""
        self._category.setdefault(storage, category)

    def rename(self, storage: int, op: str) -> None:
        """Says more of what made a storage than the op's own name does."""
        self._renamed[storage] = op

    @property
    def events(self) -> int:
        """How many have been recorded."""
        return len(self._events)

    def nbytes(self, storage: int) -> int:
        return self._storages[storage][_NBYTES]

    def is_live(self, storage: int) -> bool:
        return storage in self._live

    def begin_step(self, step: int, *, over: bool = False) -> None:
        """Events from here on belong to `step`; `over` says that the loop has ended and `step` is what follows it."""
        self._in_loop, self._updated = not over, False
        self._enter(step, "other" if over else "forward")
        if self.start_event is None:
            self.start_event = len(self._events)
        self.end_event = len(self._events) if over else None

    def end_update(self) -> None:
        """Says that an optimizer's step is over: gradients are let go, the learning rate moves, nothing is forward."""
        self._updated = True

    def enter_phase(self, *, backward: bool, optimizer: bool, module: str) -> None:
        """Sets the phase from what is running; what belongs to no pass is "other".

        In a step all is forward that is neither backward nor the optimizer's, because a loss need not be a module's;
        after the optimizer's step (`end_update`) only what a module's forward begins. A module that runs in the
        optimizer's step does so in its closure, which is how Lightning takes a step.
        """
        if backward and self.phase != "backward":
            self._kept_for_backward |= self._live
        self._updated = self._updated and not module
        forward = bool(module) or (self._in_loop and not self._updated)
        updates = optimizer and not module
        phase = "backward" if backward else "optimizer" if updates else "forward" if forward else "other"
        if phase != self.phase:
            self._enter(self.step, phase)

    def _enter(self, step: int, phase: str) -> None:
        self.step, self.phase = step, phase
        self._moments.append((len(self._events), step, phase))

    def _category_of(self, storage: int) -> str:
        if storage in self._category:
            return self._category[storage]
        kept = storage in self._kept_for_backward and self._storages[storage][_PHASE] == "forward"
        return "activation" if kept else "temporary"

    def finish(self, info: Mapping[str, Any]) -> Timeline:
        """The timeline of everything recorded so far."""
        events = np.array(self._events, np.int64)
        which = np.maximum(events, ~events)
        begins, steps, phases = zip(*self._moments, strict=True)
        moment = np.repeat(np.arange(len(begins)), np.diff([*begins, len(events)]))
        columns = zip(*self._storages, strict=True) if self._storages else ((),) * len(_OF_STORAGES)
        of_storages = dict(zip(_OF_STORAGES, columns, strict=True))
        of_storages["op"] = [self._renamed.get(storage, op) for storage, op in enumerate(of_storages["op"])]
        of_storages["category"] = [self._category_of(storage) for storage in range(len(self._storages))]
        looked_up = {
            "step": (steps, moment),
            "phase": (phases, moment),
            "action": (("alloc", "free"), events < 0),
            "storage": (range(len(self._storages)), which),
        } | {name: (column, which) for name, column in of_storages.items() if name != "phase"}
        arrays = [
            pa.array(looked_up[field.name][0], field.type).take(pa.array(looked_up[field.name][1].astype(np.int64)))
            for field in SCHEMA
        ]
        end = len(self._events) if self.end_event is None else self.end_event
        known = {**info, "start_event": self.start_event or 0, "end_event": end}
        return Timeline(pa.Table.from_arrays(arrays, schema=SCHEMA), known)
