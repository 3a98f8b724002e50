"""Model state in closed form: published totals, the same in plain integers, and optimizers that really run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everybyte as eb
from everybyte.formulas import model_state as state
from everybyte.formulas import transformer
from everybyte.formulas.model_state import N, largest
from everybyte.formulas.terms import L, P, b, e, h, integer, s, total
from everybyte.models import MasterWeights
from everybyte.run import Run

SEED = {P: 1_278_332_928}
MIB = 2**20


@pytest.mark.parametrize(
    ("recipe", "width"),
    [
        ("bf16", 8),
        ("fp32 without gradients", 12),
        ("fp32", 16),
        ("bf16, master copy", 16),
        ("bf16, master copy, fp32 gradients", 18),
        ("bf16, master copy, both gradients", 20),
    ],
)
def test_each_recipe_has_its_bytes_a_parameter(recipe, width):
    assert total(state.adam(recipe)) == width * P
    assert integer(state.adam(recipe), {P: 1_280_000_000}) == width * 1_280_000_000


def test_the_seeds_model_state_is_its_20_5_gb():
    parts = state.adam("bf16, master copy")
    assert list(parts) == ["weights", "gradients", "master copy", "momentum", "variance"]
    assert integer(parts, SEED) == 16 * 1_278_332_928
    assert round(integer(parts, SEED) / 1e9, 1) == 20.5
    sizes = transformer.sizes(4, 2048, 2048, 16, 24, 32_000)
    assert SEED[P] == integer(transformer.parameters(), sizes)
    kept = integer(transformer.paper(transformer.stack()["layers"]), sizes)
    assert kept > 2 * integer(parts, SEED)  # "more than twice the entire model-state budget"


def test_foreach_makes_one_more_copy_and_a_loop_three_of_one_tensor():
    assert total(state.step("fp32", "foreach")) == 20 * P
    assert total(state.step("fp32", "for loop")) == 16 * P + 12 * largest
    assert total(state.step("fp32", "fused")) == 16 * P
    shares = {P: 16 * 256 * 1024, largest: 256 * 1024}  # 4.19 copies were seen of 16 such tensors
    assert round(integer(state.step("fp32", "for loop"), shares) / (4 * shares[P]), 2) == 4.19
    assert total(state.step("bf16", "foreach")) == 10 * P
    assert total(state.step("bf16, master copy", "foreach")) == 24 * P
    assert total(state.step("bf16, master copy, fp32 gradients", "foreach")) == 22 * P
    vit = 1.217e9  # bytes of one copy, ViT-L/16: 6.09 GB were seen
    assert round(float(total(state.step("fp32", "foreach")).subs(P, 1)) / 4 * vit / 1e9, 2) == pytest.approx(
        6.09, abs=0.01
    )


@pytest.mark.parametrize("implementation", ["foreach", "for loop"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16, master copy"])
def test_a_measured_step_of_adam_peaks_as_its_closed_form_to_the_byte(recipe, implementation):
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    make = MasterWeights if recipe == "bf16, master copy" else torch.optim.AdamW
    with eb.measure(device="cpu") as run:
        model = nn.ParameterList(nn.Parameter(torch.zeros(32, 128, dtype=dtype)) for _ in range(16))
        optimizer = make(model.parameters(), foreach=implementation == "foreach")
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        for _ in run.steps(2):
            optimizer.step()
    timeline = run.timeline.without("scratch")
    live = timeline.live(timeline.peak)
    expected = integer(state.step(recipe, implementation), {P: 16 * 32 * 128, largest: 32 * 128})
    assert live[live["nbytes"] > 16]["nbytes"].sum() == expected


def test_eight_bit_moments_take_a_byte_and_a_constant_for_each_block():
    assert integer(state.adam_8bit(), {P: 2048}) == 2048 * 6 + 2 * 4
    assert integer(state.adam_8bit(), {P: 2049}) == 2049 * 6 + 2 * 8
    assert integer(state.adam_8bit(256, weights=4), {P: 1000}) == 1000 * 10 + 2 * 16


def test_double_quantization_takes_the_constants_from_a_half_to_0_127_bits():
    count = 64 * 256 * 1000
    bits = {double: 8 * integer(state.nf4(double), {P: count}) / count - 4 for double in (True, False)}
    assert bits[False] == 0.5
    assert bits[True] == 8 / 64 + 32 / (64 * 256)
    assert round(bits[True], 3) == 0.127
    assert integer(state.nf4(), {P: 65}) == 33 + 2 + 4


def test_adapters_have_gradients_and_moments_and_the_base_has_none():
    gpt = transformer.sizes(4, 2048, 2048, 16, 24, 32_000)
    adapters = state.lora_parameters(8, [(h, h, 2 * L)])  # of the queries' and the values' matrices
    assert integer(adapters, gpt) == 24 * 2 * 8 * 4096
    whole = state.lora(adapters)
    assert integer(whole, {**gpt, **SEED}) == 2 * 1_278_332_928 + 8 * 24 * 2 * 8 * 4096
    assert not [part for part in whole if "gradient" in part and "adapters" not in part]
    quantized = integer(state.lora(adapters, base=state.nf4()), {**gpt, **SEED})
    blocks = -(-1_278_332_928 // 64)
    assert quantized == 1_278_332_928 // 2 + blocks + 4 * -(-blocks // 256) + 8 * 24 * 2 * 8 * 4096


@pytest.mark.parametrize(("sharding", "gigabytes"), [("ddp", 120), ("zero-1", 31.4), ("zero-2", 16.6), ("zero-3", 1.9)])
def test_zero_leaves_each_of_64_gpus_what_its_paper_says(sharding, gigabytes):
    nbytes = integer(state.per_gpu(sharding), {P: 7_500_000_000, N: 64})
    assert round(nbytes / 1e9, 1) == gigabytes


@given(
    sharding=st.sampled_from(["ddp", "zero-1", "zero-2", "zero-3"]),
    recipe=st.sampled_from(list(state.RECIPES)),
    count=st.integers(1, 10**12),
    gpus=st.integers(1, 5000),
    buckets=st.booleans(),
)
def test_a_share_counted_in_plain_integers_is_the_same(sharding, recipe, count, gpus, buckets):
    weights, half, full, *rest = state.RECIPES[recipe]
    share = (count + gpus - 1) // gpus
    level = ["ddp", "zero-1", "zero-2", "zero-3"].index(sharding)
    nbytes = sum(rest) * (share if level >= 1 else count)
    nbytes += (half + full) * (share if level >= 2 else count)
    nbytes += weights * (share if level >= 3 else count)
    nbytes += (full or half) * count if buckets else 0
    assert integer(state.per_gpu(sharding, recipe, buckets=buckets), {P: count, N: gpus}) == nbytes


def chain(cleared: str, layers: int, width: int, rows: int, run: Run) -> int:
    """Peak of a second step through equal linear layers."""
    with run:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        x = torch.randn(rows, width)
        for _ in run.steps(2):
            if cleared == "before forward":
                model.zero_grad()
            y = model(x)
            if cleared != "before forward":
                model.zero_grad(set_to_none=cleared == "after forward")
            loss = y.sum()
            del y
            loss.backward()
    timeline = run.timeline.without("scratch")
    live = timeline.live(timeline.peak)
    return live[live["nbytes"] > 16]["nbytes"].sum()


@pytest.mark.parametrize(
    ("cleared", "mib"), [("before forward", 104.02), ("after forward", 112.03), ("set to zero", 116.04)]
)
def test_when_gradients_are_cleared_decides_the_peak_as_it_did_in_the_field(cleared, mib):
    sizes = {b: 1, s: 4096, h: 1024, L: 4, e: 4, P: 4 * (1024 * 1024 + 1024)}
    assert abs(integer(state.chain_peak(cleared), sizes) / MIB - mib) < 0.006
    assert chain(cleared, 4, 1024, 4096, eb.trace(rules="cpu")) == integer(state.chain_peak(cleared), sizes)


@pytest.mark.parametrize("cleared", ["before forward", "after forward", "set to zero"])
@pytest.mark.parametrize("layers", [3, 4, 6])
def test_the_peak_of_a_chain_of_linear_layers_is_measured_to_the_byte(cleared, layers):
    sizes = {b: 1, s: 40, h: 32, L: layers, e: 4, P: layers * (32 * 32 + 32)}
    assert chain(cleared, layers, 32, 40, eb.measure(device="cpu")) == integer(state.chain_peak(cleared), sizes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state.adam("fp64"), "recipe='fp64': choose one of 'bf16'"),
        (lambda: state.step("fp32", "compiled"), "implementation='compiled': choose one of 'foreach'"),
        (lambda: state.per_gpu("zero-4"), "sharding='zero-4': choose one of 'ddp'"),
        (lambda: state.adam_8bit(0), "block=0: must be an integer from 1"),
        (lambda: state.adam_8bit(weights=True), "weights=True"),
        (lambda: state.adam("fp32", -5), "count=-5: must be an integer from 1"),
        (lambda: state.nf4(count=2.5), "count=2.5"),
        (lambda: state.lora_parameters(0, [(h, h, 1)]), "rank=0: must be an integer from 1"),
        (lambda: state.lora_parameters(8, [(h, 1.5, 1)]), "matrices=1.5"),
        (lambda: state.chain_peak("never"), "cleared='never': choose one of 'before forward'"),
        (lambda: integer(state.adam("fp32"), {P: 2**60}), "is no number of bytes"),
        (lambda: integer(state.per_gpu("zero-1"), {P: 10}), "no size for N"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
