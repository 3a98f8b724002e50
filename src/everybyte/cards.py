"""Which cards hold a training step of the TFT, what nine fixes take off it, and some of these steps at full width.

``python -m everybyte.cards`` (after ``make train``'s other half, `everybyte.training`) does what a notebook has no time
for: it looks for the largest batch that fits each card by tracing step after step, traces a step with each fix, and
trains the fixed model on some windows of the small file at each batch size.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from everybyte.allocator import Allocator
from everybyte.data import Batch, record, tft_windows
from everybyte.fixes import compared
from everybyte.formulas import tft as formulas
from everybyte.gpus import GPU, find
from everybyte.models.tft import TFT, TFTConfig
from everybyte.models.tft_fixes import ways
from everybyte.models.tft_loops import AttentionCache, zeros
from everybyte.run import Run
from everybyte.timeline import WORKSPACE, Timeline
from everybyte.trace import trace
from everybyte.training import BATCH_SIZES, fit, one_thread, start_trivially, train_step
from everybyte.units import GiB

PLAIN = TFTConfig()
FIXED = replace(PLAIN, selection_compute="streamed", selection_keep=0)
"""The model as it stands, and with a selection of which no output stays; no cache in either, gradients cleared."""

WAYS = {"as it stands": PLAIN, "fixed": FIXED}
CARDS = {
    "2 GB": replace(
        find("3050ti"), key="2gb", name="a card of 2 GB", total=2 * GiB, source="2 GiB, all of it reported"
    ),
    "4 GB": find("3050ti"),
    "16 GB": find("a4000"),
}
"""What the report names; of 2 GB it names none, so it is a 3050 Ti with half the memory."""

ON_HOST = ("optimizer step counters", "divisor, a double")
"""What Adam has on the host in a GPU's step."""

LEARNING_RATE = 1e-4
"""Adam's: of the usual 1e-3 the full model's softmax becomes so sharp that a CPU meets denormal numbers."""

PLANNED, WINDOWS = (8, 16, 32), 64
"""Batch sizes of the report's testing plan, and windows over which each is trained: an epoch takes a CPU too long."""

STORED, STEPS = "tft_cards.parquet", "full_width_steps.parquet"


def adam(model: TFT) -> torch.optim.Optimizer:
    """The optimizer of every step here, one parameter after the other."""
    return torch.optim.Adam(model.parameters(), LEARNING_RATE, foreach=False)


@cache
def traced(config: TFTConfig, batch_size: int, gpu: GPU) -> Timeline:
    """Two steps on a GPU, the second of which finds Adam's moments, workspaces of cuBLAS included."""
    return steps(trace(rules="cuda", gpu=gpu), config, Batch(*zeros(config, batch_size)), 2).with_workspaces()


def steps(run: Run, config: TFTConfig, host: Batch, count: int = 1) -> Timeline:
    """So many training steps from scratch on one batch, in a trace or a measurement that has not begun."""
    with one_thread(), run:
        model = TFT(config)
        optimizer = adam(model)
        for _ in run.steps(count):
            train_step(model, optimizer, run.to_device(host))
    return run.timeline


def live(moment: str) -> dict[str, Any]:
    """Terms of what is live on a GPU at a moment of `formulas.tft.peak`, the model as it stands."""
    state = formulas.model_state(PLAIN)
    lasting = {name: state[name] for name in ("parameters", "positional table", "quantiles")}
    return {name: term for name, term in formulas.peak(PLAIN)[moment].items() if name not in ON_HOST} | lasting


def line(config: TFTConfig, gpu: GPU) -> Callable[[int], Timeline]:
    """What `traced` gives at any batch size, scratch apart, which kernels choose by the number of rows.

    Each allocation has a constant and a part for each window, and two traces tell both.
    """
    few, many = (256, 512) if config.selection_compute == "streamed" else (16, 32)
    first, second = (traced(config, batch_size, gpu).without("scratch") for batch_size in (few, many))
    apart = ["nbytes", "shape", "storage"]
    if not first.table.drop(apart).equals(second.table.drop(apart)):
        raise ValueError(f"batches of {few} and {many} are not the same allocations in other sizes: trace each batch")
    at = np.asarray(first.table["nbytes"])
    slope = (np.asarray(second.table["nbytes"]) - at) // (many - few)
    place = first.table.schema.get_field_index("nbytes")

    def timeline(batch_size: int) -> Timeline:
        sizes = pa.array(at + slope * (batch_size - few))
        return Timeline(first.table.set_column(place, first.table.schema.field(place), sizes), first.info)

    return timeline


