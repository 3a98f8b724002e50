"""Trains a TFT and says, step by step, what it costs in memory and what it forecasts.

`fit` is the loop of every chapter. ``python -m everybyte.training`` (``make train``) is the long work behind one of
them: the narrow model on the full file, over several seeds, until it beats the trivial forecast or does not.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from everybyte.data import Batch, Split, Windows, record, tft_windows
from everybyte.host import peak_resident_bytes
from everybyte.models.tft import TFT, TFTConfig, quantile_loss
from everybyte.units import format_bytes

NARROW = TFTConfig(hidden=32, heads=4, dropout=0.0)
"""The model of the long training: same layers, an eighth as wide. Few steps and a held-out part do dropout's work."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Raises:
        ValueError: a number that no training can have; the message says how to mend it.
    """

    seed: int = 0  # of the weights, the order of the windows and the dropout
    batch_size: int = 32
    epochs: int = 5  # at most; the weights of the best epoch on the held-out windows are kept
    stride: int = 4  # every 4th window: neighbours share 49 of their 50 bars, and four times the work adds little
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2  # AdamW's
    clip: float = 1.0  # largest norm of the gradient, one of the paper's choices
    held_out: float = 0.15  # the latest share of the training windows chooses the epoch

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "stride"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a count: give a whole number from 1 up")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out!r} is no share: give a number between 0 and 1")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} trains nothing: give a number above 0")


@dataclass(frozen=True)
class Step:
    """What one training step says of itself.

    Attributes:
        number: counted from 0.
        loss: quantile loss of its batch, in units of target.
        memory: peak bytes since the process, or on CUDA the step, began.
        memory_kind: what ``memory`` counts: ``"resident"`` set of the process, or ``"allocated"`` on the GPU.
    """

    number: int
    loss: float
    memory: int
    memory_kind: str

    def __str__(self) -> str:
        return f"step {self.number}: loss {self.loss:.4f}, {self.memory_kind} peak {format_bytes(self.memory)}"


def train_step(model: TFT, optimizer: torch.optim.Optimizer, batch: Batch, clip: float | None = None) -> torch.Tensor:
    """Forward, backward, optimizer step. This is the step that the memory chapters trace.

    Returns:
        The loss, detached.
    """
    forecast = model(batch.static, batch.past, batch.future)
    loss = quantile_loss(forecast, batch.target, model.quantiles)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fit(
    model: TFT,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    progress: bool = True,
    total: int | None = None,
    each: Callable[[Step], None] | None = None,
) -> list[Step]:
    """One pass over the batches, with a progress bar that shows loss and memory.

    Args:
        model: trained in place, where it lies.
        batches: on the model's device.
        optimizer: of the model's parameters.
        clip: largest norm of the gradient; by default none.
        progress: show the bar (needs tqdm).
        total: number of batches, for the bar.
        each: called after every step, to print or to log it.
    """
    device = next(model.parameters()).device
    steps: list[Step] = []
    model.train()
    with _bar(total, progress) as bar:
        for number, batch in enumerate(batches):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            loss = train_step(model, optimizer, batch, clip)
            step = Step(number, loss.item(), *_peak(device))
            steps.append(step)
            if each is not None:
                each(step)
            bar.set_postfix_str(f"loss {step.loss:.4f}, {step.memory_kind} peak {format_bytes(step.memory)}")
            bar.update()
    return steps


@torch.no_grad()
def evaluate(model: TFT, windows: Windows, batch_size: int = 128) -> float:
    """Mean quantile loss over all windows, dropout off, in units of target."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = 0.0
    for batch in windows.batches(batch_size, device):
        loss = quantile_loss(model(batch.static, batch.past, batch.future), batch.target, model.quantiles)
        total += loss.item() * len(batch.target)
    model.train(training)
    return total / len(windows)


