"""`from_pretrained` in a trace: the model's shapes from its configuration; no weights are read, nothing is fetched."""

from __future__ import annotations

import os

import pytest
import torch

import everybyte as eb
from everybyte.script import Failed, Program

hf = pytest.importorskip("transformers", reason="the models are those of transformers: pip install transformers")
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 99}
EMBEDDING, BLOCK = 99 * 32, 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
PARAMETERS = 2 * EMBEDDING + 2 * BLOCK + 32


@pytest.fixture
def folder(tmp_path):
    """A configuration, and weights that cannot be read."""
    config = hf.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("load", "width"),
    [
        (lambda name: hf.AutoModelForCausalLM.from_pretrained(name).cuda(), 2),
        (lambda name: hf.AutoModelForCausalLM.from_pretrained(name, device_map="cuda"), 2),
        (lambda name: hf.LlamaForCausalLM.from_pretrained(name, device_map="auto", dtype=torch.float32), 4),
        (lambda name: hf.LlamaForCausalLM.from_pretrained(name, use_cache=False).to("cuda"), 2),
        (lambda name: hf.LlamaForCausalLM.from_pretrained(name, config=hf.AutoConfig.from_pretrained(name)).cuda(), 2),
    ],
)
def test_a_model_has_the_shapes_of_its_configuration_wherever_it_is_put(folder, load, width):
    with eb.trace(rules="cuda", default="cpu") as run:
        model = load(folder)
        assert not model.training and model.config.name_or_path == folder
        assert {(p.device, p.dtype.itemsize) for p in model.parameters()} == {(torch.device("cuda:0"), width)}
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS
        tokens = torch.ones(2, 8, dtype=torch.int64, device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
    live = run.timeline.by("category")["nbytes"]
    assert live["parameter"] == width * PARAMETERS
    assert not run.conditional and not run.not_covered


def test_a_model_on_the_host_is_not_counted(folder):
    with eb.trace(rules="cuda", default="cpu") as run:
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        assert all(p.is_cpu for p in model.parameters())
        assert not run.timeline.peak_bytes


def test_after_the_block_weights_are_read_again(folder):
    before = dict(os.environ)
    load = hf.PreTrainedModel.from_pretrained
    with eb.trace(rules="cuda", default="cpu"):
        hf.AutoModelForCausalLM.from_pretrained(folder)
    assert hf.PreTrainedModel.from_pretrained == load and dict(os.environ) == before
    with pytest.raises(Exception, match=r"[Hh]eader"):
        hf.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("load", "why", "cannot_say"),
    [
        ("AutoModel.from_pretrained('nobody/nothing')", "a trace fetches nothing: name a folder", False),
        ("LlamaModel.from_pretrained('nobody/nothing')", "a trace fetches nothing: name a folder", False),
        ("AutoTokenizer.from_pretrained('nobody/nothing')", "a trace fetches nothing: name a folder", False),
        ("LlamaModel.from_pretrained(FOLDER, quantization_config=GPTQConfig(bits=4))", r"\(GPTQConfig\)", True),
    ],
)
def test_what_is_not_on_this_machine_or_is_quantized_ends_in_one_line(
    folder, tmp_path, monkeypatch, load, why, cannot_say
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(f"from transformers import *\nFOLDER = {folder!r}\nmodel = {load}\n")
    with pytest.raises(Failed, match=why) as failed:
        Program("train.py").trace()
    assert failed.value.cannot_say == cannot_say
    assert str(failed.value).startswith("train.py:3: ") and "\n" not in str(failed.value)
