"""LLaMA's layer: it computes what it says, and keeps the operands that its gradient formulas name, no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import everybyte as eb
from everybyte.models.llama import LlamaConfig, LlamaLayer, RMSNorm, causal, rotary, turned

SMALL = LlamaConfig(hidden=48, heads=4, d_ff=40, dtype="float32")
HALF = replace(SMALL, dtype="float16")
REPORTED = LlamaConfig(), 8, 512  # LLaMA-7B at batch 8 and 512 tokens
B, S = 3, 16


def forward(config, batch=B, sequence=S):
    def run():
        layer, angles, mask = LlamaLayer(config), rotary(config, sequence), causal(config, sequence)
        x = torch.randn(batch, sequence, config.hidden, dtype=getattr(torch, config.dtype), requires_grad=True)
        return layer(x, *angles, mask)

    return run


def closed_form(config, b, s):
    """Bytes in half precision, operand by operand."""
    h, a, f, scores = config.hidden, config.heads, config.d_ff, b * config.heads * s * s
    norms = 2 * (2 + 4 + 2) * b * s * h + 2 * 4 * b * s  # input, its fp32 copy, its normalised copy; the scale
    attention = (2 + 6 + 2) * b * s * h + 2 * 2 * s * (h // a)  # inputs of products, q, k, v; cosine and sine
    clamp, softmax = 2 * scores + 2, 2 * scores + (4 * scores if config.softmax_in_fp32 else 0)
    return norms + attention + clamp + softmax + 2 * b * s * h + 4 * 2 * b * s * f


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("rules", [None, "cpu", "cuda"], ids=["real", "cpu", "cuda"])
def test_a_layer_keeps_what_its_gradient_formulas_name(rules, in_fp32):
    config = replace(HALF, softmax_in_fp32=in_fp32)
    divisor = 0 if rules == "cuda" else 8  # the number by which scores are divided: on a GPU it stays on the host
    assert eb.saved(forward(config), rules=rules).total_bytes == closed_form(config, B, S) + divisor


def test_32_layers_of_the_7b_model_keep_40_75_gib_and_8_less_without_the_softmax_in_fp32():
    config, b, s = REPORTED
    with_, without = (replace(config, softmax_in_fp32=choice) for choice in (True, False))
    kept = [eb.saved(forward(c, b, s), rules="cuda").total_bytes for c in (with_, without)]
    assert kept == [closed_form(c, b, s) for c in (with_, without)]
    assert 32 * (kept[0] - kept[1]) == 8 * 2**30
    assert 32 * kept[0] / 2**30 == pytest.approx(40.75, abs=0.01)  # scales, cosines and sines come to 9 MB


def test_a_trace_keeps_row_for_row_what_a_real_forward_pass_keeps():
    real, traced = eb.saved(forward(HALF)), eb.saved(forward(HALF), rules="cpu")
    assert traced.frame().equals(real.frame())


def test_its_attention_is_softmax_of_scaled_causal_scores_times_values():
    torch.manual_seed(0)
    layer, x = LlamaLayer(SMALL), torch.randn(B, S, SMALL.hidden)
    cosine, sine = rotary(SMALL, S)
    q, k, v = (p(x).view(B, S, SMALL.heads, -1).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
    q, k = (y * cosine + turned(y) * sine for y in (q, k))
    expected = layer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    assert torch.allclose(layer.attention(x, cosine, sine, causal(SMALL, S)), expected, atol=1e-5)


def test_its_norm_is_the_root_mean_square_s():
    norm, x = RMSNorm(48, torch.float32), torch.randn(B, S, 48)
    torch.nn.init.normal_(norm.weight)
    assert torch.allclose(norm(x), F.rms_norm(x, (48,), norm.weight, eps=1e-6), atol=1e-6)


def test_turned_queries_and_keys_meet_by_their_distance_alone():
    torch.manual_seed(0)
    cosine, sine = rotary(SMALL, S)
    q, k = (torch.randn(12).expand(1, 1, S, 12) for _ in range(2))  # the same at every position
    q, k = (y * cosine + turned(y) * sine for y in (q, k))
    scores = (q @ k.mT)[0, 0]
    for distance in range(S):
        line = scores.diagonal(-distance)
        assert torch.allclose(line, line[0].expand_as(line), atol=1e-4)
    assert scores.diagonal(-1)[0] != scores.diagonal(-2)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden": 50}, "multiple of twice the heads"),
        ({"heads": 0}, "from 1 up"),
        ({"d_ff": True}, "from 1 up"),
        ({"dtype": "float8"}, "choose one of"),
    ],
)
def test_sizes_that_no_layer_has_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **arguments)
