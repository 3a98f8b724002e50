"""Three ways to compute the TFT's variable selection: bytes and seconds, beside pytorch-forecasting where it is there.

    python benchmarks/tft_variants.py             a few minutes, on a machine that does nothing else
    python benchmarks/tft_variants.py streamed    only the rows whose name contains the word

Bytes are measured on the CPU, and beside them stands how many times as many the loop has. Seconds are those of whole
training steps, Adam's loop included: the loop and the variant take turns, so that whatever else the machine does falls
on both, and the ratio is that of the medians.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor

import everybyte as eb
from everybyte.models import TFT, TFTConfig, quantile_loss

LOOP = TFTConfig()
STREAMED = replace(LOOP, selection_compute="streamed")
BATCH, TURNS = 8, 6
PEAK = "peak beyond weights, B"
LASTING = ("scratch", "parameter", "gradient", "optimizer state", "buffer")


@dataclass(frozen=True)
class Job:
    """A model's loss on one batch, and the optimizer of its parameters."""

    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


ToDevice = Callable[[Tensor], Tensor]


def job(model: torch.nn.Module, forecast: Callable[[], Tensor], to_device: ToDevice) -> Job:
    """Adam's loop and the quantile loss, the same for all."""
    target, quantiles = to_device(torch.randn(BATCH, LOOP.horizon)), to_device(torch.tensor(LOOP.quantiles))
    adam = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
    return Job(lambda: quantile_loss(forecast(), target, quantiles), adam)


def ours(config: TFTConfig, to_device: ToDevice) -> Job:
    model, shapes = TFT(config), config.input_shapes(BATCH)
    x = [to_device(torch.randn(shapes[name])) for name in ("static", "past", "future")]
    return job(model, lambda: model(*x), to_device)


def pytorch_forecasting(to_device: ToDevice, dropout: float = LOOP.dropout) -> Job:
    """Its TFT at our sizes, each variable embedded by a layer 256 wide; the known ones are in the history too.

    Without dropout and loss it keeps 842,176,292 B. Saved-tensor hooks see 24 B less, three factors that are Python's
    numbers (`torch/csrc/autograd/saved_variable.cpp` does not show them), and who leaves inputs out misses the 64 B of
    the target's scale: 842,176,204 B.
    """
    from pytorch_forecasting.data import TorchNormalizer
    from pytorch_forecasting.metrics import QuantileLoss
    from pytorch_forecasting.models import TemporalFusionTransformer

    kinds = {"static": LOOP.static_features, "observed": LOOP.observed_features, "known": LOOP.known_features}
    static, observed, known = ([f"{kind} {i}" for i in range(count)] for kind, count in kinds.items())
    model = TemporalFusionTransformer(
        hidden_size=LOOP.hidden, hidden_continuous_size=LOOP.hidden, attention_head_size=LOOP.heads,
        output_size=len(LOOP.quantiles), loss=QuantileLoss(list(LOOP.quantiles)), dropout=dropout,
        max_encoder_length=LOOP.history, embedding_sizes={}, x_categoricals=[], x_reals=static + observed + known,
        static_reals=static, time_varying_reals_encoder=observed + known, time_varying_reals_decoder=known,
        output_transformer=TorchNormalizer(method="identity"),
    )  # fmt: skip
    x = {"target_scale": to_device(torch.ones(BATCH, 2))}
    for part, length in (("encoder", LOOP.history), ("decoder", LOOP.horizon)):
        x[f"{part}_cont"] = to_device(torch.randn(BATCH, length, LOOP.features))
        x[f"{part}_cat"] = to_device(torch.zeros(BATCH, length, 0, dtype=torch.long))
        x[f"{part}_lengths"] = to_device(torch.full((BATCH,), length))
    return job(model, lambda: model(x)["prediction"], to_device)


VARIANTS: dict[str, Callable[[ToDevice], Job]] = {
    "loop": lambda to_device: ours(LOOP, to_device),
    "grouped": lambda to_device: ours(replace(LOOP, selection_compute="grouped"), to_device),
    **{
        f"streamed, {keep} outputs stay": lambda to_device, keep=keep: ours(
            replace(STREAMED, selection_keep=keep), to_device
        )
        for keep in (0, STREAMED.selection_keep, LOOP.observed_features)
    },
}
if importlib.util.find_spec("pytorch_forecasting"):
    VARIANTS["pytorch-forecasting"] = pytorch_forecasting
    VARIANTS["pytorch-forecasting, no dropout"] = lambda to_device: pytorch_forecasting(to_device, dropout=0.0)


def measured(build: Callable[[ToDevice], Job]) -> dict[str, int]:
    """Bytes kept between forward and backward, and the peak of these two beside weights and their gradients."""
    kept = eb.saved(build(lambda host: host).loss).total_bytes
    with eb.measure(device="cpu") as run:
        made = build(run.to_device)
        for _ in run.steps(1):
            made.loss().backward()
    return {"saved, B": kept, PEAK: run.timeline.without(*LASTING).peak_bytes}


def seconds(made: Job) -> float:
    began = time.perf_counter()
    made.step()
    return time.perf_counter() - began


def main(word: str = "") -> None:
    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores, {platform.machine()}"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores}; batch {BATCH}")
    whole = measured(VARIANTS["loop"])[PEAK]
    loop = VARIANTS["loop"](lambda host: host)
    loop.step()
    table = []
    for name, build in VARIANTS.items():
        if word.lower() not in name.lower():
            continue
        row = {"variant": name, **measured(build)}
        row["loop's bytes over it"] = whole / row[PEAK]
        made = build(lambda host: host)
        made.step()  # the first step makes the optimizer's state
        turns = [(seconds(loop), seconds(made)) for _ in range(TURNS)]
        loops, steps = zip(*turns, strict=True)
        row |= {"median, s": statistics.median(steps), "least": min(steps), "most": max(steps)}
        row["times the loop"] = statistics.median(steps) / statistics.median(loops)
        bytes_, times = f"{row[PEAK]:,} of {whole:,} B, 1/{whole / row[PEAK]:.2f}", f"{row['times the loop']:.2f} times"
        print(f"  {name}: {bytes_}; {row['median, s']:.2f} s a step, {times} the loop's", flush=True)
        table.append(row)
    print(pd.DataFrame(table).round(2).to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:2])
