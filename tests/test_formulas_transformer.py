"""A decoder's closed forms: the published sums and figures, the same in plain integers, and what autograd keeps."""

from __future__ import annotations

import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st

from everybyte.formulas import transformer
from everybyte.formulas.terms import HIDDEN, SCORES, a, a_kv, b, d_ff, d_head, e, h, integer, s, total
from everybyte.formulas.transformer import BF16_ON_CUDA, extras, layer, paper

SEED = transformer.sizes(4, 2048, 2048, 16, layers=24, vocabulary=32_000)
SBH, SQUARE = s * b * h, a * s**2 * b


def bf16(terms) -> sp.Expr:
    """Summed, with two bytes an element."""
    return sp.expand(total(terms).subs(BF16_ON_CUDA))


def test_the_published_table_comes_out_row_by_row_and_in_its_order():
    rows = {name: sp.expand(term.subs(BF16_ON_CUDA)) for name, term in paper(layer()).items()}
    assert rows == {
        "LayerNorm inputs": 4 * SBH,
        "QKV input": 2 * SBH,
        "Q and K": 4 * SBH,
        "V": 2 * SBH,
        "output projection input": 2 * SBH,
        "attention dropout mask": SBH,
        "softmax output, its mask, its dropout": 5 * SQUARE,
        "MLP input": 2 * SBH,
        "GELU input": 8 * SBH,
        "second MLP product's input": 8 * SBH,
        "MLP dropout mask": SBH,
    }
    assert list(rows) == list(paper(layer()))
    assert sum(rows.values()) == 34 * SBH + 5 * SQUARE


def test_the_parts_of_a_layer_are_those_published_and_make_the_whole():
    assert bf16(paper(transformer.attention())) == 11 * SBH + 5 * SQUARE
    assert bf16(paper(transformer.mlp())) == 19 * SBH
    assert bf16(paper(transformer.norms())) == 4 * SBH
    assert {**transformer.norms(), **transformer.attention(), **transformer.mlp()} == layer()


@pytest.mark.parametrize(
    ("switches", "published", "beside"),
    [
        ({}, 34 * SBH + 5 * SQUARE, 16 * s * b),
        ({"dropout": False}, 32 * SBH + 2 * SQUARE, 16 * s * b),
        ({"mask": "boolean"}, 34 * SBH + 5 * SQUARE, 16 * s * b + s**2),
        ({"attention": "flash"}, 34 * SBH, 16 * s * b + 4 * b * a * s + 24),
        ({"attention": "flash", "dropout": False}, 32 * SBH, 16 * s * b + 4 * b * a * s + 24),
        ({"mlp": "relu"}, 26 * SBH + 5 * SQUARE, 16 * s * b),
        ({"checkpoint": "selective"}, 34 * SBH, 16 * s * b),
        ({"checkpoint": "selective", "dropout": False}, 32 * SBH, 16 * s * b),
        ({"checkpoint": "full"}, 2 * SBH, 0),
        ({"mlp": "swiglu"}, 18 * SBH + 8 * s * b * d_ff + 5 * SQUARE, 16 * s * b),
        ({"mlp": "swiglu fused"}, 18 * SBH + 6 * s * b * d_ff + 5 * SQUARE, 16 * s * b),
        ({"attention": "flash", "kv_heads": a_kv}, 30 * SBH + 4 * SBH * a_kv / a, 16 * s * b + 4 * b * a * s + 24),
    ],
)
def test_each_switch_changes_what_it_should_and_nothing_else(switches, published, beside):
    terms = layer(**switches)
    assert bf16(paper(terms)) - published == 0
    assert bf16(extras(terms)) - beside == 0
    assert bf16(terms) == sp.expand(published + beside)


