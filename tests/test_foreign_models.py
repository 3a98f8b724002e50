"""Models that nobody here wrote, trained without a line of them changed: traced, they allocate what they really do.

They are built from a configuration, small and at random; nothing is fetched.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from agreement import assert_agree

import everybyte as eb
from everybyte.formulas import transformer as formulas
from everybyte.formulas.terms import integer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers", reason="the models are those of transformers: pip install transformers")

B, S, V = 2, 24, 99
TEXT = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}


def gpt2(**options):
    config = hf.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=V, n_positions=64, use_cache=False, **options)
    return hf.GPT2LMHeadModel(config)


def llama(**options):
    config = hf.LlamaConfig(**TEXT, num_key_value_heads=2, vocab_size=V, use_cache=False, **options)
    return hf.LlamaForCausalLM(config)


def bert(**options):
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, vocab_size=V, max_position_embeddings=64, **options))


def mixtral(**options):
    config = hf.MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=4, vocab_size=V, use_cache=False, **options
    )
    return hf.MixtralForCausalLM(config)


def t5(**options):
    config = hf.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return hf.T5ForConditionalGeneration(config)


def vit(**options):
    config = hf.ViTConfig(**TEXT, image_size=32, patch_size=8, hidden_dropout_prob=0.1, num_labels=3, **options)
    return hf.ViTForImageClassification(config)


def resnet(**options):
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config)


def segformer(**options):
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return hf.SegformerForImageClassification(config)


def text(mask=None):
    tokens = np.random.default_rng(0).integers(0, V, (2, B, S))
    batch = {"input_ids": tokens[0], "labels": tokens[1]}
    if mask is not None:
        batch["attention_mask"] = np.ones((B, S), "int64")
        batch["attention_mask"][1, S - mask :] = 0
    return batch


def images():
    pixels = np.random.default_rng(0).standard_normal((B, 3, 32, 32)).astype("float32")
    return {"pixel_values": pixels, "labels": np.array([0, 1])}


def training(build, batch, checkpoint=None, foreach=None, autocast=False):
    """A body of training code: two steps of AdamW with labels in the batch and dropout on."""

    def body(run):
        model = build().train()
        if checkpoint is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoint})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
        given = run.to_device(batch)
        for _ in run.steps(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

    return body


# -- on the host: equal to the byte, every size allocated --------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "attention", "checkpoint"),
    [
        *((gpt2, "eager", None), (llama, "eager", True), (bert, "eager", False)),
        *((gpt2, "sdpa", True), (llama, "sdpa", False), (bert, "sdpa", None)),
    ],
)
def test_language_models_allocate_what_a_padded_batch_takes(build, attention, checkpoint):
    body = training(lambda: build(attn_implementation=attention), text(mask=7), checkpoint)
    assert assert_agree(body).conditional == []


@pytest.mark.parametrize(("build", "mask"), [(gpt2, None), (gpt2, 0), (llama, 0), (bert, 0)])
def test_language_models_skip_a_mask_that_masks_nothing(build, mask):
    run = assert_agree(training(lambda: build(attn_implementation="sdpa"), text(mask)))
    assert run.conditional == [] and run.unknown_reads == []


@pytest.mark.parametrize("foreach", [False, True])
def test_the_optimizer_s_own_way_is_followed(foreach):
    assert_agree(training(gpt2, text(), foreach=foreach))


@pytest.mark.parametrize("build", [mixtral, t5])
def test_experts_and_encoders_with_decoders(build):
    assert assert_agree(training(build, text(mask=7))).conditional == []


@pytest.mark.parametrize("build", [vit, resnet, segformer])
def test_vision_models(build):
    assert_agree(training(build, images()))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "autocast"),
    [
        *((gpt2, False), (gpt2, True), (llama, True), (bert, False)),
        *((mixtral, False), (t5, True), (vit, True), (resnet, True)),
    ],
)
def test_on_a_gpu_nothing_is_uncovered(build, autocast):
    batch = images() if build in (vit, resnet) else text(mask=7)
    with eb.trace(rules="cuda") as run:
        training(build, batch, autocast=autocast)(run)
    assert run.not_covered == set()
    assert run.timeline.by("category")["nbytes"]["parameter"] == 4 * sum(p.numel() for p in build().parameters())


@pytest.mark.parametrize(("activation", "extra"), [("gelu", 0), ("gelu_new", 3)])
def test_a_block_keeps_on_a_gpu_what_the_closed_form_says(activation, extra):
    """`gelu_new` is composed of five operations, which keep three tensors of the inner width beside GELU's input."""
    with eb.trace(rules="cuda"):
        block = gpt2(attn_implementation="eager", activation_function=activation).train().transformer.h[0]
        x = torch.randn(B, S, 32, requires_grad=True)
        kept = eb.saved(lambda: block(x))
    closed = integer(formulas.layer(), formulas.sizes(B, S, 32, 4, element=4))
    assert kept.total_bytes == closed + extra * 4 * (B * S * 4 * 32)