def largest(config: TFTConfig, gpu: GPU, rooms: Sequence[int]) -> list[int]:
    """The largest batch whose steps the allocator can place in so many bytes, 0 if none: it and the next are traced."""
    guess = line(config, gpu)

    def fits(timeline: Timeline, room: int) -> bool:
        return Allocator(total=room).replay(timeline).out_of_memory is None

    found = []
    for room in rooms:
        low, high = 0, 2**14
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(guess(middle), room) else (low, middle)
        while low and not fits(traced(config, low, gpu), room):
            low -= 1
        while fits(traced(config, low + 1, gpu), room):
            low += 1
        found.append(low)
    return found


def held(way: str, batch_size: int) -> dict[str, object]:
    """A row of the stored table: what a batch takes on an RTX A4000, where all of them fit."""
    timeline = traced(WAYS[way], batch_size, CARDS["16 GB"])
    peak = timeline.without(WORKSPACE, "scratch").peak_bytes
    replay = Allocator().replay(timeline)
    found = {"peak": peak, "allocated": replay.peak_allocated, "reserved": replay.peak_reserved}
    return {"kind": "step", "way": way, "batch_size": batch_size, **found}


def fixed(batch_size: int = 8) -> pd.DataFrame:
    """More rows of it: a step with each fix, as `everybyte.fixes.steps` has them on an RTX A4000; two microbatches."""
    run = partial(trace, rules="cuda", gpu=CARDS["16 GB"])
    table = compared(run, PLAIN, Batch(*zeros(PLAIN, batch_size)), ways(AttentionCache(detached=True)))
    return table.rename_axis("way").reset_index().assign(kind="fix", batch_size=batch_size)


def edge(way: str, card: str) -> dict[str, object]:
    """A row of it: the largest batch that fits a card, if the CUDA context takes the most reported, and the least."""
    least, most = largest(WAYS[way], CARDS[card], CARDS[card].usable)
    return {"kind": "card", "way": way, "card": card, "least": least, "most": most}


def first_steps(folder: Path, batch_size: int) -> pd.DataFrame:
    """The fixed model at full width over the first windows of the small file, a row a step; a process of its own."""
    windows = tft_windows(folder / "sp500_small_features.parquet", FIXED).train.part(stop=WINDOWS)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TFT(FIXED)
        start_trivially(model, windows)
        steps = fit(model, windows.batches(batch_size), adam(model), progress=False)
    rows = [{"step": step.number, "loss": step.loss, "memory": step.memory} for step in steps]
    return pd.DataFrame(rows).assign(batch_size=batch_size)


def make(folder: Path, workers: int = 2) -> dict[str, pd.DataFrame]:
    """Stores in ``tft_cards.parquet`` what steps take and which fit, in ``full_width_steps.parquet`` the losses."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        edges = pool.map(edge, *zip(*product(WAYS, CARDS), strict=True))
        whole = pool.map(held, *zip(*product(WAYS, BATCH_SIZES), strict=True))
        fixes, first = pool.submit(fixed), pool.map(partial(first_steps, folder), PLANNED)
        rows = pd.concat([pd.DataFrame([*whole, *edges]), fixes.result()], ignore_index=True)
        return store(folder, rows, pd.concat(first, ignore_index=True))


def store(folder: Path, cards: pd.DataFrame, first: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Writes both tables and notes where they come from."""
    tables, whole = {}, ["batch_size", "peak", "allocated", "reserved", "least", "most", "kept", "growth", "memory"]
    content = {
        STORED: "bytes of tensors, of the allocator's blocks, of its segments; the largest batch that fits; and what "
        "a step keeps for backward and leaves behind",
        STEPS: "loss in units of target, memory in bytes: the largest resident set of the process",
    }
    for name, table in ((STORED, cards), (STEPS, first)):
        tables[name] = table.astype({column: "Int64" for column in whole if column in table})
        tables[name].to_parquet(folder / name, index=False)
        record(
            folder,
            name,
            {
                "source": "sp500_small_features.parquet",
                "made_by": "python -m everybyte.cards",
                "made_on": datetime.now(UTC).date().isoformat(),
                "content": content[name],
                "learning_rate": LEARNING_RATE,
                "seed": 0,
                "threads": 1,
                "versions": {package: metadata.version(package) for package in ("torch", "numpy")},
            },
        )
    return tables


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks/data")
    for name, table in make(where).items():
        print(f"{where / name}\n{table.to_string()}")
