"""The benchmarks: their driver on a model that takes no time, and the stored table, which has what its page says."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import pandas as pd
import pytest
from conftest import ROOT

from everybyte.models import GPTConfig
from everybyte.units import GiB

TINY = GPTConfig(vocabulary=16, context=4, layers=1, hidden=4, heads=1)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def driven() -> pd.DataFrame:
    """The driver's table of a tiny model, in a process that was made for it, as the command's is."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import run
    from cost import profile
    from speed import decoder, really, replayed, traced, tracked

    build = decoder(TINY)

    def steps():
        yield traced("tiny", build, "cpu", times=2)
        yield from really("tiny", build, times=2)
        yield tracked("tiny", build)

    parts = {
        "speed": steps,
        "profile": lambda: profile("tiny", build, times=2),
        "replay": lambda: replayed("tiny", build),
    }
    *_, table = run.collected(parts)
    return table


def test_the_driver_makes_a_table_of_a_step_that_is_traced_run_tracked_and_profiled():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        table = pool.submit(driven).result(timeout=120)
    assert set(table["part"]) == {"speed", "profile", "replay"}
    assert_spread(table)
    trace, real, _, tracker = table[table["part"] == "speed"].to_dict("records")
    assert trace["difference"] == 0
    assert real["peak"] == trace["true"] == tracker["true"]
    assert real["ratio"] == pytest.approx(real["least"] / trace["least"])
    of_parts = table[table["part"] == "profile"].iloc[1:]
    assert of_parts["ratio"].between(0, 1).all()
    assert table.attrs["cores"] >= 1 and table.attrs["torch"]


def test_a_row_without_a_spread_is_refused(benchmarks):
    from row import Row, table

    with pytest.raises(ValueError, match="no spread"):
        table([Row("model", "tool", (1.0,))])


def test_formulas_that_stand_here_are_those_of_the_papers_on_round_sizes(benchmarks):
    import peers

    c = GPTConfig(vocabulary=128, context=8, layers=1, hidden=16, heads=2)
    b, s, h, a, v = peers.BATCH, 8, 16, 2, 128
    (says,) = peers.eleutherai(peers.decoder(c))
    assert says.activations == s * b * h * 34 + 5 * a * s * s * b  # Korthikanti et al., equation 2
    (says,) = peers.megatron(peers.decoder(c))
    assert says.activations == round(1.05 * (s * b * h * 34 + 8 * s * b + s * b * h + 2 * s * b * (v + h)))
    assert says.total - says.activations == 18 * (12 * h * h + 6 * h + v * h)


def assert_spread(table: pd.DataFrame) -> None:
    assert (table["times"] >= 2).all()
    assert (table["least"] <= table["most"]).all()
    assert (table["ratio least"] <= table["ratio"]).all() and (table["ratio"] <= table["ratio most"]).all()


def test_the_stored_table_has_a_spread_in_every_row_and_what_the_page_promises():
    table = pd.read_parquet(ROOT / "book" / "benchmarks.parquet")
    assert_spread(table)
    assert {"cores", "processor", "torch", "date", "seconds"} <= table.attrs.keys()
    assert table.attrs["seconds"] < 20 * 60
    trackers = table[table["tool"] == "MemTracker"].set_index("what")
    assert trackers.loc["1.3B decoder, 4 × 2,048 tokens", "ratio"] >= 10
    real, alone = (table[table["tool"] == how].set_index("what") for how in ("really run", "really run, on one core"))
    assert alone.loc["TFT of 225 variables, batch 8", "ratio"] > 1  # the trace takes one core, too
    depths = table[table["part"] == "depths"].set_index("units")
    assert depths.loc[100, "ratio"] < 1.3
    assert table["memory"].max() < GiB
    traced = table[(table["evidence"] == "traced") & table["what"].isin(real.index)]
    assert len(traced) == len(real) and (traced["difference"] == 0).all()
