"""The book's training steps and prompts at full size: each a named run, the same under `trace` and `measure`.

    case = cases.cases()["gpt-eager"]
    with everybyte.trace(rules="cuda", gpu="h100-80gb") as run:
        case.run(run)

`Sizes` makes them smaller, for tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from .data import tft_windows
from .models import GPT, TFT, GPTConfig, KVCache, MasterWeights, TFTConfig, generate
from .run import Run
from .training import train_step
from .units import round_up

FEATURES: Final = Path(__file__).parents[2] / "notebooks" / "data" / "sp500_small_features.parquet"
NEW_TOKENS: Final = 8
_GPT, _TFT = GPTConfig.seed(), TFTConfig()


@dataclass(frozen=True)
class Case:
    """A run of the book.

    Attributes:
        name: What its file is called.
        what: What runs, for a table.
        body: Runs it; takes the run, inside its `with` block.
    """

    name: str
    what: str
    body: Callable[[Run], None]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. The default is the book's.

    Attributes:
        gpt: The decoder.
        batch, sequence: Of its batches.
        vocabulary: Of the case about the loss head.
        tft: The fusion transformer.
        tft_batches: Its batches, the most telling first.
        lengths: How many steps of other lengths.
        steps: Of every other training.
    """

    gpt: GPTConfig = _GPT
    batch: int = 4
    sequence: int = 2048
    vocabulary: int = 128_256
    tft: TFTConfig = _TFT
    tft_batches: tuple[int, ...] = (8, 64, 4, 32, 16)
    lengths: int = 8
    steps: int = 2


FULL: Final = Sizes()
SMALL: Final = Sizes(
    GPTConfig(context=64), 2, 64, 512, tft=replace(_TFT, hidden=8), tft_batches=(8,), lengths=3, steps=1
)
"""For a rehearsal on a CPU: the same code on little data."""


def cases(sizes: Sizes = FULL) -> dict[str, Case]:
    """The cases by name, the most telling first."""
    return {case.name: case for case in _cases(sizes)}


def _cases(sizes: Sizes) -> Iterator[Case]:
    # Two things at a time: each of the first few answers a question that no other does.
    fusion = list(_fusion(sizes))
    decoder = list(_decoder(sizes))
    yield from (decoder[0], fusion[0], decoder[1], fusion[1])
    yield from _inference(sizes)
    yield from _head(sizes)
    yield from _lengths(sizes)
    yield from decoder[2:]
    yield from fusion[2:]


def _decoder(sizes: Sizes) -> Iterator[Case]:
    data = _tokens(sizes.batch, [sizes.sequence] * sizes.steps)
    for checkpoint in ("none", "full"):
        for dropout in (0.1, 0.0):
            for attention in ("eager", "fused"):
                config = replace(sizes.gpt, attention=attention, dropout=dropout, checkpoint=checkpoint)
                switches = "" if dropout else "-no-dropout", "" if checkpoint == "none" else "-checkpoint"
                what = f"decoder, {attention} attention, dropout {dropout}, checkpoint {checkpoint!r}"
                yield Case(f"gpt-{attention}{''.join(switches)}", what, partial(_train, config, data))


def _head(sizes: Sizes) -> Iterator[Case]:
    data = _tokens(sizes.batch, [sizes.sequence] * sizes.steps)
    for loss in ("full", "chunked"):
        config = replace(sizes.gpt, layers=1, vocabulary=sizes.vocabulary, attention="fused", dropout=0.0, loss=loss)
        what = f"one layer under a vocabulary of {sizes.vocabulary:,} words, loss {loss!r}"
        yield Case(f"head-{loss}", what, partial(_train, config, data))


def _lengths(sizes: Sizes) -> Iterator[Case]:
    chance = random.Random(2)
    least, bucket = max(1, sizes.sequence // 16), -(-sizes.sequence // 4)
    lengths = [sizes.sequence, *(chance.randint(least, sizes.sequence) for _ in range(sizes.lengths - 1))]
    chance.shuffle(lengths)
    config = replace(sizes.gpt, layers=min(4, sizes.gpt.layers))
    bucketed = [min(sizes.sequence, round_up(n, bucket)) for n in lengths]
    for name, what, order in (
        ("lengths-as-they-come", "sequences of random lengths", lengths),
        ("lengths-bucketed", "the same in four buckets", bucketed),
    ):
        yield Case(name, f"{config.layers} layers, {what}", partial(_train, config, _tokens(sizes.batch, order)))


def _inference(sizes: Sizes) -> Iterator[Case]:
    prompt = sizes.sequence - NEW_TOKENS
    for name, attention, chunk in (
        ("prefill-eager", "eager", None),
        ("prefill-eager-chunked", "eager", sizes.sequence // 8),
        ("prefill-fused", "fused", None),
    ):
        config = replace(sizes.gpt, attention=attention, dropout=0.0)
        read = "read at once" if chunk is None else f"read in chunks of {chunk}"
        what = f"{attention} attention, KV cache, a prompt of {prompt:,} tokens {read}, then {NEW_TOKENS} generated"
        yield Case(name, what, partial(_answer, config, sizes.batch, prompt, chunk))


def _fusion(sizes: Sizes) -> Iterator[Case]:
    for batch in sizes.tft_batches:
        for way in ("loop", "streamed"):
            config = replace(sizes.tft, selection_compute=way)
            what = f"TFT-225, batch {batch}, selection {way!r}"
            yield Case(f"tft-{way}-{batch}", what, partial(_forecast, config, batch, sizes.steps))


def _tokens(batch: int, lengths: list[int]) -> list[torch.Tensor]:
    """Token indices and targets for each step, [2, b, s]: their values do not matter here."""
    return [torch.zeros(2, batch, length, dtype=torch.int64) for length in lengths]


def _train(config: GPTConfig, data: list[torch.Tensor], run: Run) -> None:
    model = GPT(config)
    optimizer = MasterWeights(model.parameters())
    for step in run.steps(len(data)):
        tokens, targets = run.to_device([*data[step]])
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def _answer(config: GPTConfig, batch: int, prompt: int, chunk: int | None, run: Run) -> None:
    model = GPT(config).eval()
    tokens = run.to_device(torch.zeros(batch, prompt, dtype=torch.int64, device="cpu"))
    cache = KVCache(config, batch, prompt + NEW_TOKENS)
    for _ in run.steps(1):
        generate(model, tokens, NEW_TOKENS, chunk, cache)


def _forecast(config: TFTConfig, batch: int, steps: int, run: Run) -> None:
    if not FEATURES.is_file():
        raise FileNotFoundError(f"{FEATURES} is not there: run from a copy of the whole tree")
    with torch.device("cpu"):
        windows = next(iter(tft_windows(FEATURES, config).train.batches(batch)))
    model = TFT(config)
    optimizer = torch.optim.Adam(model.parameters())
    data: Any = run.to_device(windows)
    for _ in run.steps(steps):
        train_step(model, optimizer, data)
