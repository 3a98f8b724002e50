"""The nine recommendations side by side: what a step each way keeps, how high it goes, and what it teaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .data import Batch
from .models import tft_fixes
from .models.tft import TFT, TemporalAttention, TFTConfig, batch_loss, quantile_loss
from .models.tft_fixes import Way
from .models.tft_selection import grouped_state
from .run import Run
from .saved import Saved, saved
from .training import one_thread
from .units import MB
from .ways import take


def grouped(config: TFTConfig) -> TFTConfig:
    """The model with one product for all variables."""
    return replace(config, selection_compute="grouped")


def steps(
    run: Run, config: TFTConfig, batch: Batch, ways: Mapping[str, Way], watched: Collection[str] | None = None
) -> tuple[pd.DataFrame, dict[str, list[Saved]]]:
    """A step each way on one model, by PyTorch's fused Adam, which makes no temporaries of its own.

    Args:
        run: A trace or a measurement that has not begun.
        config: Of the model.
        batch: On the host.
        ways: The first makes Adam's state and is left out of the table.
        watched: As in `everybyte.ways.take`, whose second result this has too.

    Returns:
        A frame with a row a way: `kept`, bytes that its forward passes leave for backward at one time, `peak`, the most
        that is live in the step, and `growth`, what the step leaves behind.
    """

    def build() -> tuple[TFT, torch.optim.Optimizer]:
        model = TFT(config)
        return model, torch.optim.Adam(model.parameters(), 1e-4, fused=True)

    table, kept = take(run, build, batch, batch_loss, ways, watched)
    for name, passes in kept.items():
        together = sum if name == "losses summed" else max
        table.loc[name, "kept"] = together(each.total_bytes for each in passes)
    return table.reindex(columns=["kept", "peak", "growth"]).iloc[1:].astype("Int64"), kept


def compared(make: Callable[[], Run], config: TFTConfig, batch: Batch, ways: Mapping[str, Way]) -> pd.DataFrame:
    """`steps` of all ways, and below them that of the grouped model, which has a run of its own."""
    loop, _ = steps(make(), config, batch, ways)
    twice = {"(first)": tft_fixes.step, "grouped": tft_fixes.step}
    return pd.concat([loop, steps(make(), grouped(config), batch, twice)[0]])


def trained(config: TFTConfig, batch: Batch, ways: Mapping[str, Way], turns: int) -> tuple[pd.Series, pd.Series]:
    """Trains a model each way from the same weights, in turns: whatever else the machine does falls on all alike.

    Args:
        config: Of the models; that of the way "grouped" computes its selection grouped.
        batch: The one that they learn.
        ways: By name; one is "as it stands".
        turns: Steps of each.

    Returns:
        For each way the median of its steps' processor time as a multiple of that of "as it stands", and by what share
        its loss is off in the end.
    """
    torch.manual_seed(0)
    weights = TFT(config).state_dict()
    models = {name: TFT(grouped(config) if name == "grouped" else config) for name in ways}
    for name, model in models.items():
        model.load_state_dict(grouped_state(weights) if name == "grouped" else weights)
    adams = {name: torch.optim.Adam(model.parameters(), 1e-3, fused=True) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with one_thread():
        for name in [*ways] * turns:
            begun = time.process_time()
            ways[name](models[name], adams[name], batch, batch_loss)
            seconds[name].append(time.process_time() - begun)
        losses = pd.Series({name: batch_loss(model, batch).item() for name, model in models.items()})
    median = pd.DataFrame(seconds).median()
    return median / median["as it stands"], losses / losses["as it stands"] - 1


def times(ratio: float) -> str:
    """A ratio of times in words: a quarter more or less may be chance, and a second digit is."""
    return "about 1" if 0.8 < ratio < 1.25 else f"{ratio:.1f}"


def effect(away: float) -> str:
    """By what share a loss is off, in words where it is nothing or next to nothing."""
    return "0" if away == 0 else "below 10⁻⁴" if abs(away) < 1e-4 else f"{away:+.2%}"


def nine(
    found: Mapping[str, int], small: Mapping[str, int], ratio: Mapping[str, float], away: Mapping[str, float]
) -> pd.DataFrame:
    """The nine recommendations as a page shows them: claimed, saved, saved by a small model, time, loss.

    Args:
        found: Bytes saved at full size, by way.
        small: Bytes saved by the small model.
        ratio: Time with the fix over time without.
        away: By what share the loss is off.
    """
    rows = {
        title: ("" if claim is None else f"{claim / MB:,.7g} MB", f"{found[way]:,}", f"{small[way]:,}",
                f"{times(ratio[way])} ×", effect(away[way]))
        for way, (title, claim) in tft_fixes.NINE.items()
    }  # fmt: skip
    columns = ["claimed", "saved", "saved, small", "time", "loss off by"]
    return pd.DataFrame(rows, columns).T.rename_axis("recommendation")


def forecasts(models: Mapping[str, TFT], batch: Batch) -> pd.DataFrame:
    """Forecasts of several models for one batch, compared with the first one's.

    Returns:
        A frame with a row a model: its `quantile loss`, the largest `difference` of a number from the first model's, as
        a share of these numbers' standard deviation, and `seconds` of processor time.
    """
    rows, first = {}, None
    with one_thread(), torch.no_grad():
        for name, model in models.items():
            begun = time.process_time()
            y = model(*batch[:3])
            spent = time.process_time() - begun
            first = y if first is None else first
            loss = quantile_loss(y, batch.target, model.quantiles).item()
            rows[name] = loss, ((y - first).abs().max() / first.std()).item(), spent
    return pd.DataFrame(rows, ["quantile loss", "difference", "seconds"]).T


def gradients(way: Way, config: TFTConfig, batch: Batch) -> dict[str, Tensor]:
    """What a step gives the parameters that learn, by name; the weights are those of `trained`."""
    torch.manual_seed(0)
    model = TFT(config)
    still = torch.optim.SGD(model.parameters(), 0.0)
    with one_thread(), patch.object(still, "zero_grad"):
        way(model, still, batch, batch_loss)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_kind(kept: Saved) -> pd.Series:
    """Bytes kept by element type, the half-precision copies of weights apart, and what LayerNorms keep."""
    rows = kept.frame()
    copies = rows["why"].str.startswith("weight of a product") & (rows["dtype"] == "float16")
    kinds = rows["dtype"].mask(copies, "float16, copies of weights")
    kinds = kinds.mask(rows["op"] == "native_layer_norm", rows["dtype"] + ", of LayerNorms")
    return rows.groupby(kinds)["nbytes"].sum()


def become_zero(gradients: Iterable[Tensor], factor: float = 2.0**16) -> dict[str, float]:
    """The share of gradients other than 0 that are 0 in half precision; `factor` is what GradScaler begins with."""
    every = torch.cat([gradient.flatten() for gradient in gradients])
    every = every[every != 0]
    cast = {"fp16": every.half(), "fp16, scaled": (every * factor).half(), "bf16": every.bfloat16()}
    return {name: (x == 0).float().mean().item() for name, x in cast.items()}


def attention_alone(run: Run, config: TFTConfig, batch: int) -> pd.DataFrame:
    """Attention by itself: whole, in four parts, either of these computed again, and fused.

    Returns:
        A frame with a row a way: `kept` for backward, and above what was there the `training peak` of a forward and a
        backward pass and the `inference peak` of a forward pass without a graph.
    """
    with one_thread(), run:
        whole, fused = TemporalAttention(config), TemporalAttention(replace(config, fused_attention=True))
        again = partial(checkpoint, whole, use_reentrant=False)
        ways = {
            "whole": whole,
            "in parts": partial(tft_fixes.attend_in_parts, whole),
            "recomputed": again,
            "in parts, recomputed": partial(tft_fixes.attend_in_parts, again),
            "fused": fused,
        }
        x = run.to_device(torch.ones(batch, config.history + config.horizon, config.hidden)).requires_grad_()
        kept: list[int] = []
        for number in run.steps(2 * len(ways)):
            way, made = [*ways.values()][number // 2], []
            if number % 2:
                with torch.no_grad():
                    way(x)
                continue
            kept.append(saved(lambda way=way, made=made: made.append(way(x)) or made[0]).total_bytes)
            made.pop().sum().backward()
            x.grad = None
            whole.zero_grad(), fused.zero_grad()
    table = run.timeline.without("scratch").growth_per_step()
    above = (table["peak"] - table["start"]).to_numpy().reshape(-1, 2)
    return pd.DataFrame(above, [*ways], ["training peak", "inference peak"]).assign(kept=kept)