def trivial_loss(train: Windows, windows: Windows, quantiles: Iterable[float]) -> float:
    """Quantile loss of the forecast that never looks: the training targets' empirical quantiles, for each step."""
    wanted = torch.tensor(tuple(quantiles))
    forecast = torch.quantile(train.target, wanted, dim=0).T  # (f, q)
    return quantile_loss(forecast.expand(len(windows), -1, -1), windows.target, wanted).item()


def stretched_loss(
    train: Windows, windows: Windows, quantiles: Iterable[float], train_scale: torch.Tensor, scale: torch.Tensor
) -> float:
    """Quantile loss of a forecast by one number a window: the trivial forecast's kind of quantiles, stretched by it.

    Args:
        train: what the quantiles are taken from, once its targets are divided by their scales.
        windows: what is forecast.
        quantiles: [q], each in (0, 1).
        train_scale, scale: [w], a positive number for each window, known at the end of its history.
    """
    wanted = torch.tensor(tuple(quantiles))
    shape = torch.quantile(train.target / train_scale[:, None], wanted, dim=0).T  # (f, q)
    return quantile_loss(scale[:, None, None] * shape, windows.target, wanted).item()


@torch.no_grad()
def start_trivially(model: TFT, train: Windows) -> None:
    """Sets the head so that the untrained model gives the trivial forecast: what it gains from there, it saw.

    Raises:
        ValueError: the model's head forecasts step by step, or has no bias to hold the quantiles.
    """
    head = model.head.output
    if model.config.head != "horizon" or head.bias is None:
        raise ValueError("only a head='horizon' with a bias can hold the quantiles of each step: change the TFTConfig")
    nn.init.zeros_(head.weight)
    head.bias.copy_(torch.quantile(train.target, model.quantiles, dim=0).T.flatten())


@dataclass(frozen=True)
class Trained:
    """One training from scratch.

    Attributes:
        model: with the weights of the epoch that did best on the held-out windows.
        losses: one row a step or an evaluation: kind (``"train"`` | ``"held out"``), epoch, step, loss.
        epoch: the chosen one.
    """

    model: TFT
    losses: pd.DataFrame
    epoch: int


