"""The stored table of cards is what a trace says now, and the way to it goes by traces."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from everybyte import Allocator, cards
from everybyte.models.tft import TFTConfig
from everybyte.units import MiB

STORED = Path(__file__).parent.parent / "notebooks" / "data"
SMALL = TFTConfig(
    features=12, static_features=2, known_features=3, observed_features=7, history=6, horizon=3, hidden=32, heads=2,
    stack_layers=1,
)  # fmt: skip
GPU = cards.CARDS["4 GB"]


@pytest.fixture(scope="module")
def stored() -> pd.DataFrame:
    return pd.read_parquet(STORED / cards.STORED)


@pytest.mark.parametrize("name", [cards.STORED, cards.STEPS])
def test_stored_tables_are_those_their_provenance_describes(name):
    entry = json.loads((STORED / "provenance.json").read_text())[name]
    assert entry["sha256"] == hashlib.sha256((STORED / name).read_bytes()).hexdigest()


def test_stored_table_has_each_batch_and_card_both_ways(stored):
    steps, edges = (stored[stored["kind"] == kind] for kind in ("step", "card"))
    assert set(zip(steps["way"], steps["batch_size"], strict=True)) == {
        (way, size) for way in cards.WAYS for size in cards.BATCH_SIZES
    }
    assert set(zip(edges["way"], edges["card"], strict=True)) == {(w, card) for w in cards.WAYS for card in cards.CARDS}
    assert (edges["least"] <= edges["most"]).all()
    assert (steps["peak"] < steps["allocated"]).all() and (steps["allocated"] <= steps["reserved"]).all()


def test_stored_step_traced_again_takes_the_same_bytes(stored):
    was = stored.query("kind == 'step' and way == 'as it stands' and batch_size == 8").squeeze()
    now = cards.held("as it stands", 8)
    assert {name: was[name] for name in now} == now


def test_largest_batch_fits_and_the_next_does_not_whatever_the_room():
    for room in (24 * MiB, 40 * MiB):
        (found,) = cards.largest(SMALL, GPU, [room])
        assert found > 8
        for size, fits in ((found, True), (found + 1, False)):
            replay = Allocator(total=room).replay(cards.traced(SMALL, size, GPU))
            assert (replay.out_of_memory is None) is fits
    assert cards.largest(SMALL, GPU, [2 * MiB]) == [0]


@pytest.mark.parametrize("compute", ["loop", "streamed"])
def test_line_through_two_batches_is_what_any_batch_allocates(compute):
    config = replace(SMALL, selection_compute=compute, selection_keep=0)
    for size in (5, 40):
        guess, truth = cards.line(config, GPU)(size), cards.traced(config, size, GPU).without("scratch")
        assert guess.table["nbytes"].equals(truth.table["nbytes"])


def test_stored_steps_are_of_each_planned_batch_and_their_memory_never_falls():
    stored = pd.read_parquet(STORED / cards.STEPS)
    assert sorted(stored["batch_size"].unique()) == list(cards.PLANNED)
    for size, run in stored.groupby("batch_size"):
        assert len(run) * size == cards.WINDOWS and run["loss"].map(math.isfinite).all()
        assert run["memory"].is_monotonic_increasing
