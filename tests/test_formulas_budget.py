"""The whole step in closed form, against traces of the step itself."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

import everybyte as eb
from everybyte.formulas import budget, model_state, transformer
from everybyte.formulas.model_state import N
from everybyte.formulas.terms import L, P, V, a, a_kv, d_ff, e, h, integer, s, total
from everybyte.models.gpt import GPT, GPTConfig
from everybyte.models.lora import add_lora
from everybyte.models.master import MasterWeights

PLAIN = {switch: words[0] for switch, words in budget.SWITCHES.items()}
OPTIMIZERS = {"bf16": torch.optim.AdamW, "fp32": torch.optim.AdamW, "bf16, master copy": MasterWeights}


def a_step(rng: random.Random) -> tuple[GPTConfig, int, dict[str, str]]:
    """A model, a batch, and the same in the words of the formulas."""
    heads, recipe = rng.choice([4, 8]), rng.choice([*OPTIMIZERS])
    words = PLAIN | {switch: rng.choice(budget.SWITCHES[switch]) for switch in ("mlp", "head", "dropout", "gradients")}
    words |= {"biases": rng.choice(["all", "none"]), "checkpoint": rng.choice(["none", *budget.SWITCHES["checkpoint"]])}
    words |= {"recipe": recipe, "attention": "eager" if recipe == "fp32" else rng.choice(["eager", "flash"])}
    words |= {"loss": rng.choice(transformer.LOSSES[1:] if recipe == "fp32" else transformer.LOSSES)}
    config = GPTConfig(
        vocabulary=rng.choice([512, 4096, 16384]), context=rng.choice([128, 256, 512]), layers=rng.choice([2, 4, 8]),
        hidden=heads * rng.choice([32, 64]), heads=heads, kv_heads=heads // rng.choice([1, 2]), mlp=words["mlp"],
        attention={"eager": "eager", "flash": "fused"}[words["attention"]], dropout=0.1 * (words["dropout"] == "on"),
        biases=words["biases"] == "all", tied_head=words["head"] == "tied", checkpoint=words["checkpoint"],
        loss=words["loss"], dtype="float32" if recipe == "fp32" else "bfloat16",
    )  # fmt: skip
    return config, rng.choice([1, 2, 4]), words


def traced(config: GPTConfig, batch: int, words: dict[str, str], rank: int = 0) -> int:
    """The peak of the second step, by CUDA's rules."""
    data = torch.zeros(2, batch, config.context, dtype=torch.int64)
    with eb.trace(rules="cuda") as run:
        model = add_lora(GPT(config), rank, ("q", "k", "v", "out", "gate", "up", "down")) if rank else GPT(config)
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS.get(words["recipe"], torch.optim.AdamW)(learned)
        for _ in run.steps(2):
            tokens, targets = run.to_device([*data])
            for _ in range(2 if words["gradients"] == "waiting" else 1):
                loss = model(tokens, targets)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.timeline.without("scratch").peak_bytes


def computed(config: GPTConfig, batch: int, words: dict[str, str], rank: int = 1) -> dict[str, int]:
    """Bytes at each moment."""
    sizes = transformer.sizes(
        batch, config.context, config.hidden, config.heads, config.layers, config.vocabulary, inner=config.mlp_width,
        kv_heads=config.groups, positions=config.context, element=config.dtype,
    )  # fmt: skip
    sizes = budget.counts(words, sizes | {budget.rank: rank, N: 1})
    return {moment: integer(pieces, sizes) for moment, pieces in budget.moments(words).items()}


@pytest.mark.parametrize("seed", range(10))
def test_the_peak_is_the_traced_one_to_the_byte_but_inside_a_layer(seed):
    step = a_step(random.Random(seed))
    here, there = computed(*step), traced(*step)
    moment = max(here, key=here.get)
    if "layer" in moment:  # gradients in flight are counted at two places only
        assert abs(here[moment] / there - 1) < 0.05
    else:  # where chunks' gradients of a weight are summed, the number of targets is there a second time
        assert 0 <= there - here[moment] <= (4 if "sum" in moment else 0)


def test_the_seeds_step_peaks_in_log_softmax_as_chapter_14_derives():
    words = PLAIN | {"recipe": "bf16, master copy"}
    here = computed(GPTConfig.seed(), 4, words)
    kept = transformer.stack()
    sizes = transformer.sizes(4, 2048, 2048, 16, 24, 32_000)
    wanted = 14 * 1_278_332_928 + integer(kept, sizes) + 2 * 4 * 4 * 2048 * 32_000 + 4
    assert max(here.values()) == here["loss head: backward of log-softmax"] == wanted


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_lora_is_above_the_trace_by_what_a_frozen_head_and_norm_need_not_keep(attention):
    words = PLAIN | {"recipe": "LoRA", "attention": attention, "dropout": "off", "mlp": "swiglu", "biases": "none"}
    config = GPTConfig(
        vocabulary=4096, context=256, layers=4, hidden=256, heads=4, kv_heads=2, mlp="swiglu", dropout=0.0,
        attention={"eager": "eager", "flash": "fused"}[attention], biases=False,
    )  # fmt: skip
    here, there = max(computed(config, 2, words, rank=8).values()), traced(config, 2, words, rank=8)
    assert 0.97 < there / here <= 1


