"""Trains a TFT and says, step by step, what it costs in memory and what it forecasts.

`fit` is the loop of every chapter. ``python -m everybyte.training`` (``make train``) is the long work behind two of
them: the narrow model on the full file, at several batch sizes and seeds, until it beats the trivial forecast or not.
"""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from itertools import islice, product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from everybyte.data import Batch, Windows, record, tft_windows
from everybyte.host import peak_resident_bytes
from everybyte.models.tft import TFT, TFTConfig, quantile_loss
from everybyte.models.tft_selection import grouped_state
from everybyte.timeline import Timeline
from everybyte.trace import trace
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
    epochs: int = 3  # at most; the weights of the best epoch on the held-out windows are kept
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

    def at(self, batch_size: int) -> Recipe:
        """The recipe for another batch size: Adam's learning rate goes with its square root (arXiv 2205.10287)."""
        return replace(
            self, batch_size=batch_size, learning_rate=self.learning_rate * (batch_size / self.batch_size) ** 0.5
        )


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
        losses: one row a step or an evaluation: kind (``"train"`` | ``"held out"``), epoch, step, loss, memory (as
            `Step` has it), and seconds, those of the processor since the training began.
        epoch: the chosen one.
    """

    model: TFT
    losses: pd.DataFrame
    epoch: int


def begin(
    config: TFTConfig, recipe: Recipe, learn: Windows
) -> tuple[TFT, torch.optim.Optimizer, Callable[[], Iterator[Batch]]]:
    """A model that gives the trivial forecast, its optimizer, and what makes the batches of the next epoch.

    Sets the global random generator, which goes on to draw the dropout.
    """
    torch.manual_seed(recipe.seed)
    model = TFT(config)
    start_trivially(model, learn)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    order = torch.Generator().manual_seed(recipe.seed)
    return model, optimizer, lambda: learn.batches(recipe.batch_size, shuffle=order)


def parts(config: TFTConfig, recipe: Recipe, windows: Windows) -> tuple[Windows, Windows]:
    """The windows that a recipe learns from, and those that choose its epoch."""
    learn, held_out = hold_out(windows, recipe.held_out, config.horizon)
    return learn.part(step=recipe.stride), held_out.part(step=recipe.stride)


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
    learn, held_out = parts(config, recipe, windows)
    began, rows = time.process_time(), []
    best, chosen, weights = float("inf"), 0, {}

    def note(kind: str, step: Step) -> None:
        seconds = time.process_time() - began
        row = {"kind": kind, "epoch": epoch, "step": step.number, "loss": step.loss, "memory": step.memory}
        rows.append(row | {"seconds": seconds})

    with one_thread(), torch.random.fork_rng(devices=[]):
        model, optimizer, batches = begin(config, recipe, learn)
        count = -(-len(learn) // recipe.batch_size)
        for epoch in range(recipe.epochs):
            fit(model, batches(), optimizer, recipe.clip, progress, count, lambda step: note("train", step))
            loss = evaluate(model, held_out, recipe.batch_size)
            note("held out", Step(count, loss, *_peak(torch.device("cpu"))))
            if loss < best:
                best, chosen, weights = loss, epoch, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return Trained(model, pd.DataFrame(rows), chosen)


RERUN_BAND = 1e-3
"""Largest relative difference between the first steps as stored and run again: another processor, over 4 Adam steps."""


def first_steps(config: TFTConfig, recipe: Recipe, windows: Windows, count: int = 4) -> list[Step]:
    """The first steps of `train`, of its first epoch at most: what a stored training is compared with, in seconds."""
    learn, _ = parts(config, recipe, windows)
    with one_thread(), torch.random.fork_rng(devices=[]):
        model, optimizer, batches = begin(config, recipe, learn)
        return fit(model, islice(batches(), count), optimizer, recipe.clip, progress=False)


def losses(
    config: TFTConfig,
    batches: Iterable[Batch],
    change: Callable[[TFT], TFT] = lambda model: model,
    parts: int = 1,
    learning_rate: float = 1e-3,
) -> torch.Tensor:
    """Of a step on each batch, in double precision, so that variants of a model can be compared: [steps].

    Args:
        config: the model; the weights are those of the looping selection, whichever this one is.
        batches: one a step.
        change: done to the model first.
        parts: each batch is worked off in so many, whose gradients add up to the batch's.
        learning_rate: Adam's.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = TFT(replace(config, selection_compute="loop")).state_dict()
        model = TFT(config)
        model.load_state_dict(grouped_state(weights) if config.selection_compute == "grouped" else weights)
        model, found = change(model.double()), []
        optimizer = torch.optim.Adam(model.parameters(), learning_rate)
        torch.manual_seed(0)
        for batch in batches:
            found.append(torch.zeros((), dtype=torch.double))
            for *inputs, target in zip(*(x.double().chunk(parts) for x in batch), strict=True):
                loss = quantile_loss(model(*inputs), target, model.quantiles) * (len(target) / len(batch.target))
                loss.backward()
                found[-1] += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(found)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """What a table of `make` came to, by batch size.

    Returns:
        Columns seeds; steps of one training; least gain and most gain, shares by which its loss on the validation
        windows is below the trivial forecast's; seconds, the seeds' median; traced and resident, the largest of all
        seeds, in bytes.
    """
    kinds = {kind: rows.groupby("batch_size") for kind, rows in table.groupby("kind")}
    trivial = kinds["trivial"]["loss"].max().item()
    seeds, losses = kinds["validation"].size(), kinds["validation"]["loss"]
    whole = table[table["kind"] == "held out"].groupby(["batch_size", "seed"])["seconds"].max()
    return pd.DataFrame({
        "seeds": seeds,
        "steps": kinds["train"].size() // seeds,
        "least gain": 1 - losses.max() / trivial,
        "most gain": 1 - losses.min() / trivial,
        "seconds": whole.groupby("batch_size").median().round().astype(int),
        "traced": kinds["traced"]["memory"].max().astype(int),
        "resident": kinds["train"]["memory"].max().astype(int),
    })  # fmt: skip


