"""The closed forms of single operations against what autograd really keeps, and against the published counts."""

from __future__ import annotations

import pytest
import sympy as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import everybyte as eb
from everybyte.formulas import ops

WIDTHS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}


def kept_for_real(name: str, b: int, s: int, h: int, a: int, dtype: torch.dtype) -> int:
    """Bytes that the operation of this name keeps on tensors of these sizes."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def mlp(activation: nn.Module) -> torch.Tensor:
        return nn.Sequential(nn.Linear(h, 4 * h), activation, nn.Linear(4 * h, h)).to(dtype)(tensor(b, s, h))

    forward = {
        "linear": lambda: nn.Linear(h, 3).to(dtype)(tensor(b, s, h)),
        "product": lambda: tensor(b, a, s, h) @ tensor(b, a, s, h).transpose(-1, -2),
        "gelu": lambda: F.gelu(tensor(b, s, 4 * h)),
        "relu": lambda: F.relu(tensor(b, s, 4 * h)),
        "dropout": lambda: F.dropout(tensor(b, s, h), 0.1),
        "softmax": lambda: torch.softmax(tensor(b, a, s, s), -1),
        "layer_norm": lambda: nn.LayerNorm(h).to(dtype)(tensor(b, s, h)),
        "gelu mlp": lambda: mlp(nn.GELU()),
        "relu mlp": lambda: mlp(nn.ReLU()),
    }[name]
    return eb.saved(forward).total_bytes


CLOSED = {
    "linear": ops.linear(),
    "product": ops.product(ops.a * ops.HIDDEN, ops.a * ops.HIDDEN),
    "gelu": ops.gelu(),
    "relu": ops.relu(),
    "dropout": ops.dropout(),
    "softmax": ops.softmax(),
    "layer_norm": ops.layer_norm(),
    "gelu mlp": ops.mlp("gelu"),
    "relu mlp": ops.mlp("relu"),
}


@pytest.mark.parametrize("name", CLOSED)
@given(
    b=st.integers(1, 4),
    s=st.integers(1, 5),
    h=st.integers(2, 6),
    a=st.integers(1, 3),
    dtype=st.sampled_from(list(WIDTHS)),
)
def test_a_closed_form_is_what_the_operation_really_keeps(name, b, s, h, a, dtype):
    size = ops.sizes(b, s, h, a, element=WIDTHS[dtype])
    assert ops.total(CLOSED[name]).subs(size) == kept_for_real(name, b, s, h, a, dtype)


def test_the_published_counts_of_a_two_byte_mlp_come_out():
    sbh = ops.s * ops.b * ops.h
    assert ops.total(ops.mlp("gelu")).subs(ops.e, 2) == 18 * sbh
    assert ops.total(ops.mlp("relu")).subs(ops.e, 2) == 10 * sbh


def test_a_cuda_mask_has_one_byte_and_cuda_statistics_four_whatever_the_element():
    size = ops.sizes(2, 3, 5, element=2, device="cuda")
    assert ops.total(ops.dropout()).subs(size) == 2 * 3 * 5
    assert ops.total(ops.layer_norm()).subs(size) == 2 * (2 * 3 * 5) + 2 * 4 * (2 * 3)


def test_terms_are_bytes_in_named_symbols_and_nothing_else():
    known = {ops.b, ops.s, ops.h, ops.a, ops.e, ops.m, ops.r}
    for terms in CLOSED.values():
        assert all(isinstance(name, str) and term.free_symbols <= known for name, term in terms.items())
        assert ops.total(terms).subs(ops.sizes(2, 3, 4, 2)).is_Integer
    assert ops.total({}) == sp.S.Zero


def test_unknown_devices_and_activations_are_refused_by_name():
    with pytest.raises(ValueError, match="device='tpu': the widths are known for 'cpu' and 'cuda'"):
        ops.sizes(1, 1, 1, device="tpu")
    with pytest.raises(ValueError, match="activation='swish': choose one of 'gelu', 'relu'"):
        ops.mlp("swish")
