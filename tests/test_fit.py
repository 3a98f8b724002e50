"""Formula discovery: a model's bytes as a polynomial, checked where the fit did not look, or a refusal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import sympy as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import everybyte as eb
from everybyte.formulas import ops, tft
from everybyte.models.gpt import Block, GPTConfig
from everybyte.models.tft import TFT, TFTConfig, quantile_loss

B, S = [1, 2, 3, 5], [4, 7, 9, 12]
FP32_ON_CPU = {symbol: size for symbol, size in ops.sizes(1, 1, 1).items() if symbol in (ops.e, ops.m, ops.r)}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def on_states(function):
    def build(b, s, h):
        x = ones(b, s, h)
        return lambda: function(x)

    return build


def on_scores(function):
    def build(b, s, a):
        x = ones(b, a, s, s)
        return lambda: function(x)

    return build


def linear(b, s, h):
    layer, x = nn.Linear(h, h), ones(b, s, h)
    return lambda: layer(x)


def layer_norm(b, s, h):
    norm, x = nn.LayerNorm(h), ones(b, s, h)
    return lambda: norm(x)


def query_by_key(b, s, a):
    query, key = ones(b, a, s, 8), ones(b, a, s, 8)
    return lambda: query @ key.transpose(-1, -2)


OPERATIONS = {
    "linear": (linear, ops.linear()),
    "gelu": (on_states(F.gelu), ops.gelu(ops.HIDDEN)),
    "relu": (on_states(F.relu), ops.relu(ops.HIDDEN)),
    "dropout": (on_states(lambda x: F.dropout(x, 0.1)), ops.dropout()),
    "layer norm": (layer_norm, ops.layer_norm()),
    "softmax": (on_scores(lambda x: torch.softmax(x, -1)), ops.softmax()),
    "product": (query_by_key, ops.product(8 * ops.b * ops.a * ops.s, 8 * ops.b * ops.a * ops.s)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_one_operation_keeps_is_found_as_its_closed_form(name):
    build, terms = OPERATIONS[name]
    values = {"b": [1, 2, 3], "s": S} | ({"h": [2, 4, 6]} if "h" in build.__code__.co_varnames else {"a": [1, 2, 4]})
    computed = ops.total(terms).subs(FP32_ON_CPU)
    assert sp.expand(eb.fit_formula(build, rules="cpu", **values) - computed) == 0


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_an_mlp_in_two_bytes_keeps_18_or_10_bsh(activation):
    def build(b, s, h):
        up, down = nn.Linear(h, 4 * h, dtype=torch.bfloat16), nn.Linear(4 * h, h, dtype=torch.bfloat16)
        x = ones(b, s, h, dtype=torch.bfloat16)
        return lambda: down(getattr(F, activation)(up(x)))

    fitted = eb.fit_formula(build, rules="cpu", b=B, s=S, h=[2, 8, 12])
    assert fitted == {"gelu": 18, "relu": 10}[activation] * ops.b * ops.s * ops.h
    assert sp.expand(fitted - ops.total(ops.mlp(activation)).subs({ops.e: 2})) == 0


TFT_SIZES = {
    "features": 6, "static_features": 2, "known_features": 2, "observed_features": 2, "hidden": 8, "heads": 2,
    "horizon": 3,
}  # fmt: skip
TFTS = {
    **{name: replace(config, **TFT_SIZES) for name, config in TFTConfig.readings().items()},
    "published, products for its LSTM": replace(TFTConfig.published(), **TFT_SIZES, recurrence="linear"),
}


def tft_step(config):
    def build(b, s):
        sized = replace(config, history=s)
        model, shapes = TFT(sized), sized.input_shapes(b)
        static, past, future, target = (torch.zeros(shapes[name]) for name in ("static", "past", "future", "target"))
        return lambda: quantile_loss(model(static, past, future), target, model.quantiles)

    return build


def tft_closed_form(config, **widths):
    fixed = {symbol: size for symbol, size in tft.sizes(config, **widths).items() if symbol not in (tft.b, tft.s)}
    return tft.total(tft.saved(config)).subs(fixed)


@pytest.mark.parametrize("name", TFTS)
def test_what_the_tft_keeps_on_a_gpu_is_found_in_batch_and_history_length(name):
    fitted = eb.fit_formula(tft_step(TFTS[name]), b=[2, 3, 5, 6], s=[4, 7, 9, 12])
    assert sp.expand(fitted - tft_closed_form(TFTS[name], mask=1, number=0)) == 0


@pytest.mark.parametrize("name", ["53,970", "published, products for its LSTM"])
def test_what_the_tft_keeps_on_a_cpu_is_found_and_holds_in_real_runs(name):
    build = tft_step(TFTS[name])
    fitted = eb.fit_formula(build, rules="cpu", b=[2, 3, 5, 6], s=[4, 7, 9, 12])
    assert sp.expand(fitted - tft_closed_form(TFTS[name], mask=4, number=8)) == 0
    for b, s in ((4, 33), (11, 50)):  # sizes that were not traced
        assert eb.saved(build(b, s)).total_bytes == fitted.subs({tft.b: b, tft.s: s})


# -- the decoder layer -------------------------------------------------------------------------------------------------

LAYER_SIZES = {"b": [1, 2, 3, 5], "s": [8, 16, 24, 40, 50], "h": [16, 32, 48, 80], "a": [1, 2, 4, 8]}
SCORES, STATES, STATISTICS = ops.b * ops.a * ops.s**2, ops.b * ops.s * ops.h, 16 * ops.b * ops.s


def layer(**switches):
    def build(b, s, h, a):
        block = Block(GPTConfig(hidden=h, heads=a, context=s, **switches))
        x = torch.empty(b, s, h, dtype=block.config.torch_dtype, requires_grad=True)
        return lambda: block(x)

    return build


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, 34 * STATES + 5 * SCORES + STATISTICS),
        ({"mask": "boolean"}, 34 * STATES + 5 * SCORES + STATISTICS + ops.s**2),
        ({"dropout": 0.0}, 32 * STATES + 2 * SCORES + STATISTICS),
        ({"mlp": "relu"}, 26 * STATES + 5 * SCORES + STATISTICS),
    ],
    ids=["dropout", "boolean mask", "no dropout", "relu"],
)
def test_what_a_decoder_layer_keeps_on_a_gpu_is_found_in_four_sizes(switches, expected):
    build = layer(**switches)
    fitted = eb.fit_formula(build, **LAYER_SIZES)
    assert sp.expand(fitted - expected) == 0
    chance = random.Random(1)
    for _ in range(10):
        a = chance.randint(1, 9)
        sizes = {"b": chance.randint(1, 9), "s": chance.randint(2, 99), "h": a * chance.randint(1, 30), "a": a}
        with eb.trace(rules="cuda"):
            traced = eb.saved(build(**sizes)).total_bytes
        assert fitted.subs({getattr(ops, name): size for name, size in sizes.items()}) == traced


def test_a_swiglu_whose_width_is_two_thirds_of_4h_rounded_down_is_refused_and_at_multiples_of_three_found():
    message = refusal(layer(mlp="swiglu"), rules="cuda", **LAYER_SIZES)
    assert "no polynomial" in message
    sizes = {**LAYER_SIZES, "h": [24, 48, 72, 96]}
    wide = 4 * 2 * ops.b * ops.s * sp.Rational(8, 3) * ops.h  # gate, silu(gate), up and their product
    rest = 34 * STATES - 2 * 8 * STATES  # of 34 the MLP's two tensors of width 4h
    assert sp.expand(eb.fit_formula(layer(mlp="swiglu"), **sizes) - wide - rest - 5 * SCORES - STATISTICS) == 0


# Heads of widths that are multiples of 8, which no kernel pads.
FUSED_SIZES = {"b": [1, 2, 3, 5], "s": [8, 16, 33, 40, 50], "h": [32, 64, 96, 160], "a": [1, 2, 4]}


def test_flash_attention_leaves_no_square_of_s_but_a_log_sum_exp_and_the_generator_s_state():
    fitted = eb.fit_formula(layer(attention="fused"), **FUSED_SIZES)
    log_sum_exp, state = 4 * ops.b * ops.a * ops.s, 16 + 8
    assert sp.expand(fitted - 34 * STATES - log_sum_exp - STATISTICS - state) == 0


def test_the_log_sum_exp_that_is_padded_to_32_is_refused_and_at_multiples_of_32_found():
    in_fp32 = layer(attention="fused", dtype="float32", dropout=0.0)  # flash attention takes halves alone
    assert "breaks at b=5, s=" in refusal(in_fp32, rules="cuda", **FUSED_SIZES)
    fitted = eb.fit_formula(in_fp32, **{**FUSED_SIZES, "s": [32, 64, 96, 160]})
    assert sp.expand(fitted - 2 * 32 * STATES - 4 * ops.b * ops.a * ops.s - STATISTICS) == 0


# -- peaks -------------------------------------------------------------------------------------------------------------

OPTIMIZERS = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1), "Adam": torch.optim.Adam}


def training(optimizer_class):
    def build(b, h):
        model = nn.Sequential(nn.Linear(h, 4 * h), nn.ReLU(), nn.Linear(4 * h, h))
        optimizer, x = optimizer_class(model.parameters()), torch.ones(b, h)

        def step():
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("quantity", ["peak", "peak above start"])
@pytest.mark.parametrize(
    ("optimizer", "batches", "unseen"),
    [("Adam", [1, 2, 3, 5], 4), ("Adam", [64, 96, 128, 200], 100), ("SGD", [64, 96, 128, 200], 150)],
)
def test_the_peak_of_a_training_step_is_that_of_a_real_one_at_sizes_that_were_not_traced(
    optimizer, batches, unseen, quantity
):
    build = training(OPTIMIZERS[optimizer])
    fitted = eb.fit_formula(build, quantity=quantity, rules="cpu", b=batches, h=[8, 12, 16, 22])
    for b, h in ((unseen, 13), (unseen + 1, 19)):
        with eb.measure(device="cpu") as run:
            step = build(b, h)
            for _ in run.steps(1):
                step()
        expected = run.timeline.peak_bytes if quantity == "peak" else run.timeline.peak_above_start
        assert fitted.subs({ops.b: b, ops.h: h}) == expected


def test_a_peak_that_moves_to_another_place_in_the_step_is_refused():
    with pytest.raises(ValueError, match="no polynomial"):
        eb.fit_formula(
            training(OPTIMIZERS["SGD"]), quantity="peak", rules="cpu", b=[1, 2, 4, 64, 99], h=[8, 12, 16, 22]
        )


def monomials(terms):
    """A step that keeps 4 B for each coefficient times its monomial: the results of exp."""

    def build(**sizes):
        tensors = [
            ones(coefficient, *(size**power for size, power in zip(sizes.values(), powers, strict=True)))
            for powers, coefficient in terms.items()
        ]
        return lambda: [tensor.exp() for tensor in tensors]

    return build


powers = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))


@settings(max_examples=25)
@given(st.dictionaries(powers, st.integers(1, 9), min_size=1, max_size=5))
def test_any_polynomial_within_the_degree_is_found_exactly(terms):
    values = {"b": [1, 2, 3, 5], "s": [1, 4, 6, 7], "L": [1, 2, 3]}
    symbols = sp.symbols("b s L", positive=True, integer=True)
    expected = 4 * sum(c * sp.prod(x**p for x, p in zip(symbols, ps, strict=True)) for ps, c in terms.items())
    assert sp.expand(eb.fit_formula(monomials(terms), rules="cpu", **values) - expected) == 0


def test_a_power_that_does_not_show_at_the_largest_sizes_is_found():
    def build(b, s):
        missing = ones(b, 16 - s)
        return lambda: missing.exp()

    b, s = ops.b, ops.s
    assert eb.fit_formula(build, rules="cpu", b=[1, 2, 3], s=[8, 12, 15, 16]) == sp.expand(4 * b * (16 - s))


def test_coefficients_that_are_fractions_are_exact():
    def build(s):
        triangle = ones(s * (s + 1) // 2)
        return lambda: triangle.exp()

    assert eb.fit_formula(build, rules="cpu", s=[2, 3, 5, 8]) == 2 * ops.s**2 + 2 * ops.s


def test_a_size_that_enters_no_tensor_leaves_the_formula():
    def build(b, dropped):
        x = ones(b)
        return lambda: x.exp()

    assert eb.fit_formula(build, rules="cpu", degree={"b": 1, "dropped": 0}, b=[1, 2, 3], dropped=[1, 2]) == 4 * ops.b


def test_few_sizes_are_traced_each_once_and_each_value_several_times():
    traced = []

    def build(b, s, h, a):
        traced.append((b, s, h, a))
        scores, states = ones(b, a, s, s), ones(b, s, h)
        return lambda: (scores.exp(), states.exp())

    values = {"b": [1, 2, 3, 4], "s": [4, 8, 12, 16, 20], "h": [8, 16, 24, 40], "a": [1, 2, 4, 8]}
    b, s, h, a = ops.b, ops.s, ops.h, ops.a
    assert eb.fit_formula(build, rules="cpu", **values) == 4 * b * a * s**2 + 4 * b * s * h
    assert len(set(traced)) == len(traced)
    determined = 2 * 3 * 2 * 2  # powers of b, s, h, a: a coefficient for each combination
    assert determined < len(traced) <= 2 * determined
    assert tuple(column[0] for column in values.values()) in traced
    for size, column in enumerate(values.values()):
        for value in column:
            assert len({sizes for sizes in traced if sizes[size] == value}) >= 3


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(build, **arguments):
    with pytest.raises(ValueError) as caught:
        eb.fit_formula(build, **{"rules": "cpu", **arguments})
    message = str(caught.value)
    assert "\n" not in message
    return message


def rounded(b, s):
    padded = ones(b, -(-s // 32) * 32)
    return lambda: padded.exp()


def branching(b, s):
    x = ones(b, s)
    return lambda: x.exp().exp() if s > 64 else x.exp()


def branching_on_two(b, s):
    x = ones(b, s)
    return lambda: x.exp().exp() if b * s > 6 else x.exp()


def test_a_rounded_size_is_refused_with_the_place_and_both_numbers():
    message = refusal(rounded, b=[1, 2, 3], s=[64, 96, 128, 160, 120])
    # 160 -> 160, 128 -> 128, 120 -> 128: through b = 3 and 4 B, the quadratic gives at s = 96 what it must
    size, through = sp.Symbol("s"), [(160, 160), (128, 128), (120, 128)]
    wrong = sp.interpolate([(x, 12 * y) for x, y in through], size).subs(size, 96)
    assert f"breaks at b=3, s=96: the one that fits larger sizes gives {wrong} B there, the trace 1152 B" in message


def test_a_rounding_is_refused_however_high_the_degree():
    assert "no polynomial" in refusal(rounded, degree=6, b=[1, 2, 3], s=[1, 30, 33, 40, 64, 70, 96, 97, 130])


def test_a_branch_is_refused_at_the_size_where_it_is_taken_otherwise():
    message = refusal(branching, degree=1, b=[1, 2, 3], s=[16, 32, 64, 65, 128, 256])
    assert "breaks at b=3, s=64: the one that fits larger sizes gives 1536 B there, the trace 768 B" in message


def test_a_branch_on_two_sizes_that_neither_alone_decides_is_refused():
    message = refusal(branching_on_two, degree=1, b=[1, 3, 4], s=[2, 7, 8])
    # with b = 4 or s = 8 the branch is always taken: 8 B each; only b = 1 or 3 with s = 2 goes the other way: 4 B each
    assert "breaks at b=3, s=2: the one that fits larger sizes gives 48 B there, the trace 24 B" in message


def test_a_branch_that_no_value_crosses_is_no_part_of_the_formula():
    assert eb.fit_formula(branching, rules="cpu", b=[1, 2, 3], s=[65, 70, 99]) == 8 * ops.b * ops.s


def test_too_low_a_degree_is_refused():
    build = on_scores(torch.exp)
    message = refusal(build, degree={"b": 1, "s": 1, "a": 1}, b=B, s=S, a=[1, 2, 4])
    assert "powers up to b, s, a gives" in message and "raise degree" in message


def test_an_lstm_on_a_cpu_whose_workspace_is_aligned_is_refused():
    config = replace(TFTConfig.published(), **TFT_SIZES)
    assert config.recurrence == "lstm"
    assert "no polynomial" in refusal(tft_step(config), b=[2, 3, 5, 6], s=[4, 7, 9, 12, 20])


def test_sizes_that_build_refuses_are_named():
    def build(h, a):
        if h % a:
            raise ValueError(f"hidden={h} is not a multiple of heads={a}")
        x = ones(h, a)
        return lambda: x.exp()

    message = refusal(build, h=[4, 8, 10, 12], a=[1, 2, 3, 4])
    assert "ValueError: hidden=10 is not a multiple of heads=4" in message and message.startswith("at h=10, a=4")


def test_bytes_that_hang_on_an_unknown_value_are_refused():
    def build(b):
        x = torch.randn(b, 1000, requires_grad=True)  # too many numbers for their values to be followed
        return lambda: x.exp() if x.sum() > 0 else x * 2

    message = refusal(build, b=[1, 2, 3])
    assert "decides a branch" in message and "b=3" in message and "test_fit.py" in message


def test_a_step_that_the_rules_do_not_cover_is_refused():
    def build(b):
        x = ones(b, b)
        return lambda: x.cumprod(0).sum().backward()

    assert "CumprodBackward0" in refusal(build, quantity="peak", b=[1, 2, 3])


def test_a_forward_pass_under_autocast_keeps_the_cast_weight_and_the_cast_input():
    def build(b):
        layer, x = nn.Linear(b, b, bias=False), torch.ones(b, b, requires_grad=True)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                return layer(x)

        return step

    fitted = eb.fit_formula(build, rules="cuda", b=[1, 2, 3, 4])
    (b,) = fitted.free_symbols
    assert sp.expand(fitted) == 4 * b**2


def test_a_size_that_the_trace_does_not_know_is_refused():
    def build(b):
        x = ones(b, 2000)
        return lambda: ones(b + int(x.sum().item())).exp()

    assert "decides a branch" in refusal(build, b=[1, 2, 3])


def test_an_error_of_pytorch_s_own_is_told_in_one_line():
    assert "Overflow" in refusal(identity, b=[1, 2, 2**70])


def identity(**sizes):
    x = ones(*sizes.values())
    return lambda: x.exp()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, ValueError, "no sizes"),
        ({"b": []}, ValueError, "at least 3 values"),
        ({"b": [4]}, ValueError, "belongs into build"),
        ({"b": [1, 2]}, ValueError, "at least 3 values"),
        ({"b": [1], "degree": 0}, ValueError, "at least 2 values"),
        ({"b": [0, 1, 2]}, ValueError, "leave 0 out"),
        ({"b": [-1, 1, 2]}, ValueError, "leave -1 out"),
        ({"b": [1, 2, 2]}, ValueError, "twice"),
        ({"b": [1, 2, 2.5]}, TypeError, "2.5 is no whole number"),
        ({"b": [True, 2, 3]}, TypeError, "True is no whole number"),
        ({"b": 8}, TypeError, "give a list of sizes"),
        ({"b": "123"}, TypeError, "give a list of sizes"),
        ({"b": B, "degree": -1}, ValueError, "0 or more"),
        ({"b": B, "degree": 1.5}, TypeError, "degree: 1.5 is no whole number"),
        ({"b": B, "degree": {"s": 1}}, ValueError, "highest power of each of b"),
        ({"b": B, "degree": {"b": None}}, TypeError, "degree of b: None"),
        ({"b": B, "quantity": "reserved"}, ValueError, "'saved', 'peak'"),
        ({"b": B, "rules": "tpu"}, ValueError, "rules='tpu'"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_anything_is_traced(arguments, kind, words):
    def build(**sizes):
        raise AssertionError("traced")

    with pytest.raises(kind) as caught:
        eb.fit_formula(build, **{"rules": "cpu", **arguments})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda b: torch.ones(b), "return the step"),
        (lambda b: lambda: torch.ones(b), "no gradient graph"),
        (lambda s: None, "unexpected keyword argument 'b'"),
    ],
)
def test_a_build_or_step_that_is_none_is_refused_with_the_sizes(build, words):
    message = refusal(build, b=B)
    assert words in message and message.startswith("at b=5")


def test_what_cannot_build_is_refused():
    with pytest.raises(TypeError, match="a function of the sizes"):
        eb.fit_formula(nn.Linear(2, 2).weight, rules="cpu", b=B)


def test_inside_a_trace_it_says_to_call_it_outside():
    with eb.trace(rules="cpu"), pytest.raises(ValueError, match="outside the trace"):
        eb.fit_formula(identity, rules="cpu", b=B)


def test_a_model_made_outside_is_refused():
    layer = nn.Linear(4, 4)
    assert "made outside the trace" in refusal(lambda b: lambda: layer(torch.ones(b, 4)), b=B)


def test_after_a_refusal_nothing_is_left_running():
    refusal(branching, b=[1, 2, 3], s=[16, 32, 64, 65])
    refusal(lambda b: 1 / 0, b=B)
    assert eb.fit_formula(identity, rules="cpu", b=B) == 4 * ops.b
    assert torch.ones(2).sum().item() == 2  # numbers are computed again
