"""What other tools count otherwise than a GPU's kernels do, each seen in the tool itself.

PyTorch's own tools always run here. The others run where the extra `benchmarks` is installed, and are skipped
elsewhere; if a test fails there, a tool has changed, and what `Other tools` says of it must change with it.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import everybyte as eb
from everybyte.models import GPT, GPTConfig

BATCH = 2
BF16 = torch.bfloat16


def kept_on_cuda(forward) -> int:
    return eb.saved(forward, rules="cuda").total_bytes


def activations_by_mem_tracker(forward) -> int:
    """What MemTracker has as activations after a forward pass on the CPU's fake tensors, input and output included."""
    with FakeTensorMode(), MemTracker() as tracker:
        out = forward()
        (now,) = tracker.get_tracker_snapshot("current").values()
        del out
    return next(nbytes for kind, nbytes in now.items() if getattr(kind, "value", kind) == "Activation")


# -- PyTorch's own -----------------------------------------------------------------------------------------------------


def test_mem_tracker_has_the_cpus_dropout_mask_which_is_twice_as_wide_as_cudas():
    n = 1000

    def forward():
        return F.dropout(torch.ones(n, dtype=BF16, requires_grad=True), 0.5, training=True)

    beside_the_mask = 2 * n + 2 * n  # input and output
    assert kept_on_cuda(forward) == n
    assert activations_by_mem_tracker(forward) - beside_the_mask == 2 * n


def test_mem_tracker_has_the_scores_that_fused_attention_on_cuda_never_makes():
    b, a, s, d = 1, 4, 128, 64

    def forward():
        q = torch.ones(b, a, s, d, dtype=BF16, requires_grad=True)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    scores = b * a * s * s
    assert activations_by_mem_tracker(forward) > 4 * scores  # two of them in bf16, and the mask
    assert kept_on_cuda(forward) < 3 * 2 * b * a * s * d < 4 * scores


def test_summing_what_saved_tensors_hooks_pack_counts_a_tensor_once_for_each_formula_that_needs_it():
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    x = torch.ones(4, 8)
    packed = 0

    def pack(tensor):
        nonlocal packed
        packed += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    weight = 4 * 8 * 8  # of the second layer; the first one's input needs no gradient
    kept = eb.saved(lambda: net(x)).total_bytes
    assert kept == 2 * x.nbytes  # the input, and ReLU's result
    assert packed - weight == kept + x.nbytes  # that result is saved by ReLU and by the product after it


# -- other packages ----------------------------------------------------------------------------------------------------


def test_torchinfo_counts_a_tied_weight_twice_and_two_outputs_for_each_layer():
    torchinfo = pytest.importorskip("torchinfo")
    tied = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    tied[1].weight = tied[0].weight
    says = torchinfo.summary(tied, input_data=torch.zeros(4, dtype=torch.long), verbose=0)
    assert says.total_params == 2 * 100 * 8

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    says = torchinfo.summary(net, input_data=torch.zeros(4, 8), verbose=0)
    assert says.total_output_bytes == 2 * 4 * (4 * 16 + 4 * 8)  # ReLU's left out, as it has no parameters


def test_torchlens_sees_about_half_of_what_autograd_keeps():
    torchlens = pytest.importorskip("torchlens")
    model, tokens = GPT(GPTConfig(dtype="float32")), torch.zeros(BATCH, 64, dtype=torch.long)
    says = int(torchlens.trace(model, tokens).total_autograd_memory)
    kept = eb.saved(lambda: model(tokens)).total_bytes
    assert 0.4 < says / kept < 0.65


def test_accelerate_shows_the_largest_part_of_a_bf16_step_for_the_whole():
    estimate = pytest.importorskip("accelerate.commands.estimate")
    says = estimate.estimate_training_usage(1_000_000, "bfloat16")
    shown = max(says.values())
    assert shown == says["optimizer"] < says["model"] + says["gradients"] + says["optimizer"]


def test_deepspeed_counts_twenty_bytes_a_parameter_and_no_activation():
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2", exc_type=ImportError)
    assert zero.estimate_zero2_model_states_mem_needs(1_000, cpu_offload=False)[1] == 20_000


def test_llm_analysis_keeps_the_mask_of_the_scores_that_flash_attention_does_not_make():
    analysis = pytest.importorskip("llm_analysis.analysis")
    config = pytest.importorskip("llm_analysis.config")
    layers, heads, s = 2, 4, 64
    sizes = config.ModelConfig("small", layers, heads, 64, 256, s)
    model = analysis.LLMAnalysis(sizes, config.get_gpu_config_by_name("a100-sxm-80gb"))

    def activations(dropout: bool) -> float:
        how = {"batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1, "seq_len": s, "flash_attn": True}
        return model.training(**how, softmax_dropout=dropout)["activation_memory_per_gpu"]

    assert activations(True) - activations(False) == layers * heads * s * s * BATCH


def test_vram_check_gives_one_answer_at_every_sequence_length():
    vram_check = pytest.importorskip("vram_check")
    answers = {vram_check.estimate(1_000_000, BATCH, "bf16", "adamw", seq_len=s).total_bytes for s in (128, 2048)}
    assert len(answers) == 1


def test_gpu_estimator_knows_neither_heads_nor_attention():
    gpu_estimator = pytest.importorskip("gpu_estimator")
    says = gpu_estimator.GPUEstimator().estimate(1_278_332_928, 4, 2048, precision="bf16").activation_memory_gb
    assert says * 2**30 < 2 * 4 * 2048 * 2048 * 24 * 2  # two tensors of hidden size for each layer, of some seventeen


def test_vramcalc_takes_llamas_and_their_kin_alone():
    vramcalc = pytest.importorskip("vramcalc.estimate")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    with pytest.raises(ValueError, match="not supported"):
        vramcalc.estimate({"model_type": "gpt2", "intermediate_size": 256, **sizes}, mode="train")


@pytest.mark.parametrize(
    ("setting", "switches"),
    [
        ("eager attention", {}),
        ("fused attention", {"attention": "fused"}),
        ("fused attention, no dropout", {"attention": "fused", "dropout": 0.0}),
    ],
)
def test_the_stored_table_has_what_this_library_says_of_the_model_now(setting, switches):
    with (Path(__file__).resolve().parent.parent / "book" / "peers.csv").open(encoding="utf-8", newline="") as file:
        stored = {row["setting"]: row for row in csv.DictReader(file) if row["tool"] == "everybyte"}
    config = replace(GPTConfig.seed(), **switches)

    def forward():
        tokens = torch.zeros(4, config.context, dtype=torch.long)
        return GPT(config)(tokens, tokens)

    assert int(stored[f"traced by CUDA's rules, {setting}"]["activations"]) == kept_on_cuda(forward)
