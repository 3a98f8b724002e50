"""The closed forms of a decoder against the decoder: what its layers, its ends and its loss head really hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everybyte as eb
from everybyte.formulas import transformer
from everybyte.formulas.terms import a_kv, d_ff, integer
from everybyte.models.gpt import GPT, GPTConfig

B, S = 3, 8
SMALL = {"vocabulary": 50, "context": S, "layers": 2, "hidden": 32, "heads": 4}
GENERATOR = torch.get_rng_state().nbytes  # of the host, as it was: checkpointing keeps it where something is drawn
SCALE = 8  # a number that multiplies the scores, where no kernel takes it in


def sizes_of(config: GPTConfig, device: str, batch: int = B, sequence: int = S):
    return transformer.sizes(
        batch, sequence, config.hidden, config.heads, config.layers, config.vocabulary, inner=config.mlp_width,
        kv_heads=config.groups, positions=config.context, element=config.torch_dtype, device=device,
    )  # fmt: skip


def switches_of(config: GPTConfig) -> dict:
    return {
        "attention": "flash" if config.attention == "fused" else "eager",
        "mask": "boolean" if (config.mask, config.attention) == ("boolean", "eager") else "none",
        "mlp": config.mlp,
        "dropout": config.dropout > 0,
        "checkpoint": config.checkpoint,
        "kv_heads": a_kv,
        "inner": d_ff,
    }


def saved_by(config: GPTConfig, rules: str | None) -> int:
    def forward() -> torch.Tensor:
        model, tokens = GPT(config), torch.zeros(B, S, dtype=torch.int64)
        return model(tokens, torch.zeros_like(tokens))

    return eb.saved(forward, rules=rules).total_bytes


@pytest.mark.parametrize("rules", [None, "cuda"], ids=["real", "cuda"])
@settings(max_examples=25)
@given(
    mlp=st.sampled_from(["gelu", "relu", "swiglu", "swiglu fused"]),
    attention=st.sampled_from(["eager", "fused"]),
    mask=st.sampled_from(["added", "boolean"]),
    checkpoint=st.sampled_from(["none", "selective", "full"]),
    loss=st.sampled_from(["full", "no upcast", "chunked"]),
    kv_heads=st.sampled_from([1, 2, 4]),
    dropout=st.sampled_from([0.0, 0.1]),
)
def test_what_the_decoder_keeps_is_its_closed_form_to_the_byte_whatever_its_switches(rules, **switches):
    config = GPTConfig(**SMALL, **switches)
    if rules is None and config.attention == "fused" and config.dropout:
        config = GPTConfig(**SMALL, **{**switches, "dropout": 0.0})  # a CPU has no fused kernel that drops
    terms = transformer.stack(loss=config.loss, **switches_of(config))
    expected = integer(terms, sizes_of(config, "cpu" if rules is None else "cuda"))
    if rules is None:  # what a GPU's host would hold is of the one device here
        expected += config.layers * GENERATOR * (config.checkpoint != "none" and config.dropout > 0)
        expected += config.layers * SCALE * ((config.mask, config.attention) == ("boolean", "eager"))
    assert saved_by(config, rules) == expected


@pytest.mark.parametrize(
    "config", [GPTConfig(**SMALL), GPTConfig(**SMALL, mlp="swiglu", kv_heads=2, biases=False)], ids=str
)
def test_each_tensor_of_parameters_is_counted(config):
    terms = transformer.parameters(
        tied=config.tied_head, positions=config.positions == "learned", biases=config.biases, mlp=config.mlp,
        kv_heads=a_kv, inner=d_ff,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    assert integer(terms, sizes_of(config, "cpu")) == sum(parameter.numel() for parameter in model.parameters())


def made_in_the_head(config: GPTConfig, rows: int) -> list[int]:
    """Bytes of each tensor that loss and backward made and that is live at their peak, scalars left out."""
    with eb.measure(device="cpu") as run:
        model = GPT(config)
        states = torch.randn(1, rows, config.hidden, dtype=config.torch_dtype, requires_grad=True)
        targets = torch.zeros(1, rows, dtype=torch.int64)
        for _ in run.steps(1):
            model.loss(states + 1, targets).backward()
    timeline = run.timeline.without("scratch")
    live = timeline.live(timeline.peak)
    return sorted(live[(live["step"] == 0) & (live["nbytes"] > 16)]["nbytes"])


@pytest.mark.parametrize(("loss", "chunks"), [("full", 1), ("no upcast", 1), *(("chunked", n) for n in (1, 2, 3, 8))])
@pytest.mark.parametrize(("rows", "hidden", "vocabulary"), [(40, 24, 300), (40, 24, 20), (8, 96, 70)])
def test_the_loss_head_peaks_as_its_moments_say_tensor_by_tensor(loss, chunks, rows, hidden, vocabulary):
    config = GPTConfig(vocabulary=vocabulary, hidden=hidden, layers=1, context=rows, loss=loss, chunks=chunks)
    sizes = sizes_of(config, "cpu", 1, rows)
    peak = transformer.head_peak(sizes, loss, chunks=chunks)
    made = made_in_the_head(config, rows)
    assert sum(made) == integer(peak, sizes)
    if loss != "chunked":  # of chunks, the gradients of the inputs are several tensors
        assert made == sorted(integer(term, sizes) for term in peak.values())


def test_the_moments_of_the_seeds_head_are_those_found_in_the_field():
    """12 bytes a logit and the weight where all is made, 6 without the copy; 3.05 and 1.59 GiB were seen."""
    sizes = transformer.sizes(4, 2048, 2048, 16, vocabulary=32_000)
    logits, weight, states = 8192 * 32_000, 2 * 32_000 * 2048, 2 * 8192 * 2048
    found = {loss: integer(transformer.head_peak(sizes, loss), sizes) for loss in ("full", "no upcast", "chunked")}
    assert found["full"] == 12 * logits + states
    assert found["no upcast"] == 6 * logits + states
    assert found["chunked"] == 12 * logits // 8 + weight + states + states // 8 * 7
    beside = {loss: round((nbytes - states + weight) / 2**30, 2) for loss, nbytes in found.items() if loss != "chunked"}
    assert beside == {"full": 3.05, "no upcast": 1.59}
    assert round((found["chunked"] + weight) / 2**30, 2) == 0.67


def test_chunking_the_head_of_an_8b_model_saves_what_was_saved_in_the_field():
    sizes = transformer.sizes(1, 8192, 4096, 32, vocabulary=128_256)
    full, chunked = (transformer.head_peak(sizes, loss) for loss in ("full", "chunked"))
    assert integer(full, sizes) == 12 * 8192 * 128_256 + 2 * 8192 * 4096
    assert 4 <= (integer(full, sizes) - integer(chunked, sizes)) / 2**30 <= 9  # 7.32 GiB of a sharded run's memory
    moments = transformer.head_moments("full")
    assert round(integer(moments["logits copied"]["logits"], sizes) / 2**30, 3) == 1.957
    assert round(integer(moments["logits copied"]["fp32 copy"], sizes) / 2**30, 3) == 3.914


def test_wrong_losses_and_chunks_are_refused():
    for call in (transformer.ends, transformer.head_moments):
        with pytest.raises(ValueError, match="loss='mse': choose one of 'full', 'no upcast', 'chunked'"):
            call("mse")
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="chunks="):
            transformer.head_moments("chunked", chunks=wrong)
    with pytest.raises(ValueError, match="no size for"):
        transformer.head_peak({}, "full")