def rerun(table: pd.DataFrame, windows: Windows, batch_size: int, count: int = 2) -> float:
    """The largest relative difference between the first losses in a table of `make`, seed 0, and the same run again."""
    was = table.query(f"kind == 'train' and batch_size == {batch_size} and seed == 0 and epoch == 0")["loss"]
    again = first_steps(NARROW, Recipe().at(batch_size), windows, count)
    return max(abs(step.loss / old - 1) for step, old in zip(again, was[:count], strict=True))


def traced(config: TFTConfig, recipe: Recipe, windows: Windows) -> Timeline:
    """Two steps of a recipe's training, traced by a CPU's rules: what lives in them is its whole memory curve."""
    learn, _ = parts(config, recipe, windows)
    batch = next(learn.batches(recipe.batch_size))
    with one_thread(), trace(rules="cpu") as run:
        model = TFT(config)
        optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
        for _ in run.steps(2):
            train_step(model, optimizer, run.to_device(batch), recipe.clip)
    return run.timeline.without("scratch")


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


BATCH_SIZES = (8, 16, 32, 64)
STORED = "narrow_training.parquet"


KEPT = Path("_build/trainings")


def versions() -> dict[str, str]:
    """Of what a training's numbers depend on."""
    return {name: metadata.version(name) for name in ("torch", "numpy", "TA-Lib")}


def run_or_recall(folder: Path, kept: Path, recipe: Recipe) -> pd.DataFrame:
    """`run_once`, unless it has been run with this recipe, model, file and versions: then what was kept of it."""
    bars = hashlib.sha256((folder / "sp500.parquet").read_bytes()).hexdigest()
    key = hashlib.sha256(repr((asdict(recipe), asdict(NARROW), bars, versions())).encode()).hexdigest()
    path = kept / f"{key[:16]}.parquet"
    if not path.exists():
        table = run_once(folder, recipe)
        kept.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path.with_suffix(".part"), index=False)
        path.with_suffix(".part").replace(path)  # whole or not there
    return pd.read_parquet(path)


