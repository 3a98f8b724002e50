"""What a TFT keeps whose parts are detached, checkpointed or streamed, against the closed forms, for many sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everybyte as eb
from everybyte.formulas import tft as formulas
from everybyte.formulas import tft_checkpoints as closed_form
from everybyte.formulas.terms import integer
from everybyte.models import tft, tft_loops
from everybyte.models import tft_checkpoints as parts
from everybyte.training import one_thread

SELECTION = "historical_selection"


def small(features: int, hidden: int) -> tft.TFTConfig:
    fewer = {"static_features": 2, "known_features": 3, "observed_features": features, "features": features + 5}
    return replace(tft.TFTConfig(), hidden=hidden, heads=2, history=6, horizon=2, **fewer)


def ways(config):
    names = [f"{SELECTION}.variables.{i}" for i in range(config.observed_features)]
    inside = {"as it stands": [], "five places": parts.PLACES, "each variable": names, "whole selection": [SELECTION]}
    return {name: partial(parts.checkpointed, names=x) for name, x in inside.items()} | {
        "detached": parts.detached,
        "streamed": parts.streamed,
    }


def batch_of(config, batch):
    torch.manual_seed(1)
    return tuple(torch.randn(shape) for shape in config.input_shapes(batch).values())


@settings(max_examples=3, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.sampled_from([4, 8]))
def test_each_way_keeps_what_its_closed_form_says_and_learns_the_same(batch, features, hidden):
    config = small(features, hidden)
    data, expected, grads = batch_of(config, batch), closed_form.kept(config), {}
    with one_thread():
        for name, change in ways(config).items():
            torch.manual_seed(0)
            model, made = change(tft.TFT(config)), []
            kept = eb.saved(lambda model=model, made=made: made.append(tft.batch_loss(model, data)) or made[0])
            assert kept.total_bytes == integer(expected[name], formulas.sizes(config, batch)), name
            made[0].backward()
            grads[name] = parts.gradients(model)
    assert expected.keys() == grads.keys()
    for name in grads.keys() - {"detached"}:
        torch.testing.assert_close(grads[name], grads["as it stands"])
    assert len(grads["detached"]) < len(grads["as it stands"])


def test_only_what_stands_behind_the_last_norm_learns_if_a_norm_has_no_gradient():
    config = small(3, 8)
    model = parts.normed_as_in_candle(tft.TFT(config))
    tft.batch_loss(model, batch_of(config, 2)).backward()
    counts = tft.parameters_by_component(model, with_gradient=True)
    assert counts.keys() == tft.parameters_by_component(model).keys()
    assert {name for name, count in counts.items() if count} == {"head"}
    assert len(list(model.parameters())) == integer(formulas.tensors(config), formulas.sizes(config, 1))


def test_training_on_one_batch_lowers_its_loss_and_tells_what_moved():
    config = replace(small(3, 8), dropout=0.0)
    torch.manual_seed(0)
    losses, moved = tft_loops.overfit(parts.detached(tft.TFT(config)), batch_of(config, 2), steps=5)
    assert losses.shape == (5,) and losses[-1] < losses[0]
    assert {name.split(".")[0] for name, changed in moved.items() if changed} == {"attention", "head"}


@pytest.mark.parametrize("other", [{"recurrence": "lstm"}, {"fused_attention": True}])
def test_a_model_that_is_not_written_down_is_refused(other):
    with pytest.raises(ValueError, match="written down for"):
        closed_form.dropped(replace(small(2, 4), **other))
