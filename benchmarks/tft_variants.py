"""Three ways to compute the TFT's variable selection, beside the TFT of two libraries where they are installed.

Bytes are measured on the CPU. Seconds are those of whole training steps, Adam's loop included.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from row import Row, timed
from torch import Tensor

import everybyte as eb
from everybyte.models import TFT, TFTConfig, quantile_loss

LOOP = TFTConfig()
STREAMED = replace(LOOP, selection_compute="streamed")
WHAT = "TFT of 225 variables, batch 8, by its variable selection"
BATCH, TURNS = 8, 2
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


def neuralforecast(to_device: ToDevice) -> Job:
    """Its TFT at our sizes; the target's own history is one of the observed variables."""
    from neuralforecast.losses.pytorch import MQLoss
    from neuralforecast.models import TFT as Theirs

    n, past = BATCH, LOOP.history
    static, observed, known = LOOP.static_features, LOOP.observed_features - 1, LOOP.known_features
    model = Theirs(
        h=LOOP.horizon, input_size=past, hidden_size=LOOP.hidden, n_head=LOOP.heads, dropout=LOOP.dropout,
        attn_dropout=LOOP.dropout, loss=MQLoss(quantiles=list(LOOP.quantiles)),
        stat_exog_list=[f"static {i}" for i in range(static)],
        hist_exog_list=[f"observed {i}" for i in range(observed)],
        futr_exog_list=[f"known {i}" for i in range(known)],
    )  # fmt: skip
    shapes = {
        "insample_y": (n, past, 1),
        "hist_exog": (n, past, observed),
        "futr_exog": (n, past + LOOP.horizon, known),
        "stat_exog": (n, static),
    }
    x = {name: to_device(torch.randn(shape)) for name, shape in shapes.items()}
    return job(model, lambda: model(x), to_device)


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
if importlib.util.find_spec("neuralforecast"):
    VARIANTS["neuralforecast"] = neuralforecast


def measured(build: Callable[[ToDevice], Job]) -> int:
    """The peak of forward and backward beside weights and their gradients, bytes, on the CPU."""
    with eb.measure(device="cpu") as run:
        made = build(run.to_device)
        for _ in run.steps(1):
            made.loss().backward()
    return run.timeline.without(*LASTING).peak_bytes


def rows() -> Iterator[Row]:
    """A row for each variant: the peak of forward and backward beside the weights.

    The loop and the variant take turns, so that whatever else the machine does falls on both.
    """
    loop = VARIANTS["loop"](lambda host: host)
    loop.step()  # the first step makes the optimizer's state
    for name, build in VARIANTS.items():
        made = build(lambda host: host)
        made.step()
        turns = [(*timed(loop.step, 1), *timed(made.step, 1)) for _ in range(TURNS)]
        loops, steps = zip(*turns, strict=True)
        beside = Row(WHAT, "loop", loops)
        yield Row(WHAT, name, steps, measured(build), "measured", beside=beside)
