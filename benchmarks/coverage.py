"""Architectures of transformers, trained for a step: traced without a change to them, and really run and measured.

    pip install transformers==5.24.0
    python benchmarks/coverage.py                 all that are left to do; an interrupted run goes on where it stopped
    python benchmarks/coverage.py bert mamba      these alone, anew
    python benchmarks/coverage.py --table         only the table, of the rows that are there

What is trained, and on what, `architectures.py` finds by rule. Each architecture runs in a process of its own, within a
limit of time and of memory: built on the CPU until a size and a batch are found that train, then measured, traced by
the CPU's rules, and traced by CUDA's. A row of each is kept in `_build/coverage`; all are `book/coverage.parquet`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pandas as pd
import torch
import transformers
from architectures import SIZES, Architecture, Batches, Shrinking, architectures, family, loss_of
from tqdm import tqdm

import everybyte as eb
from everybyte.timeline import Timeline
from everybyte.units import GiB

ROOT: Final = Path(__file__).resolve().parent.parent
ROWS: Final = ROOT / "_build" / "coverage"
TABLE: Final = ROOT / "book" / "coverage.parquet"
SECONDS: Final = 60
"""Of the processor's time, for each architecture; and ten times that by the clock."""
MEMORY: Final = 8 * GiB
STEPS: Final = 1
SEARCH: Final = 20
"""The part of it in which a size and a batch have to be found."""
TOO_MANY: Final = 40_000_000
"""Parameters from which on a model is not small, and the next size is tried."""

_TRAINED: Final = ("parameter", "gradient", "optimizer state")
"""Categories of which a closed form says how many bytes are live while AdamW steps: 4, 4 and 8 a parameter."""

Body = Callable[[Any], None]


# -- one architecture --------------------------------------------------------------------------------------------------


def found(architecture: Architecture) -> tuple[Any, dict[str, np.ndarray]]:
    """The first small configuration and batch with which the architecture really trains.

    Raises:
        RuntimeError: With the last cause of the first size, if it trains with none of them.
    """
    causes: list[str] = []
    for size in SIZES:
        if causes and time.process_time() > SEARCH:
            break
        try:
            config = architecture.config(**Shrinking(size).arguments(architecture.config))
            parameters = sum(p.numel() for p in on_meta(architecture, config).parameters())
            if parameters > TOO_MANY:
                raise RuntimeError(f"{parameters:,} parameters at a {size.factor}th of the widths")
            batch = fitting(architecture, config)
            return config, batch
        except Exception as error:
            causes.append(in_words(error))
    raise RuntimeError(causes[0] if causes else "takes no batch")


def fitting(architecture: Architecture, config: Any) -> dict[str, np.ndarray]:
    """The first batch with which a model of this configuration really trains.

    Raises:
        Exception: What the last one failed of, if none does.
    """
    beside: list[str] = []
    for _ in range(4):
        batches, last, asked = Batches(architecture, config, beside), None, []
        for batch in batches:
            try:
                training(architecture, config, batch, steps=1)(Bare())
                return batch
            except Exception as error:
                last = error
                asked += batches.asked_for(str(error))
        if not asked:
            break
        beside.append(asked[0])
    raise last or RuntimeError("takes no batch")


