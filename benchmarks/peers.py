"""What other tools say of the 1.3B decoder's training step, and what this library does: the table of *Other tools*.

    python -m venv _build/peers && _build/peers/bin/pip install torch==2.13.0 . -r benchmarks/peers.txt
    _build/peers/bin/pip install --no-deps llm-analysis==0.2.2
    _build/peers/bin/python benchmarks/peers.py        a few minutes; writes book/peers.csv

A tool that is not installed is left out, and said so. All are given the same step: four sequences of 2,048 tokens,
every tensor in bf16, AdamW. Where a tool has a recipe of its own for gradients and optimizer state, it answers by that.
"""

from __future__ import annotations

import csv
import datetime
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import everybyte as eb
from everybyte.models import GPT, GPTConfig
from everybyte.units import GB, GiB, MiB

TABLE = Path(__file__).resolve().parent.parent / "book" / "peers.csv"
BATCH = 4
EAGER = GPTConfig.seed()
FUSED = replace(EAGER, attention="fused")
PLAIN = replace(FUSED, dropout=0.0)


@dataclass(frozen=True)
class Answer:
    """What a tool says, in bytes; None where it says nothing."""

    tool: str
    setting: str
    parameters: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    activations: int | None = None
    total: int | None = None


# -- tools that run the code -------------------------------------------------------------------------------------------


def train(config: GPTConfig, to_device: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, object, Callable]:
    """The model, its optimizer and its step."""
    model = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    tokens = to_device(torch.zeros(BATCH, config.context, dtype=torch.long))

    def step() -> None:
        model(tokens, tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return model, adamw, step


def traced(config: GPTConfig) -> dict[str, int]:
    """Bytes by category at the peak of the second step, requested, by this library's trace."""
    with eb.trace(rules="cuda") as run:
        _, _, step = train(config, run.to_device)
        for _ in run.steps(2):
            step()
    return run.timeline.by("category")["nbytes"].to_dict()


def tracked(config: GPTConfig) -> dict[str, int]:
    """Bytes by category at the peak of the second step, as PyTorch's MemTracker has them."""
    with FakeTensorMode():
        model, adamw, step = train(config, lambda host: host)
        tracker = MemTracker()
        tracker.track_external(model, adamw)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(kind, "value", kind)): nbytes for kind, nbytes in peak.items()}


def everybyte() -> Iterator[Answer]:
    settings = {"eager attention": EAGER, "fused attention": FUSED, "fused attention, no dropout": PLAIN}
    for name, config in settings.items():
        at = traced(config)
        saved = eb.saved(forward(config), rules="cuda").total_bytes
        yield Answer(
            "everybyte",
            f"traced by CUDA's rules, {name}",
            at["parameter"],
            at.get("gradient", 0),
            at["optimizer state"],
            saved,
            sum(at.values()),
        )


def forward(config: GPTConfig) -> Callable[[], torch.Tensor]:
    """A forward pass that makes its model inside the trace."""

    def run() -> torch.Tensor:
        tokens = torch.zeros(BATCH, config.context, dtype=torch.long)
        return GPT(config)(tokens, tokens)

    return run


def mem_tracker() -> Iterator[Answer]:
    for name, config in ("eager attention", EAGER), ("fused attention, no dropout", PLAIN):
        at = tracked(config)
        yield Answer(
            "torch",
            f"MemTracker on fake tensors of the CPU, {name}",
            at["Parameter"],
            at["Gradient"],
            at["Optstate"],
            at["Activation"],
            at["Total"],
        )


def hooks() -> Iterator[Answer]:
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += tensor.nbytes
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(EAGER)()
    yield Answer("torch", "saved_tensors_hooks on the meta device, summed, eager attention", activations=packed)


def torchinfo() -> Iterator[Answer]:
    from torchinfo import summary

    tokens = torch.zeros(BATCH, EAGER.context, dtype=torch.long, device="meta")
    says = summary(on_meta(EAGER), input_data=tokens, verbose=0, device="meta")
    weights, passed = says.total_param_bytes, says.total_output_bytes
    yield Answer("torchinfo", "summary", weights, activations=passed, total=weights + passed + says.total_input)


# -- tools that compute from a few sizes -------------------------------------------------------------------------------


