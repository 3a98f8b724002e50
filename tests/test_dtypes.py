"""What a real run refuses because dtypes do not go together, a trace refuses too; what it takes, a trace takes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import everybyte as eb

HALF, SINGLE, DOUBLE, WHOLE = torch.bfloat16, torch.float32, torch.float64, torch.int64
PAIRS = [(HALF, SINGLE), (SINGLE, HALF), (SINGLE, DOUBLE), (SINGLE, WHOLE), (HALF, HALF), (SINGLE, SINGLE)]


def positions():
    return torch.zeros(4, dtype=torch.long)


def grid_of_positions():
    return torch.zeros(4, 4, dtype=torch.long)


def mask():
    return torch.ones(4, 4, dtype=torch.bool)


CALLS = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(a, b, b),
    "addmm's bias": lambda a, b: torch.addmm(b[0], a, a),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "mv": lambda a, b: a.mv(b[0]),
    "dot": lambda a, b: a[0].dot(b[0]),
    "linear": lambda a, b: F.linear(a, b),
    "linear's bias": lambda a, b: F.linear(a, a, b[0]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "conv1d's bias": lambda a, b: F.conv1d(a[None], a[:, :, None], b[0]),
    "index_put": lambda a, b: torch.index_put(a, (positions(),), b),
    "x[i] = y": lambda a, b: a.clone().__setitem__(positions(), b),
    "x[mask] = number": lambda a, b: a.clone().__setitem__(mask(), b[0, 0]),
    "index_add": lambda a, b: torch.index_add(a, 0, positions(), b),
    "index_copy": lambda a, b: torch.index_copy(a, 0, positions(), b),
    "put": lambda a, b: torch.put(a, grid_of_positions(), b),
    "scatter": lambda a, b: torch.scatter(a, 0, grid_of_positions(), b),
    "masked_scatter": lambda a, b: torch.masked_scatter(a, mask(), b),
    "embedding_bag": lambda a, b: F.embedding_bag(grid_of_positions(), a, per_sample_weights=b, mode="sum"),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0], b[0]),
    "group_norm": lambda a, b: F.group_norm(a, 2, b[0], b[0]),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[0]),
    "rms_norm": lambda a, b: F.rms_norm(a, (4,), b[0]),
    "nll_loss": lambda a, b: F.nll_loss(a, positions(), b[0]),
    "cross_entropy": lambda a, b: F.cross_entropy(a, positions(), b[0]),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "grid_sample": lambda a, b: F.grid_sample(a[None, None], b[None, :2, :2, None].expand(1, 2, 2, 2)),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    "attention's mask": lambda a, b: F.scaled_dot_product_attention(*[a[None, None]] * 3, attn_mask=b),
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.clone().add_(b),
    "where": lambda a, b: torch.where(mask(), a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
}


def goes(call, first: torch.dtype, second: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(torch.ones(4, 4, dtype=first), torch.ones(4, 4, dtype=second))
        except (RuntimeError, NotImplementedError):
            return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu_a_trace_refuses_what_a_real_run_refuses(name):
    for first, second in PAIRS:
        with eb.trace(rules="cpu"):
            traced = goes(CALLS[name], first, second)
        assert traced == goes(CALLS[name], first, second), (first, second)


def test_a_half_precision_layer_norm_on_cuda_wants_parameters_of_its_own_dtype_and_a_batch_norm_does_not():
    """`layer_norm_kernel.cu` reads gamma as the input's type; `cuda/Normalization.cu` reads it in single precision."""
    with eb.trace(rules="cuda"):
        x, p = torch.ones(4, 4, dtype=HALF), torch.ones(4)
        for norm in (lambda: F.layer_norm(x, (4,), p, p), lambda: F.group_norm(x, 2, p, p)):
            with pytest.raises(RuntimeError, match="should have one dtype, but have bfloat16, float32"):
                norm()
        F.batch_norm(x, p.clone(), p.clone(), p, p, training=True)


def test_a_module_refuses_a_batch_of_another_dtype_on_cuda_too():
    layer, words = torch.nn.Linear(4, 4), "addmm: its tensors should have one dtype, but have float32, bfloat16"
    with eb.trace(rules="cuda") as run, pytest.raises(RuntimeError, match=words):
        run.to_device(layer)(torch.ones(2, 4, dtype=HALF))


def test_under_autocast_dtypes_are_made_alike_first():
    for rules in ("cpu", "cuda"):
        with eb.trace(rules=rules), torch.autocast(rules, dtype=HALF):
            assert (torch.ones(4, 4) @ torch.ones(4, 4, dtype=HALF)).dtype == HALF
