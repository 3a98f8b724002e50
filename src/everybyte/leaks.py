"""What each step leaves behind, who holds it, and whether `detach()` is enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
import torch

from .holders import search
from .run import Run
from .units import format_bytes

_ORIGIN: Final = ["op", "module", "line", "shape", "dtype", "category"]
COLUMNS: Final = ("nbytes", "storages", "steps", *_ORIGIN, "holder", "detach")

_GONE: Final = "(what let it go since: ask inside the block)"
_UNKNOWN: Final = "(nothing that Python reaches)"


def leaks(run: Run) -> Leaks:
    """Says how many bytes each step of a run leaves behind, what they are, and which objects hold them.

        >>> losses = []
        >>> with eb.trace() as run:
        ...     for step in run.steps(4):
        ...         losses.append(torch.ones(1_000))
        >>> eb.leaks(run).growth.tolist()
        [4000, 4000, 4000, 4000]
        >>> eb.leaks(run).frame()["holder"].item()
        'losses[0]'

    Ask while the holders are there: after the block or, of a trace, inside it, for its end empties the caches of
    `functools`. A measurement is asked right after its block, before other tensors take the addresses of the dead.

    Args:
        run: A trace, or a measurement that is over, of at least three steps. The first does things once (optimizer
            state, caches), and what the last one made may be replaced by the next; those between are looked at.

    Raises:
        TypeError: If `run` is no run.
        ValueError: If it has fewer than three steps.
    """
    if not isinstance(run, Run):
        raise TypeError(f"leaks() takes the run of everybyte.trace or everybyte.measure, not {type(run).__name__}")
    timeline = run.timeline
    steps = timeline.info["steps"]
    if steps < 3:
        raise ValueError(f"leaks() compares steps, and this run has {steps}; write `for step in run.steps(3):`")
    growth = timeline.growth_per_step()["growth"].reindex(range(steps), fill_value=0)
    late = steps // 2 + 1
    before, after = (run.marks[step].resident for step in (late, steps))
    measured = timeline.info["evidence"] == "measured" and before is not None and after is not None
    leaked = Leaks(growth, (after - before) // (steps - late) if measured else None)
    return Leaks(growth, leaked.resident_per_step, _held(run, steps)) if sum(leaked.late) > 0 else leaked


def _held(run: Run, steps: int) -> tuple[dict[str, Any], ...]:
    left = run.timeline.live(run.timeline.info["end_event"] - 1)
    left = left[left["step"].between(1, steps - 2)]
    addresses = {event: address for address, event in run.live_storages().items()}
    wanted = {addresses[event] for event in left["storage"] if event in addresses}
    marks = [mark.node for mark in run.marks.values()]
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # traced tensors are looked at, not asked
        found = search(wanted, run.address, marks, blind=[run])
    holders = [found.get(addresses[event], ()) if event in addresses else None for event in left["storage"]]
    left["holder"] = [_GONE if h is None else " and ".join(each.path for each in h) or _UNKNOWN for h in holders]
    left["detach"] = [bool(h) and all(each.graph for each in h) for h in holders]
    groups = left.groupby([*_ORIGIN, "holder", "detach"], sort=False, dropna=False, observed=True)
    rows = groups.agg(nbytes=("nbytes", "sum"), storages=("nbytes", "count"), steps=("step", "nunique")).reset_index()
    rows = rows.sort_values("nbytes", ascending=False, kind="stable")
    return tuple(rows[list(COLUMNS)].to_dict("records"))


@dataclass(frozen=True)
class Leaks:
    """What steps leave behind. Made by `leaks`.

    Attributes:
        growth: Bytes by which each step let the live bytes grow, indexed by step.
        resident_per_step: Bytes by which the process's resident memory grew in a step of the run's second half, the
            measurement's own records included; None of a trace, which does not compute, and where the system does not
            say.
        rows: A dict for each sort of storage, with the columns of `frame`; none if the second half does not grow.
    """

    growth: pd.Series
    resident_per_step: int | None
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def late(self) -> tuple[int, ...]:
        """The growth of the steps of the second half. What a window or a bounded cache keeps has stopped growing."""
        return tuple(int(nbytes) for nbytes in self.growth.iloc[len(self.growth) // 2 + 1 :])

    def frame(self) -> pd.DataFrame:
        """What the steps between the first and the last left behind, largest first.

        Columns: nbytes, storages (of all these steps together), steps (in how many such a storage was left), op,
        module, line, shape, dtype, category (as in `Timeline.frame`), holder (the paths of all objects that hold it; of
        places that differ in an index or a key one), and detach (whether `detach()` at all holders lets it go).
        """
        return pd.DataFrame(list(self.rows), columns=list(COLUMNS))

    def explain(self) -> str:
        """The same in one sentence."""
        if sum(self.late) <= 0:
            if self.resident_per_step is None:
                host = "a trace does not see the host's memory: run the same code under everybyte.measure()"
            else:
                host = f"the process's resident memory grew by {format_bytes(self.resident_per_step)} a step"
            return (
                f"Nothing in tensors: the last {len(self.late)} of {len(self.growth)} steps left 0 B; what grows all "
                f"the same is elsewhere (open figures, lists of Python numbers, a library's own memory), and {host}."
            )
        low, high = min(self.late), max(self.late)
        left = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        lets_go = [row for row in self.rows if row["detach"]]
        keeps = [row for row in self.rows if not row["detach"]]
        parts = [
            f"{format_bytes(sum(row['nbytes'] for row in rows) // (len(self.growth) - 2))} of it are {what}, made by "
            f"{_some(' at '.join(filter(None, (row['op'], row['line']))) for row in rows)}, held by "
            f"{_some(row['holder'] for row in rows)}, {remedy}"
            for rows, what, remedy in (
                (lets_go, "gradient graphs", "and detach() there lets them go"),
                (keeps, "tensors", "and detach() does not let them go: drop them, or keep numbers (.item())"),
            )
            if rows
        ]
        return f"Each step leaves {left} behind; {'; '.join(parts) or 'nothing of it outlives the next step'}."


def _some(texts: Iterable[str], most: int = 3) -> str:
    """The first different texts, and how many there are beside."""
    different = list(dict.fromkeys(texts))
    rest = f" and {len(different) - most} others" if len(different) > most else ""
    return ", ".join(different[:most]) + rest
