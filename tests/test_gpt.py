"""The decoder: its size, what each switch makes autograd keep, that no switch changes what is computed, its caches."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

import everybyte as eb
from everybyte.models.gpt import CHOICES, GPT, IGNORED, Block, GPTConfig, KVCache, QuantizedKVCache, generate
from everybyte.run import Run
from everybyte.saved import Saved

SMALL = GPTConfig(vocabulary=96, context=16, layers=2, hidden=48, heads=4, dtype="float32")
B, S = 3, 16
SWITCHES = {f"{name}={choice}": {name: choice} for name, choices in CHOICES.items() for choice in choices} | {
    "no dropout": {"dropout": 0.0},
    "no biases": {"biases": False},
    "head of its own": {"tied_head": False},
    "d_ff": {"d_ff": 40},
    "grouped queries": {"kv_heads": 2},
    "grouped queries, boolean mask": {"kv_heads": 1, "mask": "boolean"},
    "grouped queries, fused": {"kv_heads": 2, "attention": "fused", "dropout": 0.0},
    "fused, no dropout": {"attention": "fused", "dropout": 0.0},
    "fused, bfloat16": {"attention": "fused", "dropout": 0.0, "dtype": "bfloat16"},
    "boolean mask, selective": {"mask": "boolean", "checkpoint": "selective"},
    "fused, selective": {"attention": "fused", "dropout": 0.0, "checkpoint": "selective"},
    "chunked, full": {"loss": "chunked", "checkpoint": "full", "dropout": 0.0},
    "chunks that do not divide": {"loss": "chunked", "chunks": 7},
}
each_switch = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())


def tokens(config: GPTConfig, batch: int = B, sequence: int = S, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def made(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


# -- its size ----------------------------------------------------------------------------------------------------------


def parameters_of(config: GPTConfig) -> int:
    """Each tensor's size from its shape, added up by hand."""
    h, f, bias = config.hidden, config.mlp_width, int(config.biases)
    kv = config.groups * (h // config.heads)
    norm = h + bias * h
    attention = (2 * h + 2 * kv) * (h + bias)
    mlp = (2 if config.gated else 1) * f * (h + bias) + h * (f + bias)
    ends = config.vocabulary * h * (1 if config.tied_head else 2) + norm
    return ends + config.layers * (2 * norm + attention + mlp) + (config.positions == "learned") * config.context * h


def test_the_seed_s_model_has_1_278_332_928_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig.seed())
    assert sum(p.numel() for p in model.parameters()) == 1_278_332_928 == parameters_of(GPTConfig.seed())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not list(model.buffers())


@each_switch
def test_parameters_are_those_of_the_shapes(switch):
    config = replace(SMALL, **switch)
    assert sum(p.numel() for p in made(config).parameters()) == parameters_of(config)


def test_a_swiglu_mlp_of_8h_3_has_as_many_weights_as_a_gelu_mlp_of_4h():
    gelu, swiglu = (replace(SMALL, mlp=mlp, biases=False) for mlp in ("gelu", "swiglu"))
    assert parameters_of(gelu) == parameters_of(swiglu)


# -- what it keeps, on a CPU -------------------------------------------------------------------------------------------


def kept_by_block(config: GPTConfig, rules: str | None = None, batch: int = B, sequence: int = S) -> Saved:
    def forward() -> torch.Tensor:
        x = torch.randn(batch, sequence, config.hidden, dtype=config.torch_dtype, requires_grad=True)
        return Block(config)(x)

    return eb.saved(forward, rules=rules)


SIZES = [(1, 5, 32, 1), (2, 16, 48, 4), (3, 7, 40, 5), (4, 9, 24, 3)]
either_way = pytest.mark.parametrize("rules", [None, "cpu"], ids=["real", "traced"])


@either_way
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_block_keeps_the_formula_s_rows_and_nothing_else(b, s, h, a, dtype, rules):
    """17 sbh + 2 as²b elements and 2 sbh + as²b of masks, which on a CPU are elements too; 4 sb of statistics."""
    config = GPTConfig(context=s, hidden=h, heads=a, dtype=dtype)
    e, sbh, scores = config.torch_dtype.itemsize, s * b * h, a * s * s * b
    assert kept_by_block(config, rules, b, s).total_bytes == e * (16 * sbh + 2 * scores + 2 * sbh + scores + 4 * s * b)