def test_swiglu_keeps_four_wide_tensors_in_eager_mode_and_the_seed_has_the_fused_three():
    eager, fused = transformer.mlp("swiglu", dropout=False), transformer.mlp("swiglu fused", dropout=False)
    assert bf16(eager).subs(d_ff, sp.Rational(21, 8) * h) == 23 * SBH
    assert bf16(fused).subs(d_ff, sp.Rational(8, 3) * h) == 18 * SBH  # the seed's 16, and the input
    assert bf16(transformer.mlp(dropout=False)) == 18 * SBH
    assert bf16(transformer.mlp("relu", dropout=False)) == 10 * SBH


def test_grouped_queries_save_nothing_where_an_eager_core_repeats_keys_and_values():
    grouped = layer(kv_heads=a_kv, repeated=True)
    assert total(grouped) == total(layer())
    assert total(layer(kv_heads=a_kv)) == total(layer()) - total(grouped["K and V repeated for all heads"])
    assert sp.expand(grouped["K and V repeated for all heads"].subs(BF16_ON_CUDA)) == 4 * SBH - 4 * SBH * a_kv / a


def test_attention_alone_with_a_fused_kernel_is_what_was_counted_on_a_cpu_in_the_field():
    sizes = transformer.sizes(1, 4096, 8192, 32, element="bfloat16", device="cpu")
    kept = transformer.attention("flash", dropout=False)
    assert integer(kept, sizes) == 336_068_608
    assert integer({**kept, "returned": 2 * HIDDEN}, sizes) == 403_177_472


def test_the_core_of_attention_with_and_without_scores_is_what_was_counted_on_a_cpu_in_the_field():
    sizes = transformer.sizes(1, 256, 256, 4, element=4, device="cpu")
    operands = ("Q and K", "V")
    eager, flash = (transformer.attention(kind, dropout=False) for kind in ("eager", "flash"))
    scores = {name: eager[name] for name in (*operands, "softmax output, its mask, its dropout")}
    assert integer(scores, sizes) == 1_835_008
    fused = {name: flash[name] for name in (*operands, "output projection input", "log-sum-exp")}
    assert integer(fused, sizes) == 1_052_672


def test_one_allocation_of_scores_names_the_kernel_that_was_not_taken():
    sizes = transformer.sizes(1, 27_672, 32 * 128, 32)
    assert round(integer(e * SCORES, sizes) / 2**30, 2) == 45.64


def test_the_formula_is_in_bytes_already():
    """A 7B model, 8 sequences of 512: 27 GiB by the published sum; times a width once more it would be a multiple."""
    sizes = transformer.sizes(8, 512, 4096, 32, layers=32)
    assert integer(paper(transformer.stack()["layers"]), sizes) == 27 * 2**30
    by_ratio = 34 + 5 * a * s / h
    assert sp.expand(by_ratio * SBH) == bf16(paper(layer()))


def test_the_seeds_worked_example_comes_out():
    parts = {
        power: integer(part.subs(BF16_ON_CUDA), SEED) for power, part in transformer.by_degree(paper(layer())).items()
    }
    assert {power: round(nbytes / 1e6) for power, nbytes in parts.items()} == {1: 570, 2: 1342}
    assert 24 * sum(parts.values()) == 45_902_462_976
    assert integer(transformer.per_token(paper(layer())), SEED) == 233_472
    flash = 24 * integer(paper(layer(attention="flash")), SEED)
    assert round(flash / 1e9, 1) == 13.7
    assert flash == 24 * integer(paper(layer(checkpoint="selective")), SEED)
    assert bf16(transformer.per_token(paper(layer()))) == 34 * h + 5 * a * s
    assert round(24 * 233_472 / 1e6, 1) == 5.6


def test_the_crossover_is_solved_for_and_is_the_seeds():
    parts = transformer.by_degree(bf16(paper(layer())))
    found = transformer.crossover(parts[1], parts[2])
    assert found == sp.Rational(34, 5) * d_head
    assert found.subs(d_head, 128) == sp.Rational(8704, 10)
    ratio = sp.Rational(4096) / found.subs(d_head, 128)
    assert round(float(ratio), 1) == 4.7
    assert round(float(ratio / (1 + ratio)), 2) == 0.82
    dry = transformer.by_degree(bf16(paper(layer(dropout=False))))
    assert transformer.crossover(dry[1], dry[2]) == 16 * d_head