def run_once(folder: Path, recipe: Recipe) -> pd.DataFrame:
    """One training of the narrow model on the full file; beside `Trained.losses` what `make` says.

    To be run in a process of its own: the largest resident set is that of all that a process has done.
    """
    split = tft_windows(folder / "sp500.parquet", NARROW)
    trained = train(NARROW, recipe, split.train, progress=False)
    began = time.process_time()
    with one_thread():
        loss = evaluate(trained.model, split.validation, recipe.batch_size)
    row = {"kind": "validation", "epoch": trained.epoch, "step": 0, "loss": loss}
    last = row | {"memory": peak_resident_bytes(), "seconds": time.process_time() - began}
    step = {"kind": "traced", "epoch": 0, "step": 1, "memory": traced(NARROW, recipe, split.train).peak_bytes}
    return pd.concat([trained.losses, pd.DataFrame([last, step])]).assign(
        batch_size=recipe.batch_size, seed=recipe.seed
    )


def make(
    folder: Path,
    seeds: Iterable[int] = (0, 1, 2),
    batch_sizes: Iterable[int] = BATCH_SIZES,
    recipe: Recipe = Recipe(),
    workers: int = 2,
    kept: Path = KEPT,
) -> pd.DataFrame:
    """Trains the narrow model on ``sp500.parquet`` and stores every loss in ``narrow_training.parquet``.

    It can be stopped and started again: a training that has ended is not done twice.

    Kinds beside those of `train`: ``"validation"``, the chosen epoch's loss on all validation windows; ``"trivial"``,
    the loss there of the training part's empirical quantiles, which no epoch, batch size or seed changes;
    ``"traced"``, no loss, and as memory the traced peak of a step.

    Args:
        folder: has ``sp500.parquet``; the result goes there.
        seeds: one training each,
        batch_sizes: at each of these.
        recipe: for one batch size; `Recipe.at` makes the others of it.
        workers: trainings at a time, each in a process and on a thread of its own.
        kept: where each training is put that has ended.

    Returns:
        The stored table: kind, batch_size, seed, epoch, step, loss, memory, seconds.
    """
    recipes = [replace(recipe.at(size), seed=seed) for seed, size in product(seeds, batch_sizes)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        return store(folder, pool.map(partial(run_or_recall, folder, kept), recipes), recipe)


def store(folder: Path, tables: Iterable[pd.DataFrame], recipe: Recipe) -> pd.DataFrame:
    """Writes trainings, one table each, beside the trivial forecast, and notes where they come from."""
    split = tft_windows(folder / "sp500.parquet", NARROW)
    trivial = trivial_loss(split.train, split.validation, NARROW.quantiles)
    trained = pd.concat(tables)
    seeds = {str(size): sorted(set(run)) for size, run in trained.groupby("batch_size")["seed"]}
    none = dict.fromkeys(("batch_size", "seed", "epoch", "step"), 0)
    rows = pd.DataFrame([{"kind": "trivial", "loss": trivial, **none}])
    columns = ["kind", "batch_size", "seed", "epoch", "step", "loss", "memory", "seconds"]
    table = pd.concat([trained, rows], ignore_index=True)[columns].astype({"memory": "Int64"})
    table.to_parquet(folder / STORED, index=False)
    record(
        folder,
        STORED,
        {
            "source": "sp500.parquet",
            "made_by": "python -m everybyte.training",
            "made_on": datetime.now(UTC).date().isoformat(),
            "content": "losses in units of target, the standard deviation of the training part's log returns; memory "
            "in bytes: the process's largest resident set, or traced; seconds of processor time",
            "target_scale": split.train.target_scale,
            "windows": {"train": len(split.train), "validation": len(split.validation)},
            "settings": {name: value for name, value in asdict(recipe).items() if name != "seed"},
            "learning_rates": {size: recipe.at(int(size)).learning_rate for size in seeds},
            "seeds": seeds,
            "model": asdict(NARROW),
            "threads": 1,
            "versions": versions(),
        },
    )
    return table


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks/data")
    made = make(where).set_index("kind").loc[["trivial", "validation"]]
    print(f"{where / STORED}\n{made.to_string()}")
