"""The largest batch of pytorch-forecasting's TFT on a T4, as it is, with checkpoints, and with its selection streamed.

    python benchmarks/forecasting.py [notebooks/data]    about a quarter of an hour

Traces `notebooks/data/forecast.py`, as the chapter on streamed selection does, at one batch size after another, and
stores each try; stopped, it goes on where it was. What cuDNN's LSTM keeps is known within limits
(`everybyte.rules.cuda_rnn`), and so is the context: a batch fits where it does with the most of both.
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

from everybyte import changes, gpus
from everybyte.allocator import Allocator
from everybyte.data import record
from everybyte.largest import largest
from everybyte.script import Program
from everybyte.trials import Trial

STORED, GPU, USUAL, MOST = "forecasting.parquet", "t4", 64, 2**14
TABLE = "sp500_small_features.parquet"
WINDOWS = 181  # of one symbol
RESERVE = 4 * 60 * 256 * (10 - 6)  # bytes of a window in the two LSTMs that the estimate may lack


def streamed() -> AbstractContextManager[Any]:
    import streamed_selection as recipe

    return mock.patch.object(recipe.VariableSelectionNetwork, "forward", recipe.streamed)


WAYS = {"as it is": nullcontext, "checkpoints": changes.checkpointing, "streamed": streamed}
BEGIN = {"as it is": 127, "checkpoints": 330, "streamed": 3532}
"""What the search for the largest batch begins with; the end does not depend on it."""


def attempt(folder: Path, way: str, phase: str, batch: int) -> dict[str, Any]:
    """One try: a run of two steps, or of one and then of two batches predicted, each of ten times the size."""
    read = 20 * batch if phase == "predict" else 2 * batch
    symbols = max(2, -(-read // WINDOWS))
    arguments = f"{folder / TABLE} --batch-size {batch} --symbols {symbols}".split()
    arguments += ["--predict"] * (phase == "predict")
    program = Program(str(folder / "forecast.py"), tuple(arguments), steps=2, phase=phase)
    timeline = program.trace(GPU, changes=[WAYS[way]()]).run.timeline
    beside = timeline.with_workspaces()
    room = gpus.find(GPU).usable[0] - (RESERVE * batch if phase == "train" else 0)
    return {
        "way": way,
        "phase": phase,
        "batch_size": batch,
        "peak": timeline.peak_bytes,
        "reserved": Allocator().replay(beside).peak_reserved,
        "fits": Allocator(total=room).replay(beside).out_of_memory is None,
    }


def tried(folder: Path, way: str, phase: str, batch: int) -> Trial:
    """One try more, in a process of its own, unless it is stored."""
    table = pd.read_parquet(folder / STORED) if (folder / STORED).exists() else pd.DataFrame()
    known = table.query("way == @way and phase == @phase and batch_size == @batch") if len(table) else table
    if known.empty:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            known = pd.DataFrame([pool.apply(attempt, (folder, way, phase, batch))])
        print(known.to_string(header=False), flush=True)
        pd.concat([table, known], ignore_index=True).to_parquet(folder / STORED, index=False)
    row = known.iloc[0]
    return Trial("fits" if row["fits"] else "does not fit", int(row["reserved"]))


def main(folder: str = "notebooks/data") -> None:
    sys.path.insert(0, folder)
    import pytorch_forecasting  # noqa: F401  once, for all processes

    for way, begin in BEGIN.items():
        at = partial(tried, Path(folder), way)
        at("train", USUAL)
        largest(partial(at, "train"), begin, gpus.find(GPU).usable[0], MOST)
    for way in ("as it is", "streamed"):
        tried(Path(folder), way, "predict", USUAL)
    versions = {package: metadata.version(package) for package in ("torch", "pytorch-forecasting", "lightning")}
    entry = {
        "source": TABLE,
        "made_by": "python benchmarks/forecasting.py",
        "made_on": datetime.now(UTC).date().isoformat(),
        "content": "bytes of tensors and of the allocator's segments at the peak of a traced run on a T4, and whether "
        "it fits with the most that cuDNN's LSTM and the context may take; the largest batch that does, and one more",
        "versions": versions,
    }
    record(Path(folder), STORED, entry)


if __name__ == "__main__":
    main(*sys.argv[1:2])