def test_lines_that_never_cross_have_no_crossover():
    with pytest.raises(ValueError, match="give two that cross once"):
        transformer.crossover(34 * SBH, 5 * SBH)


@given(
    b=st.integers(1, 64),
    s=st.integers(1, 8192),
    a=st.integers(1, 64),
    d=st.integers(1, 256),
    groups=st.integers(1, 8),
    wide=st.integers(1, 4),
    element=st.sampled_from([2, 4]),
    on_cuda=st.booleans(),
    dropout=st.booleans(),
    repeated=st.booleans(),
    mask=st.booleans(),
    flash=st.booleans(),
    mlp=st.sampled_from(["gelu", "relu", "swiglu", "swiglu fused"]),
)
def test_a_layer_counted_tensor_by_tensor_in_plain_integers_is_the_same(
    b, s, a, d, groups, wide, element, on_cuda, dropout, repeated, mask, flash, mlp
):
    heads, hidden, inner = a * groups, a * groups * d, wide * a * groups * d
    bit, stat = (1, 4) if on_cuda else (element, element)
    # Shapes and bytes of an element of all that stays, in the order in which a forward pass makes it.
    kept = [((b, s, hidden), element), ((b, s), stat), ((b, s), stat), ((b, s, hidden), element)]  # norm, QKV input
    kept += [((b, heads, s, d), element)]
    kept += 2 * [((b, heads if repeated and not flash else a, s, d), element)]
    if flash:
        kept += [((b, heads, s), 4), ((3,) if on_cuda else (0,), 8)]
    else:
        kept += [((b, heads, s, s), element)]
        kept += [((b, heads, s, s), bit), ((b, heads, s, s), element)] if dropout else []
        kept += [((s, s), 1)] if mask else []
    kept += [((b, s, hidden), element)]
    kept += [((b, s, hidden), bit)] if dropout else []
    kept += [((b, s, hidden), element), ((b, s), stat), ((b, s), stat), ((b, s, hidden), element)]  # norm, MLP input
    kept += {"gelu": 2, "relu": 1, "swiglu": 4, "swiglu fused": 3}[mlp] * [((b, s, inner), element)]
    kept += [((b, s, hidden), bit)] if dropout else []

    nbytes = 0
    for shape, width in kept:
        count = width
        for size in shape:
            count *= size
        nbytes += count

    switches = {
        "attention": "flash" if flash else "eager",
        "mask": "boolean" if mask and not flash else "none",
        "mlp": mlp,
    }
    terms = layer(**switches, dropout=dropout, kv_heads=a_kv, repeated=repeated, inner=d_ff)
    device = "cuda" if on_cuda else "cpu"
    sizes = transformer.sizes(b, s, hidden, heads, inner=inner, kv_heads=a, element=element, device=device)
    assert integer(terms, sizes) == nbytes