@either_way
def test_a_boolean_mask_is_kept_and_so_is_the_number_that_scales(rules):
    added, boolean = (kept_by_block(replace(SMALL, mask=mask), rules) for mask in ("added", "boolean"))
    assert boolean.total_bytes - added.total_bytes == S * S + 8


MLP_TENSORS = {"gelu": 2, "relu": 1, "swiglu": 4, "swiglu fused": 3}


@either_way
@pytest.mark.parametrize("mlp", MLP_TENSORS)
def test_an_mlp_keeps_as_many_wide_tensors_as_its_gradient_formulas_name(mlp, rules):
    kept = kept_by_block(replace(SMALL, mlp=mlp, d_ff=100), rules).frame()
    wide = kept["shape"].map(lambda shape: shape[-1] == 100)
    assert kept[wide]["nbytes"].tolist() == [4 * B * S * 100] * MLP_TENSORS[mlp]


@either_way
def test_without_dropout_no_mask_and_no_second_copy_of_the_weights_is_kept(rules):
    with_, without = (kept_by_block(replace(SMALL, dropout=p), rules) for p in (0.1, 0.0))
    sbh, scores = S * B * SMALL.hidden, SMALL.heads * S * S * B
    assert with_.total_bytes - without.total_bytes == 4 * (2 * sbh + 2 * scores)


@either_way
def test_fused_attention_keeps_no_score_but_a_log_sum_exp_for_each_query(rules):
    eager, fused = (kept_by_block(replace(SMALL, attention=kind, dropout=0.0), rules) for kind in CHOICES["attention"])
    rows = SMALL.heads * S * B
    assert eager.total_bytes - fused.total_bytes == 4 * (rows * S - rows)


@either_way
@pytest.mark.parametrize("attention", CHOICES["attention"])
def test_shared_keys_and_values_are_kept_once_for_all_their_queries(attention, rules):
    own, shared = (
        kept_by_block(replace(SMALL, kv_heads=g, attention=attention, dropout=0.0), rules).total_bytes for g in (4, 1)
    )
    assert own - shared == 4 * 2 * (4 - 1) * B * S * SMALL.head_width


GENERATOR = torch.get_rng_state().nbytes  # on the host; kept where something is drawn again


