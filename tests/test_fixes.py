"""Nine recommendations as ways to take a step: what they must not change they do not, and what they store is theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everybyte as eb
from everybyte import cards, data, fixes
from everybyte.formulas import tft as formulas
from everybyte.formulas.terms import integer
from everybyte.models import tft_fixes
from everybyte.models.tft import TFT, TFTConfig, batch_loss
from everybyte.models.tft_loops import AttentionCache
from everybyte.training import one_thread

SMALL = TFTConfig(
    features=8, static_features=2, known_features=2, observed_features=4, history=5, horizon=3, hidden=8, heads=2,
    stack_layers=1, dropout=0.0,
)  # fmt: skip


def batch_of(size: int) -> data.Batch:
    torch.manual_seed(1)
    return data.Batch(*(torch.randn(shape) for shape in SMALL.input_shapes(size).values()))


@settings(max_examples=2, deadline=None)
@given(st.integers(4, 9), st.integers(2, 4))
def test_a_way_that_claims_only_to_save_memory_has_the_gradients_of_the_plain_step(batch, microbatches):
    ways = tft_fixes.ways(AttentionCache(detached=True), microbatches)
    expected = fixes.gradients(ways.pop("as it stands"), SMALL, batch_of(batch))
    for name in ways.keys() - {"mixed precision", "sketch, unrecorded"}:
        torch.testing.assert_close(fixes.gradients(ways[name], SMALL, batch_of(batch)), expected)
    unrecorded = fixes.gradients(ways["sketch, unrecorded"], SMALL, batch_of(batch))
    behind = {name for name in expected if name.startswith("historical_selection.variables")}
    assert behind and expected.keys() - unrecorded.keys() >= behind


def test_afterwards_the_model_is_as_it_was():
    model, cache = TFT(SMALL), AttentionCache(detached=True)
    before = [(vars(part).keys(), getattr(part, "fused", None)) for part in model.modules()]
    still = torch.optim.SGD(model.parameters(), 0.0)
    for way in tft_fixes.ways(cache).values():
        way(model, still, batch_of(4), batch_loss)
    assert [(vars(part).keys(), getattr(part, "fused", None)) for part in model.modules()] == before
    assert not model.attention._forward_hooks and model.historical_selection.compute == "loop"
    assert [entry.requires_grad for entry in cache.values()] == [False]


def test_small_model_takes_each_way_what_the_trace_says():
    ways = tft_fixes.ways(AttentionCache(detached=True))
    ways = {way: ways[way] for way in ("(first)", "as it stands", "attention in parts", "losses summed", "cached")}
    with one_thread():
        traced, measured = (
            fixes.compared(make, SMALL, batch_of(4), ways)
            for make in (partial(eb.trace, "cpu"), partial(eb.measure, "cpu"))
        )
        pd.testing.assert_frame_equal(traced, measured)
        alone = [fixes.attention_alone(run, SMALL, 4) for run in (eb.trace("cpu"), eb.measure("cpu"))]
    assert alone[0].equals(alone[1])
    entry = 4 * 4 * (SMALL.history + SMALL.horizon) * SMALL.hidden
    assert traced.loc["cached", "growth"] == entry
    assert traced.loc["as it stands", "kept"] < traced.loc["losses summed", "kept"] < traced.loc["grouped", "kept"]


def test_stored_table_has_each_way_and_keeps_what_the_closed_form_says():
    stored = pd.read_parquet(Path(__file__).parent.parent / "notebooks" / "data" / cards.STORED)
    table = stored.query("kind == 'fix'").set_index("way")
    assert {*table.index} == {*tft_fixes.ways(AttentionCache()), "grouped"} - {"(first)"}
    sizes = partial(formulas.sizes, mask=1, number=0, generator=0)
    for way, compute in (("as it stands", "loop"), ("grouped", "grouped")):
        config = replace(cards.PLAIN, selection_compute=compute)
        assert table.loc[way, "kept"] == integer(formulas.saved(config), sizes(config))


@pytest.mark.parametrize(("ratio", "words"), [(0.79, "0.8"), (0.81, "about 1"), (1.24, "about 1"), (1.66, "1.7")])
def test_times_that_may_be_chance_are_said_to_be_about_one(ratio, words):
    assert fixes.times(ratio) == words


def test_effect_is_a_number_where_it_is_one():
    assert [fixes.effect(x) for x in (0.0, -9e-5, 2e-3)] == ["0", "below 10⁻⁴", "+0.20%"]


def test_forecasts_are_compared_with_the_first_models():
    torch.manual_seed(0)
    model = TFT(SMALL)
    off = TFT(SMALL)
    off.load_state_dict(model.state_dict())
    with torch.no_grad():
        off.head.output.bias += 1.0
    table = fixes.forecasts({"model": model, "off": off}, batch_of(4))
    spread = model(*batch_of(4)[:3]).std().item()
    assert table.loc["model", "difference"] == 0
    assert table.loc["off", "difference"] == pytest.approx(1 / spread, rel=1e-4)


def test_become_zero_counts_what_half_precision_has_no_number_for():
    gradients = [torch.tensor([0.0, 1.0, 2.0**-30, 2.0**-60])]
    assert fixes.become_zero(gradients) == pytest.approx({"fp16": 2 / 3, "fp16, scaled": 1 / 3, "bf16": 0.0})