def train(config: TFTConfig, recipe: Recipe, windows: Windows, progress: bool = True) -> Trained:
    """Trains on the CPU, from the trivial forecast on; one recipe on one machine with one set of versions, one result.

    The latest windows are held out to choose the epoch. Windows for validation are none of this function's business:
    they choose nothing.

    Args:
        config: the model.
        recipe: the training.
        windows: what to learn from.
        progress: show a bar for each epoch.
    """
    learn, held_out = hold_out(windows, recipe.held_out, config.horizon)
    learn, held_out = learn.part(step=recipe.stride), held_out.part(step=recipe.stride)
    rows: list[dict] = []
    best, chosen, weights = float("inf"), 0, {}
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = TFT(config)
        start_trivially(model, learn)
        optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
        order = torch.Generator().manual_seed(recipe.seed)
        for epoch in range(recipe.epochs):
            batches = learn.batches(recipe.batch_size, shuffle=order)
            steps = fit(model, batches, optimizer, recipe.clip, progress, -(-len(learn) // recipe.batch_size))
            rows += [{"kind": "train", "epoch": epoch, "step": step.number, "loss": step.loss} for step in steps]
            loss = evaluate(model, held_out)
            rows.append({"kind": "held out", "epoch": epoch, "step": len(steps), "loss": loss})
            if loss < best:
                best, chosen, weights = loss, epoch, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return Trained(model, pd.DataFrame(rows), chosen)


SLICE_TRAIN, SLICE_VALIDATION = 128, 44
"""Windows of the slice that a chapter re-runs, in about 10 s on one core; at most 300 in all."""

SLICE_BAND = 1e-3
"""Largest relative difference between a re-run slice and the stored one: another processor, over 4 Adam steps."""


def run_slice(split: Split, recipe: Recipe = Recipe(), progress: bool = True) -> pd.DataFrame:
    """A piece of the training small enough to repeat: one pass over the first windows, then the first to validate.

    Returns:
        One row a step, then one for validation: kind (``"slice train"`` | ``"slice validation"``), epoch, step, loss.
    """
    learn = split.train.part(stop=SLICE_TRAIN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = TFT(NARROW)
    start_trivially(model, learn)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    total = -(-len(learn) // recipe.batch_size)
    with one_thread():
        steps = fit(model, learn.batches(recipe.batch_size), optimizer, recipe.clip, progress, total)
        loss = evaluate(model, split.validation.part(stop=SLICE_VALIDATION))
    rows = [{"kind": "slice train", "epoch": 0, "step": step.number, "loss": step.loss} for step in steps]
    return pd.DataFrame([*rows, {"kind": "slice validation", "epoch": 0, "step": total, "loss": loss}])


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, however many cores there are; 28,000 small operations a step gain little from a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def hold_out(windows: Windows, share: float, horizon: int) -> tuple[Windows, Windows]:
    """The earlier and the latest ``share`` of the windows, with those between dropped whose targets would overlap."""
    border = round(len(windows) * (1 - share))
    return windows.part(stop=border - horizon + 1), windows.part(start=border)


def _peak(device: torch.device) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated"
    return peak_resident_bytes(), "resident"


def _bar(total: int | None, progress: bool) -> AbstractContextManager[Any]:
    if not progress:
        return _NoBar()
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError('the progress bar is tqdm: pip install "everybyte[book]", or progress=False') from error
    return tqdm(total=total, unit="step")


class _NoBar(AbstractContextManager["_NoBar"]):
    def __exit__(self, *_: object) -> None: ...
    def set_postfix_str(self, _: str) -> None: ...
    def update(self) -> None: ...


def make(folder: Path, seeds: Iterable[int] = (0, 1, 2), recipe: Recipe = Recipe()) -> pd.DataFrame:
    """Trains the narrow model on ``sp500.parquet`` and stores every loss in ``narrow_training.parquet``.

    Kinds beside those of `train` and `run_slice`: ``"validation"``, the chosen epoch's loss on all validation windows;
    ``"trivial"``, the loss there of the training part's empirical quantiles, which no epoch or seed changes.

    Returns:
        The stored table: kind, seed, epoch, step, loss.
    """
    split = tft_windows(folder / "sp500.parquet", NARROW)
    tables = []
    for seed in seeds:
        trained = train(NARROW, replace(recipe, seed=seed), split.train)
        loss = evaluate(trained.model, split.validation)
        row = {"kind": "validation", "epoch": trained.epoch, "step": 0, "loss": loss}
        tables.append(pd.concat([trained.losses, pd.DataFrame([row])]).assign(seed=seed))
    trivial = trivial_loss(split.train, split.validation, NARROW.quantiles)
    tables.append(pd.DataFrame([{"kind": "trivial", "epoch": 0, "step": 0, "loss": trivial, "seed": 0}]))
    tables.append(run_slice(split, recipe).assign(seed=recipe.seed))
    table = pd.concat(tables, ignore_index=True)[["kind", "seed", "epoch", "step", "loss"]]
    table.to_parquet(folder / STORED, index=False)
    record(
        folder,
        STORED,
        {
            "source": "sp500.parquet",
            "made_by": "python -m everybyte.training",
            "made_on": datetime.now(UTC).date().isoformat(),
            "content": "losses in units of target, the standard deviation of the training part's log returns",
            "target_scale": split.train.target_scale,
            "windows": {"train": len(split.train), "validation": len(split.validation)},
            "settings": {name: value for name, value in asdict(recipe).items() if name != "seed"},
            "seeds": list(seeds),
            "model": {"hidden": NARROW.hidden, "heads": NARROW.heads, "dropout": NARROW.dropout},
            "threads": 1,
            "versions": {name: metadata.version(name) for name in ("torch", "numpy", "TA-Lib")},
        },
    )
    return table


STORED = "narrow_training.parquet"

if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks/data")
    made = make(where).set_index("kind").loc[["trivial", "validation"]]
    print(f"{where / STORED}\n{made.to_string()}")
