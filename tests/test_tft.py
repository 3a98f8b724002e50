"""The model: its readings, its switches, what it computes, and that it can be traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everybyte.models.tft import (
    CHOICES,
    TFT,
    TemporalAttention,
    TFTConfig,
    VariableSelection,
    parameters_by_component,
    quantile_loss,
)

SMALL = TFTConfig(
    features=9, static_features=2, known_features=3, observed_features=4, history=7, horizon=3, hidden=8, heads=2,
    stack_layers=1,
)  # fmt: skip
SMALL_PUBLISHED = replace(
    TFTConfig.published(),
    features=9, static_features=2, known_features=3, observed_features=4, history=7, horizon=3, hidden=8, heads=2,
)  # fmt: skip


def inputs(config: TFTConfig, batch: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = config.input_shapes(batch)
    return [torch.randn(shapes[name], generator=generator) for name in ("static", "past", "future")]


def model(config: TFTConfig) -> TFT:
    torch.manual_seed(0)
    return TFT(config)


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (TFTConfig.readings()["53,970"], 47.6),
        (TFTConfig.seed(), 58.9),
        (TFTConfig(), 74.2),
        (TFTConfig.published(), 93.6),
    ],
)
def test_each_reading_has_the_parameters_known_for_it(config, millions):
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in TFT(config).parameters())
    assert round(count / 1e6, 1) == millions


def test_default_is_the_reading_with_74203195_parameters():
    with torch.device("meta"):
        assert sum(parameters_by_component(TFT(TFTConfig())).values()) == 74_203_195


def test_literal_reading_has_the_exact_counts_the_report_prints():
    with torch.device("meta"):
        parts = parameters_by_component(TFT(TFTConfig.seed()))
        pooled = parameters_by_component(TFT(TFTConfig.readings()["53,970"]))
    assert parts["attention"] == 262_656
    assert parts["recurrence"] == 131_072
    assert parts["head"] == 23_040
    assert pooled["historical_selection.weights"] == 53_970
    assert pooled["static_selection.weights"] == 1_285
    assert pooled["future_selection.weights"] == 2_570


def test_readings_and_switches_are_all_named():
    assert TFTConfig.readings()["literal"] == TFTConfig.seed()
    assert TFTConfig.readings()["context"] == TFTConfig()
    assert all(getattr(TFTConfig(), name) in choices for name, choices in CHOICES.items())


@pytest.mark.parametrize("config", [SMALL, SMALL_PUBLISHED, replace(SMALL, context="none", selection="pooled")])
def test_forecast_has_a_quantile_for_each_step_and_every_fed_parameter_learns(config):
    network = model(config)
    forecast = network(*inputs(config))
    assert forecast.shape == (2, 3, 9)
    quantile_loss(forecast, torch.randn(2, 3), network.quantiles).backward()
    unreached = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert all(name.startswith("static_") and ".context." in name for name in unreached)


@pytest.mark.parametrize("config", [SMALL, SMALL_PUBLISHED])
def test_every_input_moves_the_forecast(config):
    network = model(config).eval()
    before = network(*inputs(config))
    for place in range(3):
        moved = inputs(config)
        moved[place][..., 0] += 1.0
        assert not torch.equal(before, network(*moved))


def test_selection_weights_sum_to_one_so_equal_outputs_pass_unchanged():
    selection = VariableSelection(replace(SMALL, dropout=0.0), n=4)
    same = torch.randn(2, 7, 1)
    for network in selection.variables[1:]:
        network.load_state_dict(selection.variables[0].state_dict())
    torch.testing.assert_close(selection([same] * 4), selection.variables[0](same))


def test_causal_mask_hides_later_bars_from_earlier_steps():
    config = replace(SMALL, head="step", dropout=0.0)
    for causal, hidden in ((True, True), (False, False)):
        network = model(replace(config, causal=causal))
        before = inputs(config)
        after = [x.clone() for x in before]
        after[2][:, -1] += 1.0  # the calendar of the last step
        same = torch.equal(network(*before)[:, :-1], network(*after)[:, :-1])
        assert same is hidden


@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from(CHOICES["attention"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_fused_attention_has_the_eager_output_and_gradients(batch, history, heads, width, attention, causal, gates):
    config = replace(
        SMALL, history=history, heads=heads, hidden=heads * width, attention=attention, causal=causal, gates=gates,
        dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = TemporalAttention(config).double()
    fused = TemporalAttention(replace(config, fused_attention=True)).double()
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(batch, history + 3, heads * width, dtype=torch.double)
    found = []
    for layer in eager, fused:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        found.append({"y": y.detach(), "x": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_fused_attention_drops_weights_in_training_alone():
    layer = TemporalAttention(replace(SMALL, attention_dropout=0.5, fused_attention=True))
    x = torch.randn(2, 10, SMALL.hidden)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_shared_value_averages_heads_and_needs_fewer_parameters():
    own, shared = (
        parameters_by_component(TFT(replace(SMALL, attention=kind)))["attention"] for kind in ("heads", "shared value")
    )
    h, d = SMALL.hidden, SMALL.hidden // SMALL.heads
    assert own - shared == h * d * (SMALL.heads - 1) + h * (h - d)


def test_quantile_loss_charges_p_a_unit_too_low_and_one_minus_p_too_high():
    quantiles = torch.tensor([0.1, 0.9])
    low = quantile_loss(torch.zeros(1, 1, 2), torch.ones(1, 1), quantiles)
    high = quantile_loss(torch.ones(1, 1, 2), torch.zeros(1, 1), quantiles)
    assert low.item() == pytest.approx(0.1 + 0.9)
    assert high.item() == pytest.approx(0.9 + 0.1)
    one = quantile_loss(torch.tensor([[[0.0, 2.0]]]), torch.ones(1, 1), quantiles)
    assert one.item() == pytest.approx(0.1 * 1 + 0.1 * 1)


def test_quantile_loss_is_least_at_the_empirical_quantile():
    target = torch.arange(1.0, 1001.0)[:, None]
    p = torch.tensor([0.3])
    losses = {x: quantile_loss(torch.full((1000, 1, 1), float(x)), target, p).item() for x in (200, 299, 301, 400)}
    assert min(losses, key=losses.get) in (299, 301)


@pytest.mark.parametrize("config", [TFTConfig(), TFTConfig.seed(), TFTConfig.published()])
def test_every_preset_runs_on_the_meta_device_forward_and_backward(config):
    with torch.device("meta"):
        network = TFT(config)
        forecast = network(*(torch.empty(config.input_shapes(8)[name]) for name in ("static", "past", "future")))
        quantile_loss(forecast, torch.empty(8, 10), network.quantiles).backward()
    assert forecast.shape == (8, 10, 9)
    assert network.head.output.weight.grad.shape == network.head.output.weight.shape


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 250}, "hidden=250 is not a multiple of heads=8: 248 would be"),
        ({"hidden": 0}, "hidden=0 leaves nothing to compute: give at least 1"),
        ({"hidden": -8}, "hidden=-8 is negative"),
        ({"hidden": "eight"}, "hidden='eight' is not a whole number"),
        ({"horizon": True}, "horizon=True is not a whole number"),
        ({"observed_features": 200}, "set features=215"),
        ({"max_positions": 59}, "max_positions=59 is fewer than history + horizon = 60"),
        ({"dropout": 1.0}, "dropout=1.0 is not a rate"),
        ({"causal": 1}, "causal=1 is not a switch"),
        ({"selection": "best"}, "choose one of linear, pooled, grn"),
        ({"quantiles": (0.5, 0.1)}, "must rise"),
        ({"quantiles": ()}, "must rise"),
        ({"biases": ("heads",)}, "biases names ['heads']"),
        ({"known_in_history": True}, "set embedding=True"),
        ({"selection_compute": "streamed", "selection": "grn"}, "set selection='linear' and embedding=False"),
        ({"selection_compute": "streamed", "embedding": True}, "set selection='linear' and embedding=False"),
        ({"selection_keep": -1}, "selection_keep=-1 is negative"),
        ({"context": "selection"}, "feeds no layer of this model: set selection='grn'"),
    ],
)
def test_impossible_configurations_say_in_one_line_how_to_mend_them(wrong, message):
    with pytest.raises(ValueError) as error:
        TFTConfig(**wrong)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_history_of_another_width_is_refused_by_name():
    with pytest.raises(ValueError, match=r"past is \[2, 7, 4\], not \[b, 7, 7\]"):
        model(SMALL_PUBLISHED)(*inputs(SMALL))
