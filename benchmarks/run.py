"""Every benchmark of this folder, as one table: book/benchmarks.parquet, which the page *Benchmarks* shows.

    make benchmarks                          makes an environment with the other tools, and runs all
    python benchmarks/run.py                 all, in this environment; tools that are not installed are left out
    python benchmarks/run.py speed sweep     some anew, in place of the stored ones

The table is stored after each part, so that a run that is stopped leaves what it came to.
"""

from __future__ import annotations

import datetime
import logging
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import cost
import pandas as pd
import peers
import speed
import tft_variants
import torch
from row import Row, table

from everybyte.models import TFT

TABLE = Path(__file__).resolve().parent.parent / "book" / "benchmarks.parquet"
TOOLS = "torchinfo", "torchlens", "accelerate", "deepspeed", "llm-analysis", "pytorch-forecasting", "neuralforecast"


def answers() -> Iterator[Row]:
    """What the other tools say of the models that were traced."""
    shapes = list(speed.REDUCED.input_shapes(8).values())[:3]
    tft = peers.Subject(lambda: TFT(speed.REDUCED), lambda: tuple(map(torch.zeros, shapes)))
    yield from peers.rows(speed.REDUCED_TFT, tft, runs=True)
    yield from peers.rows(speed.SMALL_GPT, peers.decoder(speed.SMALL), runs=True)
    yield from peers.rows(speed.BIG, peers.decoder(speed.DECODER), speed.BIG_FUSED)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "speed": speed.steps,
    "depths": speed.depths,
    "memory": cost.memory,
    "profile": cost.profile,
    "replay": speed.replayed,
    "answers": answers,
    "variants": tft_variants.rows,
    "sweep": speed.swept,
}


def collected(parts: dict[str, Callable[[], Iterator[Row]]]) -> Iterator[pd.DataFrame]:
    """After each of these benchmarks, all rows so far, with the name of its part, and where and when they were made."""
    began = time.perf_counter()
    rows, names = [], []
    for name, make in parts.items():
        for row in make():
            print(f"{name}: {row.what}: {row.tool}: {min(row.seconds):.4g} to {max(row.seconds):.4g} s", flush=True)
            rows.append(row)
            names.append(name)
        made = table(rows)
        made.insert(0, "part", names)
        made.attrs = machine() | {"seconds": round(time.perf_counter() - began)}
        yield made


def machine() -> dict[str, object]:
    """What the times depend on."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    installed = {name: version for name in TOOLS if (version := _version(name))}
    return {
        "cores": os.cpu_count(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "busy": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "tools": installed,
    }


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main(*names: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"no benchmark is called {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)  # on a machine that others use, too, threads wait for each other
    kept = pd.read_parquet(TABLE) if names else pd.DataFrame({"part": []})
    kept = kept[~kept["part"].isin(names)]
    for made in collected({name: PARTS[name] for name in names or PARTS}):
        whole = pd.concat([kept, made]) if len(kept) else made
        whole = whole.sort_values("part", key=lambda parts: parts.map([*PARTS].index), kind="stable", ignore_index=True)
        seconds = made.attrs["seconds"] + kept.attrs.get("seconds", 0)
        whole.attrs = made.attrs | {"seconds": seconds, "one run": not len(kept)}
        whole.to_parquet(TABLE)
    print(made.drop(columns=["times", "units"]).to_string(index=False))
    print(made.attrs)


if __name__ == "__main__":
    main(*sys.argv[1:])
