"""How long a trace takes, beside the step it stands for and PyTorch's own tracker, and the peak that each states.

A step's times are those after the first, which makes the optimizer's state. `MemTracker`
(torch/distributed/_tools/mem_tracker.py) runs under `FakeTensorMode`, as its authors do.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from row import Row, timed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import everybyte as eb
from everybyte import sweep
from everybyte.data import Batch
from everybyte.models import GPT, TFT, GPTConfig, TFTConfig
from everybyte.training import train_step

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "24_one_step.ipynb"
BATCH = 4
FULL = TFTConfig()
REDUCED = replace(FULL, observed_features=20, features=35)  # a step of the full one takes MemTracker minutes
DECODER = GPTConfig.seed()
SMALL = GPTConfig(vocabulary=8192, context=256, layers=4, hidden=256, heads=4)
FULL_TFT, REDUCED_TFT = "TFT of 225 variables, batch 8", "TFT of 35 variables, batch 8"
BIG, SMALL_GPT = "1.3B decoder, 4 × 2,048 tokens", "decoder of 5M, 4 × 256 tokens"
BIG_FUSED = f"{BIG}, fused attention"
DEPTHS = 1, 12, 25, 50, 100


# -- the steps that are timed ------------------------------------------------------------------------------------------

ToDevice = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A model, its optimizer, and what runs one training step of them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


Build = Callable[[ToDevice], Job]
"""Makes a job; the function given to it brings a host tensor to the device."""


def tft(config: TFTConfig, batch_size: int = 8) -> Build:
    """The TFT, with Adam's loop over its parameters."""

    def build(to_device: ToDevice) -> Job:
        model = TFT(config)
        adam = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
        batch = Batch(*(to_device(torch.zeros(shape)) for shape in config.input_shapes(batch_size).values()))
        return Job(model, adam, lambda: train_step(model, adam, batch))

    return build


def decoder(config: GPTConfig) -> Build:
    """A decoder on four sequences as long as it takes, AdamW; the 1.3B one is that of *Activation Memory Math*."""

    def build(to_device: ToDevice) -> Job:
        model = GPT(config)
        adamw = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
        tokens = to_device(torch.zeros(BATCH, config.context, dtype=torch.long))

        def step() -> None:
            model(tokens, tokens).backward()
            adamw.step()
            adamw.zero_grad()

        return Job(model, adamw, step)

    return build


# -- ways to run them --------------------------------------------------------------------------------------------------


def really(what: str, build: Build, times: int = 5) -> Iterator[Row]:
    """On all cores, and on one, as a trace is."""
    with eb.measure(device="cpu") as run:
        job = build(run.to_device)
        for _ in run.steps(2):
            job.step()
    peak = run.timeline.without("scratch").peak_bytes
    job = build(lambda host: host)
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield Row(what, "really run", timed(job.step, 1 + times)[1:], peak, "measured")
        torch.set_num_threads(1)
        yield Row(what, "really run, on one core", timed(job.step, times))
    finally:
        torch.set_num_threads(threads)


def traced(what: str, build: Build, rules: str, times: int = 5) -> Row:
    gc.collect()
    with eb.trace(rules=rules) as run:
        job = build(run.to_device)
        seconds = tuple(timed(job.step, 1)[0] for _ in run.steps(1 + times))
    peak = run.timeline.without("scratch").peak_bytes
    return Row(what, f"everybyte, {'CPU' if rules == 'cpu' else 'CUDA'}'s rules", seconds[1:], peak, "traced")


def tracked(what: str, build: Build, times: int = 2) -> Row:
    """By MemTracker. Its peak is that of one step, the optimizer's state there from the step before."""
    gc.collect()
    seconds: tuple[float, ...] = ()
    with FakeTensorMode():
        job = build(lambda host: host)
        tracker = MemTracker()
        tracker.track_external(job.model, job.optimizer)
        with tracker:
            job.step()
            for _ in range(times):
                tracker.reset_mod_stats()
                seconds += timed(job.step, 1)
    peak = tracker.get_tracker_snapshot("peak")
    return Row(what, "MemTracker", seconds, sum(device["Total"] for device in peak.values()))


def steps() -> Iterator[Row]:
    yield traced(FULL_TFT, tft(FULL), "cpu")
    yield from really(FULL_TFT, tft(FULL))
    yield traced(f"{FULL_TFT}, for a GPU", tft(FULL), "cuda")
    yield traced(REDUCED_TFT, tft(REDUCED), "cpu")
    yield from really(REDUCED_TFT, tft(REDUCED))
    yield tracked(REDUCED_TFT, tft(REDUCED))
    yield traced(SMALL_GPT, decoder(SMALL), "cpu")
    yield from really(SMALL_GPT, decoder(SMALL))
    yield tracked(SMALL_GPT, decoder(SMALL))
    yield traced(BIG, decoder(DECODER), "cuda")
    yield tracked(BIG, decoder(DECODER))
    yield traced(BIG_FUSED, decoder(replace(DECODER, attention="fused")), "cuda")


def depths() -> Iterator[Row]:
    """The 1.3B decoder with more and fewer layers; the one of 25 is what the others are compared with."""
    for layers in sorted(DEPTHS, key=lambda layers: layers != 25):
        row = traced("1.3B decoder's width, a layer", decoder(replace(DECODER, layers=layers)), "cuda", times=3)
        yield replace(row, tool=f"everybyte, layers: {layers}", units=layers, peak=None, evidence="")


# -- what comes after a trace, and around it ---------------------------------------------------------------------------


def replayed(what: str = FULL_TFT, build: Build | None = None) -> Iterator[Row]:
    """The allocator model on a traced stream."""
    with eb.trace(rules="cuda") as run:
        job = (build or tft(FULL))(run.to_device)
        for _ in run.steps(2):
            job.step()
    timeline = run.timeline
    allocator = eb.Allocator(total="80 GB")
    yield Row(f"{what}, an event", "allocator model", timed(lambda: allocator.replay(timeline), 5), units=len(timeline))


def swept(sizes: tuple[int, ...] = (1, 2), times: int = 2) -> Iterator[Row]:
    """`everybyte sweep` of chapter 24, with one worker and with two; a run is one combination, its kernel included."""
    for jobs in 1, 2:

        def once(jobs: int = jobs) -> None:
            with tempfile.TemporaryDirectory() as out:
                grid = {"batch_size": sizes, "sequence": [1024]}
                done = sweep.run(NOTEBOOK, grid, out=Path(out) / "sweep", jobs=jobs)
                assert done.done == len(sizes), done.errors

        tool = f"sweep, {jobs} worker{'s' if jobs > 1 else ''}"
        yield Row("chapter 24, a run", tool, timed(once, times), units=len(sizes))