@either_way
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers", [1, 3])
def test_full_checkpointing_keeps_the_input_of_each_layer(layers, dropout, rules):
    config = replace(SMALL, layers=layers, checkpoint="full", dtype="bfloat16", dropout=dropout)

    def forward() -> torch.Tensor:
        x = torch.randn(B, S, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        for block in [Block(config) for _ in range(layers)]:
            x = block(x)
        return x

    assert eb.saved(forward, rules).total_bytes == layers * (2 * S * B * config.hidden + GENERATOR * (dropout > 0))


@either_way
@pytest.mark.parametrize("attention", CHOICES["attention"])
def test_selective_checkpointing_keeps_the_linear_terms_and_no_score(attention, rules):
    """16 sbh elements and two masks; queries, keys and values are kept as before, the core's output by its product."""
    config = replace(SMALL, checkpoint="selective", attention=attention, dtype="bfloat16")
    sbh, statistics = S * B * config.hidden, 4 * S * B
    assert kept_by_block(config, rules).total_bytes == 2 * (16 * sbh + 2 * sbh + statistics) + GENERATOR


@pytest.mark.parametrize("b", [1, 2])
@each_switch
def test_a_trace_keeps_row_for_row_what_a_real_forward_pass_keeps(switch, b):
    config = replace(SMALL, **switch)

    def forward() -> torch.Tensor:
        rows = torch.arange(b * S).view(b, S) % config.vocabulary
        return GPT(config)(rows, rows)

    real, traced = eb.saved(forward), eb.saved(forward, rules="cpu")
    assert traced.frame().equals(real.frame())
    assert traced.parameter_bytes == real.parameter_bytes


# -- traced and measured -----------------------------------------------------------------------------------------------


def two_steps(run: Run, config: GPTConfig, batch: int) -> eb.Timeline:
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, config.vocabulary, (batch, config.context)) for name in ("tokens", "targets")}
    torch.manual_seed(0)
    with run:
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in run.steps(2):
            model(**run.to_device(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.timeline.without("scratch")


@pytest.mark.parametrize(("b", "s"), [(1, 16), (4, 40)])
@each_switch
def test_two_traced_steps_allocate_what_two_measured_steps_do(switch, b, s):
    config = replace(SMALL, context=s, **switch)
    traced, measured = two_steps(eb.trace(rules="cpu"), config, b), two_steps(eb.measure(device="cpu"), config, b)
    assert traced.start_bytes == measured.start_bytes
    assert traced.peak_bytes == measured.peak_bytes
    pd.testing.assert_series_equal(traced.allocations(1), measured.allocations(1))


# -- what it computes --------------------------------------------------------------------------------------------------


def loss_and_gradients(config: GPTConfig, model: GPT | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = model or made(config)
    targets = tokens(config, seed=1)
    targets[0, ::3] = IGNORED
    torch.manual_seed(1)
    loss = model(tokens(config), targets)
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("attention", CHOICES["attention"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_checkpointed_gradients_are_the_plain_ones_bit_for_bit(kind, attention):
    plain = replace(SMALL, attention=attention)
    for one, other in zip(loss_and_gradients(plain), loss_and_gradients(replace(plain, checkpoint=kind)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("chunks", [1, 3, 8, 1000])
@pytest.mark.parametrize("tied_head", [True, False])
def test_chunked_loss_and_its_gradients_are_the_full_ones(chunks, tied_head):
    full = replace(SMALL, tied_head=tied_head)
    (loss, gradients), (chunked_loss, chunked_gradients) = (
        loss_and_gradients(config) for config in (full, replace(full, loss="chunked", chunks=chunks))
    )
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    chunked, whole = (torch.cat([grad.flatten() for grad in grads]) for grads in (chunked_gradients, gradients))
    assert (chunked - whole).norm() < 1e-6 * whole.norm()


def test_a_chunked_loss_never_makes_all_logits():
    config = replace(SMALL, vocabulary=1000, loss="chunked", chunks=4)
    made = two_steps(eb.trace(rules="cpu"), config, 4).frame().query("action == 'alloc' and step == 1")
    rows = {shape for shape in made["shape"] if shape.endswith(", 1000]")}
    assert rows == {"[16, 1000]"}


def test_the_logits_of_bfloat16_are_lost_in_the_loss_only_where_they_are_not_upcast():
    config = replace(SMALL, dtype="bfloat16", dropout=0.0)
    model, wanted = made(config), tokens(config, seed=1)
    logits = model(tokens(config))
    assert logits.dtype == torch.bfloat16 and logits.shape == (B, S, config.vocabulary)
    full, rough = (GPT.forward(with_loss(model, loss), tokens(config), wanted) for loss in ("full", "no upcast"))
    exact = F.cross_entropy(logits.double().flatten(0, 1), wanted.flatten())
    assert full.dtype == torch.float32 and rough.dtype == torch.bfloat16
    torch.testing.assert_close(full.double(), exact, rtol=1e-6, atol=0)
    assert abs(rough - exact) > abs(full - exact)


def with_loss(model: GPT, loss: str) -> GPT:
    model.config = replace(model.config, loss=loss)
    return model


def test_the_swiglu_that_recomputes_has_the_gradients_of_the_one_that_keeps():
    plain, fused = (loss_and_gradients(replace(SMALL, mlp=mlp)) for mlp in ("swiglu", "swiglu fused"))
    torch.testing.assert_close(plain, fused, rtol=1e-6, atol=0)


def test_eager_attention_with_either_mask_and_fused_attention_agree():
    model, read = made(SMALL).eval(), tokens(SMALL)
    expected = model(read)
    for switch in ({"mask": "boolean"}, {"attention": "fused"}):
        other = GPT(replace(SMALL, **switch)).eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(read), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("switch", [{}, {"mask": "boolean"}, {"attention": "fused"}], ids=str)
def test_shared_heads_are_heads_repeated(switch):
    """Grouped queries compute what plain attention does whose keys and values are equal within a group."""
    shared = made(replace(SMALL, kv_heads=2, **switch)).eval()
    plain = GPT(replace(SMALL, **switch)).eval()
    state = shared.state_dict()
    for name in [name for name in state if ".attention.k." in name or ".attention.v." in name]:
        state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    plain.load_state_dict(state)
    torch.testing.assert_close(shared(tokens(SMALL)), plain(tokens(SMALL)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("switch", [{}, {"mask": "boolean"}, {"attention": "fused"}], ids=str)
def test_no_position_sees_a_later_one(switch):
    model, read = made(replace(SMALL, **switch)).eval(), tokens(SMALL)
    changed = read.clone()
    changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocabulary
    before, after = model(read), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert (after[:, 9:] != before[:, 9:]).any(-1).all()


def test_it_learns_to_count():
    config = replace(SMALL, dropout=0.0)
    model = made(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.arange(17) + torch.arange(8).unsqueeze(1)
    for _ in range(60):
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1 < math.log(config.vocabulary)
    assert generate(model, rows[:1, :5], 8).tolist() == [list(range(13))]


# -- inference ---------------------------------------------------------------------------------------------------------

CACHED = {
    "eager": {},
    "boolean mask": {"mask": "boolean"},
    "fused": {"attention": "fused"},
    "grouped": {"kv_heads": 2},
    "grouped, boolean mask": {"kv_heads": 1, "mask": "boolean"},
    "grouped, fused": {"kv_heads": 2, "attention": "fused"},
    "no positions": {"positions": "none"},
    "checkpointed": {"checkpoint": "full"},
}
each_cached = pytest.mark.parametrize("switch", CACHED.values(), ids=CACHED.keys())


@each_cached
@pytest.mark.parametrize("cuts", [(0, 16), (0, 5, 10, 15, 16), (0, 12, 13, 14, 15, 16)], ids=str)
@torch.no_grad()
def test_states_over_a_cache_are_those_without_one(switch, cuts):
    config = replace(SMALL, **switch)
    model, read = made(config).eval(), tokens(config)
    cache = KVCache(config, B, S)
    pieces = [model.states(read[:, start:end], cache) for start, end in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces, 1), model.states(read), rtol=1e-5, atol=1e-5)
    assert cache.length == S


@each_cached
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_generated_tokens_are_the_likeliest_without_a_cache(switch, chunk):
    config = replace(SMALL, **switch)
    model, expected = made(config).eval(), tokens(config, sequence=6)
    answer = generate(model, expected, 10, chunk)
    with torch.no_grad():
        for _ in range(10):
            expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(answer, expected)


@pytest.mark.parametrize("kind", [KVCache, QuantizedKVCache])
@each_cached
def test_traced_generation_allocates_what_a_measured_one_does(switch, kind):
    config = replace(SMALL, **switch)

    def answer(run: Run) -> eb.Timeline:
        with run:
            model = GPT(config).eval()
            read = run.to_device(np.zeros((B, 9), "int64"))
            generate(model, read, 4, chunk=4, cache=kind(config, B, S))
        return run.timeline.without("scratch")

    traced, measured = answer(eb.trace(rules="cpu")), answer(eb.measure(device="cpu"))
    assert traced.peak_bytes == measured.peak_bytes
    pd.testing.assert_series_equal(traced.allocations(1), measured.allocations(1))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", CHOICES["dtype"])
def test_a_cache_has_the_bytes_of_its_formula_and_not_one_more(dtype, kv_heads):
    config = replace(SMALL, dtype=dtype, kv_heads=kv_heads)
    elements = 2 * config.layers * B * 100 * kv_heads * config.head_width
    assert KVCache(config, B, 100).nbytes == elements * config.torch_dtype.itemsize
    assert QuantizedKVCache(config, B, 100).nbytes == elements + 4 * elements // config.head_width
    for kind in (KVCache, QuantizedKVCache):
        with eb.measure(device="cpu") as run:
            cache = kind(config, B, 100)
        assert run.timeline.live_bytes[-1] == cache.nbytes


def test_the_seed_s_cache_is_1_610_612_736_bytes():
    with torch.device("meta"):
        assert KVCache(GPTConfig.seed(), 4, 2048).nbytes == 1_610_612_736


def test_decoding_allocates_no_second_cache():
    config = replace(SMALL, context=400)
    cache = KVCache(config, B, 400)
    model, read = made(config).eval(), tokens(config, sequence=390)
    with torch.no_grad():
        model.states(read, cache)
    with eb.measure(device="cpu") as run:
        generate(model, read[:, :1], 4, cache=cache)
    assert run.timeline.peak_bytes < cache.nbytes // 4


def test_a_quantized_cache_is_off_by_half_a_step_at_most():
    cache = QuantizedKVCache(SMALL, B, S)
    k, v = (torch.randn(B, SMALL.groups, S, SMALL.head_width) * torch.logspace(-3, 3, S).view(S, 1) for _ in range(2))
    k[:, :, 3] = 0
    for exact, kept in zip((k, v), cache.update(1, k, v), strict=True):
        half_a_step = exact.abs().amax(-1, keepdim=True) / 254
        assert ((kept - exact).abs() <= half_a_step * (1 + 1e-5)).all()
        assert (kept != exact).any()


@torch.no_grad()
def test_states_over_a_quantized_cache_stay_near():
    model, read = made(SMALL).eval(), tokens(SMALL)
    cache = QuantizedKVCache(SMALL, B, S)
    states = torch.cat([model.states(piece, cache) for piece in read.split(4, 1)], 1)
    exact = model.states(read)
    error = (states - exact).norm() / exact.norm()
    assert 0 < error < 0.01


# -- errors ------------------------------------------------------------------------------------------------------------

BAD = {
    "hidden=50 is not a multiple of heads=4: 48 would be": {"hidden": 50},
    "heads=4 cannot share kv_heads=3 evenly": {"kv_heads": 3},
    "heads=4 cannot share kv_heads=8 evenly": {"kv_heads": 8},
    "dtype='fp8' is unknown: choose one of bfloat16, float16, float32": {"dtype": "fp8"},
    "attention='flash' is unknown: choose one of eager, fused": {"attention": "flash"},
    "mlp='geglu' is unknown": {"mlp": "geglu"},
    "loss='fused' is unknown": {"loss": "fused"},
    "checkpoint='all' is unknown": {"checkpoint": "all"},
    "checkpoint=True is unknown": {"checkpoint": True},
    "layers=0 leaves nothing": {"layers": 0},
    "context=-1 leaves nothing": {"context": -1},
    "kv_heads=0 leaves nothing": {"kv_heads": 0},
    "d_ff=-4 leaves nothing": {"d_ff": -4},
    "vocabulary=True is not a whole number": {"vocabulary": True},
    "hidden=48.0 is not a whole number": {"hidden": 48.0},
    "chunks=None is not a whole number": {"chunks": None},
    "tied_head=1 is not a switch": {"tied_head": 1},
    "dropout=1.0 is not a rate": {"dropout": 1.0},
    "dropout=False is not a rate": {"dropout": False},
    "dropout='0.1' is not a rate": {"dropout": "0.1"},
}


@pytest.mark.parametrize(("message", "switch"), BAD.items(), ids=BAD.keys())
def test_a_config_that_no_model_can_have_is_refused_in_one_line(message, switch):
    with pytest.raises(ValueError) as refused:
        replace(SMALL, **switch)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="17 positions are more than context=16"):
        GPT(SMALL)(tokens(SMALL, sequence=17))
    with pytest.raises(ValueError, match="17 positions are more than context=16"):
        generate(GPT(SMALL), tokens(SMALL, sequence=10), 8)


def test_what_no_cache_can_hold_is_refused():
    with pytest.raises(ValueError, match="length=0 leaves nothing to keep"):
        KVCache(SMALL, 1, 0)
    with pytest.raises(ValueError, match="11 positions do not fit a cache with room for 10"):
        generate(GPT(SMALL), tokens(SMALL, sequence=10), 2, cache=KVCache(SMALL, B, 10))
    with pytest.raises(ValueError, match="a batch of 3 meets a cache of 1 sequences: make one for 3"):
        generate(GPT(SMALL), tokens(SMALL, sequence=4), 2, cache=KVCache(SMALL, 1, 10))
    with pytest.raises(ValueError, match=r"no gradient: call it under torch.no_grad\(\)"):
        GPT(SMALL).states(tokens(SMALL), KVCache(SMALL, B, S))
    with pytest.raises(ValueError, match="new_tokens=0 gets nowhere"):
        generate(GPT(SMALL), tokens(SMALL), 0)
    with pytest.raises(ValueError, match="chunk=-1 gets nowhere"):
        generate(GPT(SMALL), tokens(SMALL), 1, chunk=-1)