def on_meta(architecture: Architecture, config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return architecture.trained(config)


class Bare:
    """A run that nobody watches."""

    def to_device(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(value) for name, value in batch.items()}

    def steps(self, count: int) -> Iterator[int]:
        yield from range(count)


def training(architecture: Architecture, config: Any, batch: dict[str, np.ndarray], steps: int = STEPS) -> Body:
    """What is run: the model built, and trained by AdamW with dropout on."""

    def body(run: Any) -> None:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        model = architecture.trained(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = run.to_device(batch)
        for _ in run.steps(steps):
            output = model(**given)
            loss = loss_of(output)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, loss

    return body


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector runs in no two runs at the same moment: here in neither."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def row(architecture: Architecture) -> Iterator[dict[str, Any]]:
    """The row of an architecture, piece by piece; a piece "cause" ends it."""
    yield {"architecture": architecture.name, "model": architecture.model, "task": architecture.task}
    try:
        config, batch = found(architecture)
    except RuntimeError as error:
        yield {"stage": "built", "cause": str(error)}
        return
    model = on_meta(architecture, config)
    yield {
        "stage": "built",
        "family": family(architecture, config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items()),
    }
    body = training(architecture, config, batch)
    began = time.perf_counter()
    with uncollected(), eb.measure(device="cpu") as measured:
        body(measured)
    yield {"stage": "measured", "seconds measured": time.perf_counter() - began, **of(measured.timeline, "measured")}
    try:
        began = time.perf_counter()
        with uncollected(), eb.trace(rules="cpu") as run:
            body(run)
        yield {
            "stage": "traced",
            "traced": True,
            "seconds traced": time.perf_counter() - began,
            "conditional": "; ".join(run.conditional),
            "not covered": "; ".join(sorted(run.not_covered)),
            **of(run.timeline, "traced"),
            **compared(run.timeline, measured.timeline),
        }
    except Exception as error:
        yield {"stage": "traced", "traced": False, "cause": in_words(error)}
    try:
        began = time.perf_counter()
        with uncollected(), eb.trace(rules="cuda") as run:
            body(run)
        at, peak = run.timeline.by("category")["nbytes"], run.timeline.peak
        yield {
            "stage": "traced by CUDA's rules",
            "traced by CUDA's rules": True,
            "seconds traced by CUDA's rules": time.perf_counter() - began,
            "peak by CUDA's rules": run.timeline.peak_bytes,
            "phase of CUDA's peak": str(run.timeline.frame()["phase"][peak]),
            **{
                f"{kind}s by CUDA's rules": int(at.get(kind, 0))
                for kind in ("parameter", "gradient", "optimizer state")
            },
            "not covered by CUDA's rules": "; ".join(sorted(run.not_covered)),
        }
    except Exception as error:
        yield {"traced by CUDA's rules": False, "cause by CUDA's rules": in_words(error)}
    yield {"stage": "done"}


def in_words(error: Exception) -> str:
    """An error's type, message and place, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place})"
    return " ".join([said, *getattr(error, "__notes__", ())])


def of(timeline: Timeline, how: str) -> dict[str, Any]:
    return {
        f"peak {how}": timeline.peak_bytes,
        f"peak {how}, without scratch": timeline.without("scratch").peak_bytes,
        f"events {how}": len(timeline),
    }


def compared(traced: Timeline, measured: Timeline) -> dict[str, Any]:
    """Whether two timelines are equal, event by event, and by which operation they begin to differ."""
    plain = differing(traced.without("scratch"), measured.without("scratch"))
    whole = differing(traced, measured)
    ours, real = taken(traced), taken(measured)
    return {
        "difference": traced.peak_bytes - measured.peak_bytes,
        "difference, without scratch": traced.without("scratch").peak_bytes - measured.without("scratch").peak_bytes,
        "equal, without scratch": not plain,
        "equal": not whole,
        "first differing": plain,
        "first differing, with scratch": whole,
        "scratch": ", ".join(sorted({op for op, _ in real})),
        "scratch that differs": "; ".join(
            f"{op} {nbytes} B: traced {ours[op, nbytes]}, measured {real[op, nbytes]}"
            for op, nbytes in sorted(ours.keys() | real.keys())
            if ours[op, nbytes] != real[op, nbytes]
        ),
    }


def taken(timeline: Timeline) -> Counter[tuple[str, int]]:
    """How often each operation's kernel takes so many bytes for itself."""
    scratch = timeline.frame().query("category == 'scratch' and action == 'alloc'")
    return Counter(zip(scratch["op"].astype(str), scratch["nbytes"], strict=True))


def differing(traced: Timeline, measured: Timeline) -> str:
    """The first event in which two timelines differ, in words; empty if in none."""
    ours, real = (timeline.frame() for timeline in (traced, measured))
    n = min(len(ours), len(real))
    same = (ours["nbytes"][:n] == real["nbytes"][:n]) & (
        ours["action"][:n].astype(str) == real["action"][:n].astype(str)
    )
    if same.all():
        if len(ours) == len(real):
            return ""
        at, longer = n, ours if len(ours) > n else real
        return f"event {at}: only {'traced' if longer is ours else 'measured'} {said(longer, at)}"
    at = int((~same.to_numpy()).argmax())
    return f"event {at} of {len(real)}, {real['phase'][at]}: traced {said(ours, at)}, measured {said(real, at)}"


def said(frame: pd.DataFrame, at: int) -> str:
    event = frame.iloc[at]
    return f"{event['action']} {event['nbytes']} {event['op'] or 'a number'} {event['shape']} {event['line']}".strip()


# -- all of them -------------------------------------------------------------------------------------------------------


def in_a_process(architecture: Architecture, seconds: int, noisy: bool) -> dict[str, Any]:
    """The row of an architecture, made in a process of its own that ends at a limit."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        with os.fdopen(writable, "w") as pieces:
            _limited(seconds, noisy)
            try:
                for piece in row(architecture):
                    print(json.dumps(piece, default=str), file=pieces, flush=True)
            except BaseException as error:
                if noisy:
                    traceback.print_exc()
                print(json.dumps({"cause": in_words(error)}), file=pieces, flush=True)
        os._exit(0)
    os.close(writable)
    made, text, ends = {}, b"", time.monotonic() + 10 * seconds
    with os.fdopen(readable, "rb", buffering=0) as pieces:
        while (left := ends - time.monotonic()) > 0 and select.select([pieces], [], [], left)[0]:
            piece = pieces.read(65536)
            if not piece:
                break
            text += piece
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                made |= json.loads(line)
    if left <= 0:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        late = left <= 0 or os.WTERMSIG(status) == signal.SIGXCPU
        why = f"longer than {seconds} s" if late else f"ended by signal {os.WTERMSIG(status)}"
        made.setdefault("cause", f"{why} after it was {made.get('stage', 'begun')}")
    return made


def _limited(seconds: int, noisy: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if not noisy:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)


def versions() -> dict[str, str]:
    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores, {_processor()}"
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "machine": cores}


def _processor() -> str:
    """The processor's name, where the system says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def stored(rows: Path) -> pd.DataFrame:
    """The rows that are there, in the order of transformers' mapping."""
    made = [json.loads(path.read_text()) for path in rows.glob("*.json")]
    table = pd.DataFrame(made)
    order = {architecture.name: i for i, architecture in enumerate(architectures())}
    return table.sort_values("architecture", key=lambda names: names.map(order)).reset_index(drop=True)


def summary(table: pd.DataFrame) -> str:
    built = table[table["peak measured"].notna()]
    traced = built[built["traced"] == True]  # noqa: E712
    exact, plain = (traced[name] == 0 for name in ("difference", "difference, without scratch"))
    equal, whole = (traced[name] == True for name in ("equal, without scratch", "equal"))  # noqa: E712
    cuda = built[built["traced by CUDA's rules"] == True]  # noqa: E712
    n = len(built)
    return (
        f"{len(table)} architectures, {n} of them train; of these traced {len(traced)} ({len(traced) / n:.1%}), "
        f"peak exact {exact.sum()} ({exact.sum() / n:.1%}), but for scratch {plain.sum()} ({plain.sum() / n:.1%}), "
        f"equal event by event {whole.sum()}, but for scratch {equal.sum()}; traced by CUDA's rules {len(cuda)}"
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("names", nargs="*", help="architectures to do anew; all that are left unless given")
    asked.add_argument("--rows", type=Path, default=ROWS, help="where rows are kept")
    asked.add_argument("--seconds", type=int, default=SECONDS, help="limit for an architecture")
    asked.add_argument("--every", type=int, default=1, help="only every nth")
    asked.add_argument("--table", action="store_true", help="only write the table")
    asked.add_argument("--noisy", action="store_true", help="show what the processes say")
    given = asked.parse_args()
    given.rows.mkdir(parents=True, exist_ok=True)
    known = {architecture.name: architecture for architecture in architectures()}
    if unknown := set(given.names) - known.keys():
        sys.exit(f"transformers {transformers.__version__} has no architecture {sorted(unknown)[0]!r} of its own")
    left = given.names or [n for n in [*known][:: given.every] if not (given.rows / f"{n}.json").exists()]
    for name in tqdm([] if given.table else left, unit="architecture"):
        made = in_a_process(known[name], given.seconds, given.noisy) | versions()
        (given.rows / f"{name}.json").write_text(json.dumps(made, indent=1))
    table = stored(given.rows)
    if not given.names:
        table.to_parquet(TABLE)
    print(summary(table))


if __name__ == "__main__":
    main()