def test_every_setting_that_goes_together_has_moments_and_no_other():
    for dtype, recipe, sharding in product(
        ("bfloat16", "float32"), budget.SWITCHES["recipe"], budget.SWITCHES["sharding"]
    ):
        words = PLAIN | {"recipe": recipe, "sharding": sharding}
        fault = budget.mismatch(words, dtype)
        if fault is None:
            assert "optimizer" in budget.moments(words)
        elif fault[0] == "sharding":
            with pytest.raises(ValueError, match="one GPU"):
                budget.moments(words)


def test_a_word_that_is_none_is_refused():
    with pytest.raises(ValueError, match="attention='linear'"):
        budget.moments(PLAIN | {"attention": "linear"})


def test_zero_shards_what_its_stage_says():
    numbers = {P: 8_000, N: 8, e: 2}

    def bytes_of(piece: str, sharding: str) -> int:
        words = PLAIN | {"recipe": "bf16, master copy", "sharding": sharding}
        return integer(budget.PIECES[piece].at(words), numbers)

    def at(sharding: str) -> list[int]:
        return [bytes_of(piece, sharding) for piece in ("weights", "gradients", "optimizer state")]

    assert at("one GPU") == [16_000, 16_000, 96_000]
    assert at("ddp") == [16_000, 16_000, 96_000 + 16_000]  # its buckets
    assert at("zero-1") == [16_000, 16_000, 12_000]
    assert at("zero-2") == [16_000, 2_000, 12_000]
    assert at("zero-3") == [2_000, 2_000, 12_000]


def test_parameters_of_lora_and_of_layers_are_those_of_the_matrices():
    sizes = {L: 3, h: 64, a: 8, a_kv: 2, d_ff: 96, V: 10, budget.rank: 5}
    matrices = [(64, 64), (64, 16), (64, 16), (64, 64), (64, 96), (64, 96), (96, 64)]
    swiglu = PLAIN | {"mlp": "swiglu", "recipe": "LoRA"}
    assert integer(budget.COUNTS[budget.A].at(swiglu), sizes) == 3 * 5 * sum(x + y for x, y in matrices)
    assert integer(budget.COUNTS[budget.P_layers].at(swiglu), sizes) == 3 * sum(x * y for x, y in matrices)
    queries = swiglu | {"adapted": "queries and values"}
    assert integer(budget.COUNTS[budget.A].at(queries), sizes) == 3 * 5 * (128 + 80)


def test_a_layers_two_parts_are_all_of_it_and_cross_where_the_chapter_says():
    for attention, checkpoint, mlp, dropout in product(*(budget.SWITCHES[x] for x in budget.PARTS.switches)):
        setting = dict(zip(budget.PARTS.switches, (attention, checkpoint, mlp, dropout), strict=True))
        parts = budget.PARTS.at(setting)
        kept = total(budget.layer(attention, checkpoint, mlp, dropout))
        rest = kept - parts["with s"] * s - parts["with s squared"] * s**2
        assert not total(rest).has(s), setting  # the random state of a flash kernel
    words = {"attention": "eager", "checkpoint": "none", "mlp": "gelu", "dropout": "on"}
    seed = transformer.sizes(4, 2048, 2048, 16)
    linear, quadratic = (integer(part, seed) for part in budget.PARTS.at(words).values())
    assert linear - 16 * 4 == 34 * 4 * 2048 and quadratic == 5 * 16 * 4  # the statistics of two norms beside


def test_eight_bit_and_four_bit_weights_are_the_recipes_own():
    sizes = {P: 10**6, budget.P_layers: 900_000, budget.A: 5_000, e: 2}
    words = PLAIN | {"recipe": "8-bit Adam"}
    state = sum(integer(budget.PIECES[x].at(words), sizes) for x in ("weights", "gradients", "optimizer state"))
    assert state == integer(model_state.adam_8bit(256), sizes)
    four = integer(budget.PIECES["weights"].at(PLAIN | {"recipe": "QLoRA"}), sizes)
    assert four == integer(model_state.nf4(count=budget.P_layers), sizes) + 2 * 100_000 + 2 * 5_000
