"""A model in INT8: what is replaced, to the byte, and what the integers stand for."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from agreement import assert_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everybyte as eb
from everybyte.formulas import tft as formulas
from everybyte.formulas.terms import integer
from everybyte.models.tft import TFT, TFTConfig
from everybyte.quantization import SCALE, ZERO_POINT, int8, weight_bytes

pytest.importorskip("torchao")


class Net(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(inputs, outputs), nn.Linear(1, outputs)
        self.norm, self.lstm = nn.LayerNorm(outputs), nn.LSTM(outputs, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.norm(self.wide(x) + self.narrow(x[..., :1])))[0]


@settings(max_examples=20)
@given(st.integers(2, 40), st.integers(2, 40))
def test_a_row_of_a_weight_has_a_byte_a_number_a_scale_and_a_zero_point(inputs, outputs):
    model = Net(inputs, outputs)
    bytes_of = weight_bytes(int8(model))
    before = sum(p.numel() for p in model.parameters())
    assert bytes_of == {
        "qdata": inputs * outputs, "scale": SCALE * outputs, "zero_point": ZERO_POINT * outputs,
        "fp32": 4 * (before - inputs * outputs),
    }  # fmt: skip
    assert weight_bytes(model) == {"fp32": 4 * before}


@pytest.mark.parametrize("activations", [False, True])
def test_each_weight_is_its_integer_times_the_row_s_scale_to_half_a_step(activations):
    torch.manual_seed(0)
    model = Net(20, 7)
    weight = int8(model, activations).wide.weight
    assert weight.qdata.dtype == torch.int8
    error = (weight.qdata * weight.scale - model.wide.weight).abs()
    assert (error <= weight.scale * 0.5001).all()
    x = torch.randn(5, 20)
    torch.testing.assert_close(int8(model, activations)(x), model(x), atol=0.05, rtol=0)


@pytest.mark.parametrize("reading", TFTConfig.readings())
@pytest.mark.parametrize("heads", [1, 3])
def test_closed_form_of_a_tft_in_int8_is_what_torchao_makes(reading, heads):
    sizes = {"features": 9, "static_features": 2, "known_features": 3, "observed_features": 4, "stack_layers": 1}
    config = replace(TFTConfig.readings()[reading], hidden=6, heads=heads, **sizes)
    computed = {name: integer(term, formulas.sizes(config)) for name, term in formulas.int8(config).items()}
    assert weight_bytes(int8(TFT(config))) == computed


@pytest.mark.parametrize("changes", [{"recurrence": "lstm"}, {"selection_compute": "grouped"}])
def test_closed_form_of_int8_refuses_products_that_are_no_layers(changes):
    with pytest.raises(ValueError, match="INT8"):
        formulas.int8(replace(TFTConfig(), **changes))


def test_the_model_itself_stays_as_it_is():
    model = Net(6, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantized = int8(model)
    assert model.training and not quantized.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_quantized_model_can_be_measured():
    x = torch.randn(3, 6)
    with eb.measure("cpu") as run:
        model = int8(Net(6, 4))
        for _ in run.steps(1):
            with torch.no_grad():
                model(x)
    assert run.timeline.start_bytes == sum(weight_bytes(model).values())


def test_a_quantized_model_is_refused_by_a_run_in_one_line():
    model = int8(Net(6, 4))
    with pytest.raises(TypeError, match="make it inside the block"), eb.trace() as run:
        run.to_device(model)


@pytest.mark.parametrize("activations", [False, True])
def test_a_model_made_and_quantized_inside_a_run_takes_what_it_really_takes(activations):
    def body(run):
        model = int8(Net(6, 4), activations)
        x = run.to_device(np.ones((3, 6), "float32"))
        with torch.no_grad():
            for _ in run.steps(2):
                model(x)

    assert assert_agree(body).not_covered == set()


def test_a_quantized_weight_does_not_learn():
    model = int8(Net(6, 4))
    model(torch.randn(3, 6)).sum().backward()
    learns = {name for name, p in model.named_parameters() if p.grad is not None}
    assert "wide.weight" not in learns and "wide.bias" in learns


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match="pip install"):
        int8(Net(6, 4))