def on_meta(config: GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return GPT(config)


def learned() -> int:
    return sum(parameter.numel() for parameter in on_meta(EAGER).parameters())


def accelerate() -> Iterator[Answer]:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    whole, _ = calculate_maximum_sizes(on_meta(EAGER).float())
    for precision in "float32", "bfloat16":
        says = estimate_training_usage(whole, precision)
        largest = max(says.values())  # what `accelerate estimate-memory` prints as "training using Adam"
        yield Answer(
            "accelerate",
            f"estimate-memory, {precision}",
            says["model"],
            says["gradients"],
            says["optimizer"],
            total=largest,
        )


def deepspeed() -> Iterator[Answer]:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2

    count, largest = learned(), EAGER.vocabulary * EAGER.hidden
    yield Answer("deepspeed", "ZeRO stage 2, one GPU, no offload", total=stage2(count, cpu_offload=False)[1])
    says = stage3(count, largest, cpu_offload=False, cpu_offload_params=False)[1]
    yield Answer("deepspeed", "ZeRO stage 3, one GPU, no offload", total=says)


def llm_analysis() -> Iterator[Answer]:
    from llm_analysis.analysis import LLMAnalysis
    from llm_analysis.config import ModelConfig, get_gpu_config_by_name

    sizes = ModelConfig("decoder", EAGER.layers, EAGER.heads, EAGER.hidden, EAGER.vocabulary, EAGER.context)
    analysis = LLMAnalysis(sizes, get_gpu_config_by_name("a100-sxm-80gb"))
    for name, flash in ("eager attention", False), ("FlashAttention", True):
        says = analysis.training(
            batch_size_per_gpu=BATCH,
            gradient_accumulation_steps=1,
            seq_len=EAGER.context,
            layernorm_dtype_bytes=2,
            flash_attn=flash,
            softmax_dropout=True,
        )
        parts = "weight", "gradient", "optimizer_state", "activation", "(weight+op_state+grad+act)"
        yield Answer("llm-analysis", f"training, {name}", *(int(says[f"{part}_memory_per_gpu"]) for part in parts))


def vramcalc() -> Iterator[Answer]:
    from vramcalc.estimate import estimate

    sizes = {
        "model_type": "llama",
        "hidden_size": EAGER.hidden,
        "num_hidden_layers": EAGER.layers,
        "num_attention_heads": EAGER.heads,
        "intermediate_size": 8 * EAGER.hidden // 3,  # a SwiGLU with as many parameters
        "vocab_size": EAGER.vocabulary,
        "tie_word_embeddings": True,
    }
    for attention in "eager", "sdpa":
        says = estimate(
            sizes,
            mode="train",
            dtype="bf16",
            batch=BATCH,
            seq_len=EAGER.context,
            precision="pure",
            attn_impl=attention,
            overhead_gb=0,
        )
        yield Answer(
            "vramcalc",
            f"a Llama of this size, {attention}",
            says.weights,
            says.gradients,
            says.optimizer,
            says.activations,
            says.total,
        )


def fitcheck() -> Iterator[Answer]:
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import get_gpu

    c = EAGER
    layer = c.hidden, c.layers, c.heads, c.heads, 4 * c.hidden
    sizes = ModelConfig("decoder", learned(), *layer, c.vocabulary, c.hidden // c.heads, c.tied_head)
    for name, flash in ("eager attention", False), ("FlashAttention", True):
        training = TrainingConfig(batch_size=BATCH, seq_len=EAGER.context, lora_rank=None, flash_attn=flash)
        says = estimate(sizes, training, get_gpu("a100-80"))
        parts = says.weight_mib, says.gradient_mib, says.optimizer_mib, says.activation_mib, says.total_mib
        yield Answer("fitcheck-llm", f"full training, {name}", *(round(size * MiB) for size in parts))


def gpu_estimator() -> Iterator[Answer]:
    from gpu_estimator import GPUEstimator

    says = GPUEstimator().estimate(learned(), BATCH, EAGER.context, precision="bf16", optimizer="adamw")
    parts = says.model_memory_gb, says.gradient_memory_gb, says.optimizer_memory_gb, says.activation_memory_gb
    whole = (*parts, says.total_memory_gb)
    yield Answer("gpu-estimator", "estimate", *(round(size * GiB) for size in whole))


def vram_check() -> Iterator[Answer]:
    from vram_check import estimate

    says = estimate(learned(), BATCH, "bf16", "adamw", seq_len=EAGER.context)
    parts = says.parameters_bytes, says.gradients_bytes, says.optimizer_bytes, says.activations_bytes
    yield Answer("vram-check", "estimate", *parts, says.total_bytes)


TOOLS = [
    *(everybyte, mem_tracker, hooks, torchinfo, accelerate, deepspeed, llm_analysis),
    *(vramcalc, fitcheck, gpu_estimator, vram_check),
]


def main() -> None:
    warnings.simplefilter("ignore")
    today = datetime.date.today().isoformat()
    rows = []
    for tool in TOOLS:
        try:
            for answer in tool():
                rows.append(
                    {**asdict(answer), "version": metadata.version(answer.tool).partition("+")[0], "date": today}
                )
                activations, total = (f"{n / GB:.2f} GB" if n else "-" for n in (answer.activations, answer.total))
                print(f"{answer.tool}, {answer.setting}: activations {activations}, in all {total}", flush=True)
        except ModuleNotFoundError as error:
            print(f"{tool.__name__}: left out, {error}")
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        names = [field.name for field in fields(Answer)]
        table = csv.DictWriter(file, ["tool", "version", "date", *names[1:]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
