"""The chapter's edit to pytorch-forecasting: another way to compute the same, with the same parameters."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybyte as eb
from everybyte.script import Program

DATA = Path(__file__).parents[1] / "notebooks/data"
BARS = str(DATA / "sp500_small_features.parquet")

pytest.importorskip("pytorch_forecasting", reason="the recipe is for pytorch-forecasting: pip install it")
with mock.patch.object(sys, "path", [str(DATA), *sys.path]):
    recipe, script = import_module("streamed_selection"), import_module("forecast")
Selection, whole, streamed = recipe.VariableSelectionNetwork, recipe.whole, recipe.streamed
HIDDEN, BATCH, STEPS = 6, 2, 3


def swapped(chunk: int = 8):
    return mock.patch.multiple(recipe, CHUNK=chunk), mock.patch.object(Selection, "forward", streamed)


def selection(kinds: list[bool], context: bool, dropout: float) -> Selection:
    """In double precision; of each variable, whether it is an embedding, which the library does not scale."""
    torch.manual_seed(0)
    sizes = {f"x{i}": 5 if embedded else 4 for i, embedded in enumerate(kinds)}
    flags = {f"x{i}": True for i, embedded in enumerate(kinds) if embedded}
    size = HIDDEN if context else None
    return Selection(sizes, HIDDEN, input_embedding_flags=flags, dropout=dropout, context_size=size).double()


def outcome(forward, made: Selection, steps: tuple[int, ...], context: bool) -> dict[str, Tensor]:
    """Output, weights, and every gradient of a fixed function of both; and what is drawn at random afterwards."""
    made.zero_grad()
    torch.manual_seed(1)
    leaves = {
        name: torch.randn(BATCH, *steps, 1 if name in made.prescalers else size, dtype=torch.double).requires_grad_()
        for name, size in made.input_sizes.items()
    }
    around = torch.randn(BATCH, *steps, HIDDEN, dtype=torch.double).requires_grad_() if context else None
    output, weights = forward(made, leaves, around)
    drawn = torch.rand(3)
    (output.pow(2).sum() + (weights * torch.linspace(0, 1, weights.numel()).view_as(weights)).sum()).backward()
    found = {"output": output.detach(), "weights": weights.detach(), "drawn afterwards": drawn}
    found |= {name: x.grad for name, x in leaves.items()} | ({"context": around.grad} if context else {})
    return found | {name: p.grad.clone() for name, p in made.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


kinds = st.lists(st.booleans(), min_size=2, max_size=9)
chunks, shapes = st.integers(1, 10), st.sampled_from(((), (STEPS,)))


@settings(max_examples=60)
@given(kinds, chunks, shapes, st.booleans())
def test_streamed_selection_has_the_library_s_output_weights_and_gradients(kinds, chunk, steps, context):
    made = selection(kinds, context, dropout=0.0)
    with mock.patch.object(recipe, "CHUNK", chunk):
        found = outcome(streamed, made, steps, context)
    assert_same(found, outcome(whole, made, steps, context), rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(kinds, chunks, shapes, st.booleans())
def test_what_is_computed_again_draws_the_dropout_that_was_drawn_at_first(kinds, chunk, steps, context):
    made = selection(kinds, context, dropout=0.4)
    with mock.patch.object(recipe, "CHUNK", chunk):
        found = outcome(streamed, made, steps, context)
        with mock.patch.object(recipe, "checkpoint", lambda part, *given, use_reentrant: part(*given)):
            kept = outcome(streamed, made, steps, context)
    assert_same(found, kept, rtol=0, atol=0)


def test_streamed_selection_draws_as_many_numbers_as_the_library_so_what_follows_is_the_same():
    made = selection([False] * 5, True, dropout=0.4)
    found, wanted = (outcome(forward, made, (STEPS,), True) for forward in (streamed, whole))
    assert torch.equal(found["drawn afterwards"], wanted["drawn afterwards"])
    assert not torch.equal(found["output"], wanted["output"])  # the weights' network draws first here, there last


@pytest.mark.parametrize("count", [0, 1])
def test_selection_among_less_than_two_variables_is_the_library_s(count):
    made = selection([False] * count, True, dropout=0.0)
    x, context = {f"x{i}": torch.randn(2, 3, 1).double() for i in range(count)}, torch.randn(2, 3, HIDDEN).double()
    for found, wanted in zip(streamed(made, x, context), whole(made, x, context), strict=True):
        assert torch.equal(found, wanted)


def test_streamed_selection_under_autocast_is_as_near_to_single_precision_as_the_library():
    made = selection([False] * 9, False, dropout=0.0).float()
    x = {f"x{i}": torch.randn(64, 5, 1) for i in range(9)}
    exact = whole(made, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        off = [(forward(made, x)[0] - exact).norm() / exact.norm() for forward in (streamed, whole)]
    assert 0 < off[0] < 1.5 * off[1]


# -- the whole model ---------------------------------------------------------------------------------------------------


def arguments(*more: str) -> list[str]:
    return [BARS, "--symbols", "1", "--variables", "6", "--hidden", "16", "--heads", "2", "--batch-size", "8", *more]


@pytest.fixture(scope="module")
def windows():
    return script.windows(script.arguments(arguments()))


def model(windows, **changes) -> nn.Module:
    torch.manual_seed(0)
    made = script.network(windows, script.arguments(arguments("--dropout", "0")))
    return type(made)(**{**made.hparams, **changes}).double() if changes else made.double()


def learned(made: nn.Module, windows) -> dict[str, Tensor]:
    x, (y, _) = next(iter(windows.to_dataloader(train=False, batch_size=8)))
    x = {name: value.double() if value.is_floating_point() else value for name, value in x.items()}
    made.zero_grad()
    prediction = made(x)["prediction"]
    made.loss.loss(prediction, y.double()).sum().backward()
    gradients = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"prediction": prediction.detach(), **gradients}


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_predicts_and_learns_what_it_did_before_the_edit(windows, shared):
    made = model(windows, share_single_variable_networks=shared)
    wanted = learned(made, windows)
    chunk, forward = swapped(5)
    with chunk, forward:
        assert_same(learned(made, windows), wanted, rtol=1e-9, atol=1e-12)


def test_what_was_trained_before_the_edit_goes_on_after_it_and_back(windows):
    before = model(windows)
    state = before.state_dict()
    chunk, forward = swapped()
    with chunk, forward:
        after = model(windows)
        nn.init.zeros_(after.output_layer.bias)
        assert [(n, v.shape) for n, v in after.state_dict().items()] == [(n, v.shape) for n, v in state.items()]
        after.load_state_dict(state)
        found = learned(after, windows)
    assert_same(found, learned(before, windows), rtol=1e-9, atol=1e-12)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_script_with_the_edit_allocates_what_it_really_does():
    program = Program(str(DATA / "forecast.py"), tuple(arguments()), steps=2)
    traced = program.trace(rules="cpu", changes=swapped()).run.timeline.without("scratch")
    measured = program.measure(changes=swapped()).run.timeline.without("scratch")
    assert traced.peak_bytes == measured.peak_bytes
    pd.testing.assert_series_equal(traced.allocations(1), measured.allocations(1))


def above_start(forward, count: int, width: int) -> int:
    """Bytes that a forward and a backward pass have at their peak beside parameters, gradients and inputs."""
    with eb.trace(rules="cpu") as run:
        made = Selection({f"x{i}": 4 for i in range(count)}, width, dropout=0.1, context_size=width)
        x = {name: torch.randn(8, 10, 1) for name in made.input_sizes}
        context = torch.randn(8, 10, width)
        for _ in run.steps(1):
            forward(made, x, context)[0].sum().backward()
    return run.timeline.without("scratch", "gradient").peak_above_start


def test_a_variable_more_costs_less_than_half_of_its_output_where_the_library_takes_more_than_six():
    width, few, many = 64, 24, 48
    output = 4 * 8 * 10 * width
    grown = {f: (above_start(f, many, width) - above_start(f, few, width)) / (many - few) for f in (streamed, whole)}
    assert grown[streamed] < output / 2 and grown[whole] > 6 * output


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_stored_batches_are_the_largest_that_fit_and_one_more_was_tried():
    stored = pd.read_parquet(DATA / "forecasting.parquet")
    assert {*stored["way"]} == {"as it is", "checkpoints", "streamed"} and {*stored["phase"]} == {"train", "predict"}
    for _, tries in stored.query("phase == 'train'").groupby("way"):
        tries = tries.set_index("batch_size").sort_index()
        assert tries.index[~tries["fits"]].min() == tries.index[tries["fits"]].max() + 1
        assert tries["peak"].is_monotonic_increasing


def test_a_stored_row_traced_again_is_the_same():
    stored = pd.read_parquet(DATA / "forecasting.parquet").query("way == 'streamed' and phase == 'train'")
    row = stored.set_index("batch_size").loc[64]
    program = Program(str(DATA / "forecast.py"), (BARS, "--symbols", "2"), steps=2)
    timeline = program.trace("t4", changes=swapped()).run.timeline
    assert timeline.peak_bytes == row["peak"]
    assert eb.Allocator().replay(timeline.with_workspaces()).peak_reserved == row["reserved"]


def test_stored_batches_say_with_which_versions_they_were_traced():
    entry = json.loads((DATA / "provenance.json").read_text())["forecasting.parquet"]
    assert {"torch", "pytorch-forecasting", "lightning"} == {*entry["versions"]}