def test_the_seeds_stack_is_24_layers_and_its_ends():
    whole = transformer.stack()
    assert integer(paper(whole["layers"]), SEED) == 45_902_462_976
    ends = {name: integer(term, SEED) for name, term in whole["ends"].items()}
    tokens, states = 4 * 2048, 4 * 2048 * 2048
    assert ends == {
        "token indices": 8 * tokens,
        "final LayerNorm input": 2 * states,
        "final LayerNorm means": 4 * tokens,
        "final LayerNorm 1 / deviations": 4 * tokens,
        "loss head input": 2 * states,
        "log-softmax": 1_048_576_000,  # the seed's 1.05 GB of fp32 logits; it is log-softmax that is kept
        "target indices": 8 * tokens,
        "number of targets": 4,
    }
    assert integer(whole, SEED) == integer(whole["layers"], SEED) + sum(ends.values())
    more = transformer.ends(embedding_dropout=True, position_indices=True)
    assert integer(more, SEED) - sum(ends.values()) == states + 8 * 2048


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("dropout", [True, False])
def test_what_is_kept_and_what_is_made_again_are_together_the_layer(attention, dropout):
    mask = "boolean" if attention == "eager" else "none"
    switches = {"attention": attention, "dropout": dropout, "mask": mask, "kv_heads": a_kv, "repeated": True}
    whole = total(layer(**switches))
    for checkpoint in ("none", "selective", "full"):
        again = transformer.recomputed(checkpoint, **switches)
        second_output = again.pop("attention output", 0)
        assert second_output == (e * HIDDEN if (attention, checkpoint) == ("flash", "selective") else 0)
        assert total(again) + total(layer(checkpoint=checkpoint, **switches)) == whole
    assert transformer.recomputed("none") == {}


def test_a_fully_checkpointed_stack_keeps_2_sbh_a_layer_and_at_its_peak_one_layer_more():
    kept = transformer.stack(checkpoint="full")["layers"]
    assert integer(kept, SEED) == 24 * 2 * 4 * 2048 * 2048 == 805_306_368
    assert integer(transformer.recomputed("full"), SEED) == integer(layer(), SEED) - 2 * 4 * 2048 * 2048


def test_the_seeds_network_has_the_parameters_of_its_tensors():
    terms = transformer.parameters()
    assert integer(terms, SEED) == 1_278_332_928
    assert integer(terms["token embedding"], SEED) == 65_536_000
    assert integer(transformer.parameters(tied=False), SEED) == 1_278_332_928 + 65_536_000
    llama = transformer.sizes(1, 1, 4096, 32, layers=32, vocabulary=128_256, inner=14_336, kv_heads=8)
    switches = {"tied": False, "positions": False, "biases": False, "mlp": "swiglu", "kv_heads": a_kv}
    assert integer(transformer.parameters(**switches), llama) == 8_030_261_248  # as Llama-3-8B is published


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer(attention="linear"), "attention='linear': choose one of 'eager', 'flash'"),
        (lambda: layer(mask="boolean", attention="flash"), "the flash kernel takes no mask"),
        (lambda: layer(mask="float"), "mask='float': choose one of 'none', 'boolean'"),
        (lambda: layer(mlp="geglu"), "kind='geglu': choose one of 'gelu'"),
        (lambda: layer(checkpoint="half"), "checkpoint='half': choose one of 'none', 'selective', 'full'"),
        (lambda: transformer.parameters(mlp="moe"), "mlp='moe'"),
        (lambda: transformer.parameters(inner=0), "inner=0: must be an integer from 1"),
        (lambda: layer(kv_heads=1.5), "kv_heads=1.5"),
        (lambda: layer(inner=-4), "inner=-4"),
        (lambda: transformer.sizes(1, 1, 10, 3), "hidden=10, heads=3: the heads must divide the hidden size"),
        (
            lambda: transformer.sizes(1, 1, 12, 4, kv_heads=3),
            "heads=4, kv_heads=3: heads of keys and values",
        ),
        (lambda: transformer.sizes(0, 1, 12, 4), "batch=0: must be an integer from 1"),
        (lambda: transformer.sizes(1, -1, 12, 4), "sequence=-1"),
        (lambda: transformer.sizes(1, 1, 12, 4, layers=1.5), "layers=1.5"),
        (lambda: transformer.sizes(1, 1, 12, 4, kv_heads=0), "kv_heads=0"),
        (lambda: transformer.sizes(1, 1, 12, 4, element="bf17"), "element='bf17': give its bytes, or one of"),
        (lambda: transformer.sizes(2**63, 1, 12, 4), "batch=9223372036854775808"),
        (lambda: integer(layer(), transformer.sizes(2**31, 2**31, 1, 1)), "is no number of bytes"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
