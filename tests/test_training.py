"""The training loop: it learns, repeats itself, measures honestly, and its stored result is what it claims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from everybyte import data, training
from everybyte.models.tft import TFT, TFTConfig, quantile_loss

STORED = Path(__file__).parent.parent / "notebooks" / "data"
TINY = TFTConfig(hidden=4, heads=2, stack_layers=1, dropout=0.1)
QUICK = training.Recipe(epochs=3, batch_size=8, stride=8, learning_rate=1e-2)


@pytest.fixture(autouse=True, scope="module")
def single() -> Iterator[None]:
    with training.one_thread():
        yield


@pytest.fixture(scope="module")
def split() -> data.Split:
    return data.tft_windows(STORED / "sp500_small_features.parquet", TINY)


@pytest.fixture(scope="module")
def trained(split) -> training.Trained:
    return training.train(TINY, QUICK, split.train, progress=False)


def test_training_repeats_itself_and_leaves_the_global_generator_alone(split, trained):
    before = torch.random.get_rng_state()
    again = training.train(TINY, QUICK, split.train, progress=False)
    assert torch.equal(before, torch.random.get_rng_state())
    told = ["kind", "epoch", "step", "loss"]
    pd.testing.assert_frame_equal(trained.losses[told], again.losses[told], check_exact=True)
    other = training.train(TINY, replace(QUICK, seed=1, epochs=1), split.train, progress=False)
    assert other.losses["loss"][0] != trained.losses["loss"][0]


def test_weights_that_come_back_are_those_of_the_best_epoch_on_held_out_windows(split, trained):
    held_out = trained.losses.query("kind == 'held out'").set_index("epoch")["loss"]
    assert len(held_out) == 3
    assert trained.epoch == held_out.idxmin()
    _, windows = training.hold_out(split.train, QUICK.held_out, TINY.horizon)
    loss = training.evaluate(trained.model, windows.part(step=QUICK.stride))
    assert loss == pytest.approx(held_out.min(), rel=1e-5)


def test_loss_falls_when_a_few_windows_are_seen_again_and_again(split):
    torch.manual_seed(0)
    model = TFT(replace(TINY, dropout=0.0))
    batch = next(split.train.batches(4))
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    no_movement = quantile_loss(torch.zeros(4, 10, 9), batch.target, model.quantiles).item()
    steps = training.fit(model, [batch] * 20, optimizer, progress=False)
    assert steps[-1].loss < no_movement < steps[0].loss


def test_each_step_reports_loss_and_memory_in_bytes_and_says_which_memory(split):
    model, seen = TFT(TINY), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    steps = training.fit(model, split.train.part(stop=8).batches(4), optimizer, progress=False, each=seen.append)
    assert steps == seen and [step.number for step in steps] == [0, 1]
    for step in steps:
        assert np.isfinite(step.loss)
        assert step.memory > 4 * sum(p.numel() for p in model.parameters()) and step.memory_kind == "resident"
        assert f"{step.memory:,} B" in str(step) and "resident" in str(step)


def test_progress_bar_shows_every_step_with_its_memory(split, capsys):
    pytest.importorskip("tqdm")
    model = TFT(TINY)
    batches = split.train.part(stop=8).batches(4)
    training.fit(model, batches, torch.optim.SGD(model.parameters(), 1e-3), total=2)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "resident peak" in shown


def test_gradients_are_cleared_and_clipped(split):
    model = TFT(TINY)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    training.train_step(model, torch.optim.SGD(model.parameters(), 1.0), next(split.train.batches(4)), clip=0.5)
    moved = torch.stack([(p.detach() - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.5, rel=1e-4)  # plain descent at rate 1 moves by the clipped gradient
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_ignores_batch_size_and_dropout_and_leaves_the_model_training(split):
    model = TFT(replace(TINY, dropout=0.5)).train()
    losses = [training.evaluate(model, split.validation, batch_size) for batch_size in (7, 39)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert model.training


def test_trivial_forecast_is_the_empirical_quantiles_of_the_training_part(split):
    learned, target = split.train.target.numpy(), split.validation.target.numpy()
    total = 0.0
    for p in TINY.quantiles:
        missed = target - np.quantile(learned, p, axis=0)
        total += np.where(missed > 0, p * missed, (p - 1) * missed).mean()
    assert training.trivial_loss(split.train, split.validation, TINY.quantiles) == pytest.approx(total, rel=1e-5)


def test_stretched_forecast_is_the_quantiles_of_scaled_targets_times_each_windows_scale(split):
    known, ahead = (0.5 + part.target[:, 0].abs() for part in split)
    learned, target = (split.train.target / known[:, None]).numpy(), split.validation.target.numpy()
    total = 0.0
    for p in TINY.quantiles:
        missed = target - ahead.numpy()[:, None] * np.quantile(learned, p, axis=0)
        total += np.where(missed > 0, p * missed, (p - 1) * missed).mean()
    found = training.stretched_loss(split.train, split.validation, TINY.quantiles, known, ahead)
    assert found == pytest.approx(total, rel=1e-5)
    ones = [torch.ones(len(part)) for part in split]
    trivial = training.trivial_loss(split.train, split.validation, TINY.quantiles)
    assert training.stretched_loss(split.train, split.validation, TINY.quantiles, *ones) == pytest.approx(trivial)


def test_training_starts_from_the_trivial_forecast_itself(split):
    model = TFT(TINY)
    training.start_trivially(model, split.train)
    trivial = training.trivial_loss(split.train, split.validation, TINY.quantiles)
    assert training.evaluate(model, split.validation) == pytest.approx(trivial, rel=1e-5)
    stepwise = TFT(replace(TINY, head="step"))
    with pytest.raises(ValueError, match="change the TFTConfig"):
        training.start_trivially(stepwise, split.train)


def test_held_out_windows_are_later_and_share_no_target_with_the_others(split):
    learn, held_out = training.hold_out(split.train, 0.15, TINY.horizon)
    first, last = held_out.target[0], learn.target[-1]
    assert len(learn) + len(held_out) == len(split.train) - TINY.horizon + 1
    assert not set(first.tolist()) & set(last.tolist())
    assert torch.equal(split.train.target[len(learn) + TINY.horizon - 1], first)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs=0 is not a count"),
        ({"batch_size": "eight"}, "batch_size='eight' is not a count"),
        ({"stride": 1.5}, "stride=1.5 is not a count"),
        ({"held_out": 1.0}, "held_out=1.0 is no share"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 trains nothing"),
    ],
)
def test_impossible_recipes_say_how_to_mend_them(wrong, message):
    with pytest.raises(ValueError, match=message):
        training.Recipe(**wrong)


@pytest.fixture(scope="module")
def stored() -> pd.DataFrame:
    return pd.read_parquet(STORED / training.STORED)


def test_stored_training_is_the_one_its_provenance_describes(stored):
    entry = json.loads((STORED / "provenance.json").read_text())[training.STORED]
    assert entry["sha256"] == hashlib.sha256((STORED / training.STORED).read_bytes()).hexdigest()
    runs = stored.query("kind == 'validation'").groupby("batch_size")["seed"].apply(sorted)
    assert {str(size): seeds for size, seeds in runs.items()} == entry["seeds"]
    assert sorted(runs.index) == list(training.BATCH_SIZES)
    steps = stored.query("kind == 'train'").groupby(["batch_size", "seed", "epoch"]).size()
    assert len(steps) == runs.map(len).sum() * entry["settings"]["epochs"]
    assert (steps.groupby("batch_size").nunique() == 1).all()
    recipe = training.Recipe(**entry["settings"])
    rates = {str(size): recipe.at(size).learning_rate for size in training.BATCH_SIZES}
    assert rates == entry["learning_rates"] and rates["8"] == pytest.approx(recipe.learning_rate / 2)


def test_every_stored_seed_beats_the_trivial_forecast_at_every_batch_size(stored):
    pytest.importorskip("talib")
    parts = data.tft_windows(STORED / "sp500.parquet", training.NARROW)  # computed anew, not believed
    trivial = training.trivial_loss(parts.train, parts.validation, training.NARROW.quantiles)
    assert stored.query("kind == 'trivial'")["loss"].item() == pytest.approx(trivial, rel=1e-5)
    losses = stored.query("kind == 'validation'").set_index(["batch_size", "seed"])["loss"]
    assert set(losses.index) >= {(8, 0), (16, 0), (32, 0), (32, 1), (32, 2), (64, 0)}
    assert (losses < trivial).all(), losses.to_dict()


def test_stored_epoch_was_chosen_by_held_out_windows_not_by_validation(stored):
    held_out = stored.query("kind == 'held out'").pivot(index="epoch", columns=["batch_size", "seed"], values="loss")
    chosen = stored.query("kind == 'validation'").set_index(["batch_size", "seed"])["epoch"]
    assert held_out.idxmin().to_dict() == chosen.to_dict()


def test_first_steps_run_again_are_those_stored_and_their_peak_the_one_stored(stored):
    pytest.importorskip("talib")
    windows = data.tft_windows(STORED / "sp500.parquet", training.NARROW).train
    recipe = training.Recipe().at(8)
    was = stored.query("kind == 'train' and batch_size == 8 and seed == 0 and epoch == 0")["loss"].to_numpy()
    again = training.first_steps(training.NARROW, recipe, windows, 2)
    assert [step.loss for step in again] == pytest.approx(was[:2], rel=training.RERUN_BAND)
    peak = stored.query("kind == 'traced' and batch_size == 8")["memory"].unique()
    assert peak == [training.traced(training.NARROW, recipe, windows).peak_bytes]


def test_first_steps_are_those_of_the_whole_training(split, trained):
    again = training.first_steps(TINY, QUICK, split.train, 2)
    losses = trained.losses.query("kind == 'train' and epoch == 0")["loss"]
    assert [step.loss for step in again] == losses.tolist()[:2] and len(again) == 2


def test_stored_memory_never_falls_and_is_above_what_is_traced(stored):
    for (_, _), run in stored.query("kind != 'trivial'").groupby(["batch_size", "seed"]):
        resident = run.query("kind == 'train'")["memory"]
        assert resident.is_monotonic_increasing
        assert resident.iloc[-1] > run.query("kind == 'traced'")["memory"].item()


def test_threads_are_given_back_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError), training.one_thread():
        assert torch.get_num_threads() == 1
        raise RuntimeError
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_a_training_that_has_ended_is_not_done_again_and_another_recipe_is(monkeypatch, tmp_path):
    (tmp_path / "sp500.parquet").write_bytes(b"bars")
    done = []

    def run_once(folder, recipe):
        done.append(recipe)
        return pd.DataFrame({"loss": [0.5 + recipe.seed]})

    monkeypatch.setattr(training, "run_once", run_once)
    monkeypatch.setattr(training, "versions", lambda: {"torch": "1"})
    for recipe in (QUICK, replace(QUICK, seed=1), QUICK):
        table = training.run_or_recall(tmp_path, tmp_path / "kept", recipe)
        assert table["loss"].tolist() == [0.5 + recipe.seed]
    assert done == [QUICK, replace(QUICK, seed=1)]
    monkeypatch.setattr(training, "versions", lambda: {"torch": "2"})
    training.run_or_recall(tmp_path, tmp_path / "kept", QUICK)
    (tmp_path / "sp500.parquet").write_bytes(b"other bars")
    training.run_or_recall(tmp_path, tmp_path / "kept", QUICK)
    assert done[2:] == [QUICK, QUICK]


def test_summary_gives_each_batch_size_its_gains_and_the_largest_memory(stored):
    found = training.summary(stored)
    ends = stored.query("kind == 'validation'")
    trivial = stored.query("kind == 'trivial'")["loss"].item()
    for size, row in found.iterrows():
        losses = ends.query(f"batch_size == {size}")["loss"]
        assert row["seeds"] == len(losses) and row["least gain"] == pytest.approx(1 - losses.max() / trivial)
        steps = stored.query(f"kind == 'train' and batch_size == {size} and seed == 0")
        assert row["steps"] == len(steps) and row["resident"] >= steps["memory"].max() > row["traced"]
