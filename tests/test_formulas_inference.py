"""Cache and working sets of inference in closed form: published figures, plain integers, and code that really runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import everybyte as eb
from everybyte.formulas import inference, transformer
from everybyte.formulas.inference import c, kv_cache, moments, t
from everybyte.formulas.terms import L, a_kv, b, d_ff, d_head, e, integer, most, s, total
from everybyte.models import GPTConfig, KVCache, QuantizedKVCache

SEED = inference.sizes(4, 2048, layers=24, hidden=2048, heads=16, vocabulary=32_000)


def test_the_seeds_cache_is_1_610_612_736_bytes():
    assert integer(kv_cache(), SEED) == 1_610_612_736
    assert total(kv_cache()) == 2 * L * b * s * a_kv * d_head * e


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "kv_heads", "head_width", "nbytes", "by_hidden_over_heads"),
    [
        (64, 5120, 64, 8, 128, 262_144, 163_840),  # Qwen3-32B
        (36, 2560, 32, 8, 128, 147_456, 92_160),  # Qwen3-4B
        (32, 4096, 32, 8, 128, 131_072, 131_072),  # Llama-3-8B
    ],
)
def test_a_heads_width_is_the_models_own_and_not_hidden_over_heads(
    layers, hidden, heads, kv_heads, head_width, nbytes, by_hidden_over_heads
):
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    token = transformer.per_token(kv_cache())
    assert integer(token, inference.sizes(3, 7, **shape, head_width=head_width)) == nbytes
    assert integer(token, inference.sizes(3, 7, **shape)) == by_hidden_over_heads
    own = inference.sizes(3, 7, **{**shape, "kv_heads": heads}, head_width=head_width)
    assert integer(token, own) == nbytes * heads // kv_heads  # 4 or 8 times too much, where sharing is ignored


@pytest.mark.parametrize(
    ("queries", "keys", "gigabytes"),
    [(2048, 32, "3.22"), (2048, 128, "12.88"), (2048, 240, "24.16"), (32 * 1024, 32, "51.5")],
)
def test_scores_of_a_prefill_without_a_fused_kernel_are_those_seen_in_the_field(queries, keys, gigabytes):
    sizes = inference.sizes(1, keys * 1024, layers=1, hidden=24 * 128, heads=24, queries=queries)
    nbytes = integer(inference.scores(), sizes)
    assert nbytes == 24 * queries * keys * 1024 * 2
    assert f"{nbytes / 1e9:.{len(gigabytes.split('.')[1])}f}" == gigabytes


@given(
    b=st.integers(1, 16),
    s=st.integers(1, 4096),
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 16),
    groups=st.integers(1, 8),
    width=st.integers(1, 256),
    bits=st.integers(1, 8),
    group=st.integers(1, 256),
    constants=st.integers(1, 8),
)
def test_a_cache_counted_row_by_row_in_plain_integers_is_the_same(
    b, s, layers, kv_heads, groups, width, bits, group, constants
):
    heads = kv_heads * groups
    sizes = inference.sizes(b, s, layers=layers, hidden=heads, heads=heads, kv_heads=kv_heads, head_width=width)
    row = len(range(0, width * bits, 8)) + constants * len(range(0, width, group))
    rows = sum(b * s for _ in range(layers) for _ in "kv" for _ in range(kv_heads))
    assert integer(kv_cache(bits, group=group, constants=constants), sizes) == rows * row
    assert integer(kv_cache(), sizes) == rows * width * 2
    assert integer(inference.growth(held=True), sizes) == layers * 2 * kv_heads * b * width * 2 * (2 * s + 1)
    assert integer(inference.growth(held=False), sizes) == kv_heads * b * width * 2 * (2 * layers * (s + 1) + s)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_caches_of_the_decoder_have_the_bytes_of_their_closed_forms(kv_heads):
    config = GPTConfig(layers=3, hidden=48, heads=4, kv_heads=kv_heads)
    sizes = inference.sizes(2, 10, layers=3, hidden=48, heads=4, kv_heads=kv_heads)
    assert KVCache(config, 2, 10).nbytes == integer(kv_cache(), sizes)
    assert QuantizedKVCache(config, 2, 10).nbytes == integer(kv_cache(8), sizes)


@pytest.mark.parametrize("held", [True, False])
def test_growth_by_concatenation_is_measured_to_the_byte(held):
    shape, layers = (2, 3, 50, 8), 4
    with eb.measure(device="cpu") as run:
        cache = [torch.zeros(shape) for _ in range(2 * layers)]
        for _ in run.steps(1):
            old = list(cache) if held else None
            for i in range(2 * layers):
                cache[i] = torch.cat((cache[i], torch.zeros(2, 3, 1, 8)), dim=2)
            del old
    sizes = inference.sizes(2, 50, layers=layers, hidden=24, heads=3, element=4)
    new_position = 2 * 3 * 8 * 4
    assert run.timeline.without("scratch").peak_bytes == integer(inference.growth(held), sizes) + new_position


def run_one_layer(attention: str, mlp: str, batch: int, queries: int, keys: int) -> int:
    """Measured peak of a layer, above cache and weights, in code that drops each tensor after its last use."""
    hidden, heads, inner, vocabulary = 32, 4, 96, 50
    with eb.measure(device="cpu") as run, torch.no_grad():
        cache = torch.zeros(2, batch, heads, keys, hidden // heads)
        square, up = torch.zeros(hidden, hidden), torch.zeros(hidden, inner)
        head, gain = torch.zeros(hidden, vocabulary), torch.ones(hidden)
        x = torch.randn(batch, queries, hidden)

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, queries, heads, -1).transpose(1, 2)

        for _ in run.steps(1):
            normed = F.layer_norm(x, (hidden,), gain)
            q, k, v = normed @ square, normed @ square, normed @ square
            del normed
            cache[0, :, :, -queries:], cache[1, :, :, -queries:] = split(k), split(v)
            del k, v
            if attention == "eager":
                y = torch.empty(batch, queries, heads, hidden // heads).transpose(1, 2)
                scores = torch.empty(batch * heads, queries, keys)
                torch.bmm(split(q).reshape(-1, queries, hidden // heads), cache[0].flatten(0, 1).mT, out=scores)
                del q, y
                weights = scores.softmax(-1)
                del scores
                y = weights @ cache[1].flatten(0, 1)
                del weights, y
            else:
                y = F.scaled_dot_product_attention(split(q), cache[0], cache[1])
                del q, y
            if mlp == "swiglu":
                factors = F.silu(x @ up), x @ up
                y = factors[0] * factors[1]
                del factors, y
            else:
                y = F.gelu(x @ up)
                del y
            y = x[:, -1] @ head
            del y
    return run.timeline.without("scratch").peak_above_start + x.nbytes


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (16, 64), (1, 64)])
def test_no_code_needs_more_than_the_largest_moment_that_drops_what_it_has_used(attention, mlp, queries, keys):
    sizes = inference.sizes(1, keys, layers=1, hidden=32, heads=4, queries=queries, inner=96, vocabulary=50, element=4)
    peak = most(moments(attention, mlp, inner=d_ff), sizes)
    assert run_one_layer(attention, mlp, 1, queries, keys) == integer(peak, sizes)


def test_decoding_is_megabytes_beside_gigabytes_of_cache_and_a_prompt_in_one_go_is_quadratic():
    peak = most(moments(), SEED)
    assert integer(peak, SEED) < 2e6 < integer(kv_cache(), SEED)
    assert all(transformer.by_degree(sum(terms.values()), c).keys() <= {0, 1} for terms in moments().values())
    prompt = {moment: total(terms).subs({c: s, t: s}) for moment, terms in moments().items()}
    assert set(transformer.by_degree(prompt["softmax"])) == {1, 2}
    fused = {moment: total(terms).subs({c: s, t: s}) for moment, terms in moments("flash").items()}
    assert all(set(transformer.by_degree(part)) <= {0, 1} for part in fused.values())


def test_a_fused_kernel_has_a_log_sum_exp_in_single_precision_beside_queries_and_output():
    sizes = inference.sizes(2, 64, layers=1, hidden=48, heads=4, queries=8, element="bfloat16")
    states = 2 * 2 * 8 * 48
    assert integer(moments("flash")["fused attention"], sizes) == 3 * states + 4 * 2 * 4 * 8  # the residual stream too


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_cache(9), "bits=9: a quantized element has from 1 to 8"),
        (lambda: kv_cache(0), "bits=0: must be an integer from 1"),
        (lambda: kv_cache(4, constants=1.5), "constants=1.5"),
        (lambda: kv_cache(4, group=0), "group=0: must be an integer from 1"),
        (lambda: moments(inner=0), "inner=0: must be an integer from 1"),
        (lambda: moments("linear"), "attention='linear': choose one of 'eager', 'flash'"),
        (lambda: moments(mlp="moe"), "mlp='moe': choose one of 'gelu'"),
        (lambda: inference.sizes(1, 1, layers=1, hidden=10, heads=3), "give head_width, which is not hidden / heads"),
        (lambda: inference.sizes(1, 1, layers=1, hidden=12, heads=4, kv_heads=3), "must divide the heads"),
        (lambda: inference.sizes(1, 0, layers=1, hidden=12, heads=4), "positions=0: must be an integer from 1"),
        (lambda: inference.sizes(1, 1, layers=1, hidden=12, heads=4, head_width=-8), "head_width=-8"),
        (lambda: inference.sizes(1, 1, layers=1, hidden=12, heads=4, element="int5"), "element='int5': give its bytes"),
        (lambda: integer(kv_cache(), transformer.sizes(1, 1, 12, 4) | {s: 2**62}), "is no number of bytes"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
