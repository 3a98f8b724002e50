"""How long a trace takes, beside the step it stands for and beside PyTorch's own tracker, and how far each is off.

    python benchmarks/speed.py            a few minutes, on a machine that does nothing else
    python benchmarks/speed.py replay     only the rows whose name contains the word

Every row is timed in this process, one after the other; a row that is quick is timed several times, and the spread is
shown. Ratios are of the least times: what else the machine does only adds to a time. `MemTracker`
(torch/distributed/_tools/mem_tracker.py) runs under `FakeTensorMode`, as its authors do.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import everybyte as eb
from everybyte.data import Batch
from everybyte.models import GPT, TFT, GPTConfig, TFTConfig
from everybyte.training import train_step

FULL = TFTConfig()
REDUCED = replace(FULL, observed_features=75, features=90)
DECODER = GPTConfig.seed()


@dataclass(frozen=True)
class Row:
    """One thing timed: seconds of its first step, of each later one, and the peak it states, in bytes."""

    what: str
    how: str
    first: float
    later: list[float]
    peak: int | None = None


# -- the steps that are timed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model, its optimizer, and what runs one training step of them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


Build = Callable[[Callable[[torch.Tensor], torch.Tensor]], Job]
"""Makes a job; the function given to it brings a host tensor to the device."""


def tft(config: TFTConfig) -> Build:
    """The TFT on one batch of 8, with Adam's loop over its parameters."""

    def build(to_device: Callable[[torch.Tensor], torch.Tensor]) -> Job:
        model = TFT(config)
        adam = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
        n, s, f = 8, config.history, config.horizon
        shapes = (n, config.static_features), (n, s, config.observed_features), (n, f, config.known_features), (n, f)
        batch = Batch(*(to_device(torch.zeros(shape)) for shape in shapes))
        return Job(model, adam, lambda: train_step(model, adam, batch))

    return build


def decoder(to_device: Callable[[torch.Tensor], torch.Tensor]) -> Job:
    """The 1.3B decoder of *Activation Memory Math*, four sequences of 2,048 tokens, AdamW."""
    model = GPT(DECODER)
    adamw = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = to_device(torch.zeros(4, DECODER.context, dtype=torch.long))

    def step() -> None:
        model(tokens, tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return Job(model, adamw, step)


# -- three ways to run them --------------------------------------------------------------------------------------------


def timed(step: Callable[[], object], times: int) -> Iterator[float]:
    for _ in range(times):
        began = time.perf_counter()
        step()
        yield time.perf_counter() - began


def really(what: str, build: Build, times: int = 6) -> Row:
    first, *later = timed(build(lambda host: host).step, times)
    return Row(what, "really run", first, later)


def traced(what: str, build: Build, rules: str, times: int = 6) -> Row:
    gc.collect()
    with eb.trace(rules=rules) as run:
        job = build(run.to_device)
        first, *later = (seconds for _ in run.steps(times) for seconds in timed(job.step, 1))
    return Row(what, f"traced, rules {rules}", first, later, run.timeline.without("scratch").peak_bytes)


def tracked(what: str, build: Build, times: int = 2) -> Row:
    """By MemTracker. Its peak is that of one step, the optimizer's state there from the step before."""
    gc.collect()
    with FakeTensorMode():
        job = build(lambda host: host)
        tracker = MemTracker()
        tracker.track_external(job.model, job.optimizer)
        with tracker:
            seconds = list(timed(job.step, 1))
            for _ in range(times - 1):
                tracker.reset_mod_stats()
                seconds += timed(job.step, 1)
    peak = tracker.get_tracker_snapshot("peak")
    return Row(what, "MemTracker", seconds[0], seconds[1:], sum(device["Total"] for device in peak.values()))


def replayed(what: str, build: Build) -> Row:
    """How fast the allocator model takes a traced stream, in events a second."""
    with eb.trace(rules="cuda") as run:
        job = build(run.to_device)
        for _ in run.steps(2):
            job.step()
    timeline = run.timeline
    allocator = eb.Allocator(total="80 GB")
    seconds = list(timed(lambda: allocator.replay(timeline), 4))
    rate = len(timeline) / min(seconds)
    return Row(f"{what}: {len(timeline):,} events, {rate:,.0f} a second", "replayed", seconds[0], seconds[1:])


FULL_TFT, REDUCED_TFT, BIG = "TFT-225, batch 8", "TFT of 90 variables, batch 8", "1.3B decoder, 4 x 2,048"
ROWS: dict[str, Callable[[], Row]] = {
    f"{FULL_TFT}, run": lambda: really(FULL_TFT, tft(FULL)),
    f"{FULL_TFT}, traced, cpu": lambda: traced(FULL_TFT, tft(FULL), "cpu"),
    f"{FULL_TFT}, traced, cuda": lambda: traced(FULL_TFT, tft(FULL), "cuda"),
    f"{REDUCED_TFT}, traced": lambda: traced(REDUCED_TFT, tft(REDUCED), "cpu"),
    f"{REDUCED_TFT}, MemTracker": lambda: tracked(REDUCED_TFT, tft(REDUCED)),
    f"{BIG}, traced": lambda: traced(BIG, decoder, "cuda"),
    f"{BIG}, MemTracker": lambda: tracked(BIG, decoder),
    f"{FULL_TFT}, replay": lambda: replayed(FULL_TFT, tft(FULL)),
}


def table(rows: list[Row]) -> pd.DataFrame:
    """The rows, and beside what is traced: its times by that of the step really run, MemTracker's by its time."""
    least = {(row.what, row.how): min(row.later) for row in rows}

    def columns(row: Row) -> dict[str, object]:
        later, run, tracker = (least.get((row.what, how)) for how in (row.how, "really run", "MemTracker"))
        is_traced = row.how.startswith("traced")
        return {
            "what": row.what,
            "how": row.how,
            "first step, s": round(row.first, 3),
            "later, least": round(later, 3),
            "later, most": round(max(row.later), 3),
            "first / really run": f"{row.first / run:.2f}" if is_traced and run else "",
            "later / really run": f"{later / run:.2f}" if is_traced and run else "",
            "MemTracker / this": f"{tracker / later:.0f}" if is_traced and tracker else "",
            "peak, B": "" if row.peak is None else f"{row.peak:,}",
        }

    return pd.DataFrame(map(columns, rows))


def main(word: str = "") -> None:
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()}"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores}")
    rows = []
    for name, make in ROWS.items():
        if word.lower() not in name.lower():
            continue
        row = make()
        span = f"{min(row.later):.2f} to {max(row.later):.2f} s"
        print(f"  {row.what}: {row.how}: {row.first:.2f} s, then {span}", flush=True)
        rows.append(row)
    print(table(rows).to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:2])
