"""What other tools say of the 1.3B decoder's training step, and what this library does: the table of *Other tools*.

    _build/benchmarks/bin/python benchmarks/peers.py        a few minutes; writes book/peers.csv

`make benchmarks` makes that environment. A tool that is not installed is left out, and said so. All are given the same
step: four sequences of 2,048 tokens, every tensor in bf16, AdamW. Where a tool has a recipe of its own for gradients
and optimizer state, it answers by that.
"""

from __future__ import annotations

import csv
import datetime
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import speed
import torch
from row import Row, timed
from speed import BATCH
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import everybyte as eb
from everybyte.models import GPT, GPTConfig
from everybyte.units import GB, GiB, MiB

TABLE = Path(__file__).resolve().parent.parent / "book" / "peers.csv"
ELEUTHERAI, MEGATRON = "EleutherAI/cookbook", "NVIDIA/Megatron-LM"
VERSIONS = {ELEUTHERAI: "069ae2e", MEGATRON: "00caa53"}
"""Commits of what is a script in a repository, and no package."""
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


def traced(config: GPTConfig) -> dict[str, int]:
    """Bytes by category at the peak of the second step, requested, by this library's trace."""
    with eb.trace(rules="cuda") as run:
        job = speed.decoder(config)(run.to_device)
        for _ in run.steps(2):
            job.step()
    return run.timeline.by("category")["nbytes"].to_dict()


def tracked(config: GPTConfig) -> dict[str, int]:
    """Bytes by category at the peak of the second step, as PyTorch's MemTracker has them."""
    with FakeTensorMode():
        job = speed.decoder(config)(lambda host: host)
        tracker = MemTracker()
        tracker.track_external(job.model, job.optimizer)
        with tracker:
            job.step()
            tracker.reset_mod_stats()
            job.step()
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


def hooks(config: GPTConfig = EAGER) -> Iterator[Answer]:
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += tensor.nbytes
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(config)()
    yield Answer("torch", "saved_tensors_hooks on the meta device, summed, eager attention", activations=packed)


# -- tools that are given a model and its input ------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What a tool is asked about.

    Attributes:
        make: Makes the model, on the device that is current.
        inputs: Makes its input there.
        sizes: Of a decoder, for tools that know it by these alone.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    sizes: GPTConfig | None = None

    def on_meta(self) -> tuple[nn.Module, list[torch.Tensor]]:
        with torch.device("meta"):
            return self.make(), list(self.inputs())


def decoder(config: GPTConfig) -> Subject:
    return Subject(lambda: GPT(config), lambda: (torch.zeros(BATCH, config.context, dtype=torch.long),), config)


def learned(of: Subject) -> int:
    return sum(parameter.numel() for parameter in of.on_meta()[0].parameters())


def torchinfo(of: Subject) -> Iterator[Answer]:
    from torchinfo import summary

    model, inputs = of.on_meta()
    says = summary(model, input_data=inputs, verbose=0, device="meta")
    weights, passed = says.total_param_bytes, says.total_output_bytes
    yield Answer("torchinfo", "summary", weights, activations=passed, total=weights + passed + says.total_input)


def torchlens(of: Subject) -> Iterator[Answer]:
    """Really runs the forward pass."""
    import torchlens

    says = torchlens.trace(of.make(), list(of.inputs()))
    yield Answer("torchlens", "trace", activations=int(says.total_autograd_memory))


def accelerate(of: Subject) -> Iterator[Answer]:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    whole, _ = calculate_maximum_sizes(of.on_meta()[0].float())
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


def deepspeed(of: Subject) -> Iterator[Answer]:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2

    count, largest = learned(of), max(parameter.numel() for parameter in of.on_meta()[0].parameters())
    yield Answer("deepspeed", "ZeRO stage 2, one GPU, no offload", total=stage2(count, cpu_offload=False)[1])
    says = stage3(count, largest, cpu_offload=False, cpu_offload_params=False)[1]
    yield Answer("deepspeed", "ZeRO stage 3, one GPU, no offload", total=says)


# -- tools that compute from a few sizes -------------------------------------------------------------------------------


def eleutherai(of: Subject) -> Iterator[Answer]:
    """What `calc/calc_transformer_mem.py` computes for one GPU without checkpointing, in 16 bits."""
    c = of.sizes
    b, s, h, layers = BATCH, c.context, c.hidden, c.layers
    count = 2 * c.vocabulary * h + s * h + (8 * h + 12 * h * h) * layers + 2 * h  # an embedding and a head
    activations = s * b * h * layers * 34 + 5 * b * c.heads * s * s * layers
    yield Answer(
        ELEUTHERAI,
        "calculator, eager attention",
        2 * count,
        4 * count,
        12 * count,
        activations,
        18 * count + activations,
    )


def megatron(of: Subject) -> Iterator[Answer]:
    """What `megatron/training/theoretical_memory_usage.py` computes for one GPU."""
    c = of.sizes
    b, s, h, layers = BATCH, c.context, c.hidden, c.layers
    vocabulary = -(-c.vocabulary // 128) * 128  # as it pads it
    count = layers * (12 * h * h + 4 * h) + 2 * h + vocabulary * h
    ends = 8 * s * b + s * b * h + 2 * s * b * (vocabulary + h)
    activations = round(1.05 * (34 * s * b * h * layers + ends))  # 5 % for the optimizer and what else there is
    yield Answer(
        MEGATRON,
        "theoretical memory, which has no scores, as fused attention has none",
        activations=activations,
        total=18 * count + activations,
    )


def llm_analysis(of: Subject) -> Iterator[Answer]:
    from llm_analysis.analysis import LLMAnalysis
    from llm_analysis.config import ModelConfig, get_gpu_config_by_name

    c = of.sizes
    sizes = ModelConfig("decoder", c.layers, c.heads, c.hidden, c.vocabulary, c.context)
    analysis = LLMAnalysis(sizes, get_gpu_config_by_name("a100-sxm-80gb"))
    for name, flash in ("eager attention", False), ("FlashAttention", True):
        says = analysis.training(
            batch_size_per_gpu=BATCH,
            gradient_accumulation_steps=1,
            seq_len=c.context,
            layernorm_dtype_bytes=2,
            flash_attn=flash,
            softmax_dropout=True,
        )
        parts = "weight", "gradient", "optimizer_state", "activation", "(weight+op_state+grad+act)"
        yield Answer("llm-analysis", f"training, {name}", *(int(says[f"{part}_memory_per_gpu"]) for part in parts))


def vramcalc(of: Subject) -> Iterator[Answer]:
    from vramcalc.estimate import estimate

    c = of.sizes
    sizes = {
        "model_type": "llama",
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": 8 * c.hidden // 3,  # a SwiGLU with as many parameters
        "vocab_size": c.vocabulary,
        "tie_word_embeddings": True,
    }
    for attention in "eager", "sdpa":
        says = estimate(
            sizes,
            mode="train",
            dtype="bf16",
            batch=BATCH,
            seq_len=c.context,
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


def fitcheck(of: Subject) -> Iterator[Answer]:
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import get_gpu

    c = of.sizes
    layer = c.hidden, c.layers, c.heads, c.heads, 4 * c.hidden
    sizes = ModelConfig("decoder", learned(of), *layer, c.vocabulary, c.hidden // c.heads, c.tied_head)
    for name, flash in ("eager attention", False), ("FlashAttention", True):
        training = TrainingConfig(batch_size=BATCH, seq_len=c.context, lora_rank=None, flash_attn=flash)
        says = estimate(sizes, training, get_gpu("a100-80"))
        parts = says.weight_mib, says.gradient_mib, says.optimizer_mib, says.activation_mib, says.total_mib
        yield Answer("fitcheck-llm", f"full training, {name}", *(round(size * MiB) for size in parts))


def gpu_estimator(of: Subject) -> Iterator[Answer]:
    from gpu_estimator import GPUEstimator

    says = GPUEstimator().estimate(learned(of), BATCH, of.sizes.context, precision="bf16", optimizer="adamw")
    parts = says.model_memory_gb, says.gradient_memory_gb, says.optimizer_memory_gb, says.activation_memory_gb
    whole = (*parts, says.total_memory_gb)
    yield Answer("gpu-estimator", "estimate", *(round(size * GiB) for size in whole))


def vram_check(of: Subject) -> Iterator[Answer]:
    from vram_check import estimate

    says = estimate(learned(of), BATCH, "bf16", "adamw", seq_len=of.sizes.context)
    parts = says.parameters_bytes, says.gradients_bytes, says.optimizer_bytes, says.activations_bytes
    yield Answer("vram-check", "estimate", *parts, says.total_bytes)


OF_MODELS = torchinfo, accelerate, deepspeed
OF_SIZES = eleutherai, megatron, llm_analysis, vramcalc, fitcheck, gpu_estimator, vram_check
RUNNING = (torchlens,)
"""Tools that really run the model, so that it must be a small one."""


FUSED_ATTENTION = re.compile("fused|Flash|sdpa")
"""In the setting of an answer for attention that makes no scores."""


def rows(what: str, of: Subject, fused: str = "", runs: bool = False) -> Iterator[Row]:
    """What each tool says of a model, asked three times; the time before them loads the tool.

    Args:
        what: The model.
        of: The same.
        fused: The model with fused attention; left out, answers for that are too.
        runs: Ask the tools, too, that really run it.
    """
    for tool in (*OF_MODELS, *(RUNNING if runs else ()), *(OF_SIZES if of.sizes else ())):
        try:
            list(tool(of))
        except ModuleNotFoundError as error:
            print(f"{tool.__name__}: left out, {error}", flush=True)
            continue
        said: list[Answer] = []
        seconds = timed(lambda tool=tool, said=said: said.extend(tool(of)), 3)
        for answer in said[: len(said) // 3]:  # one call gives them all
            name = fused if FUSED_ATTENTION.search(answer.setting) else what
            if name:
                yield Row(name, f"{answer.tool}, {answer.setting}", seconds, answer.total)


def main() -> None:
    warnings.simplefilter("ignore")
    today = datetime.date.today().isoformat()
    rows = []
    asked = [everybyte, mem_tracker, hooks, *(partial(tool, decoder(EAGER)) for tool in (*OF_MODELS, *OF_SIZES))]
    for tool in asked:
        try:
            for answer in tool():
                version = VERSIONS.get(answer.tool) or metadata.version(answer.tool).partition("+")[0]
                rows.append({**asdict(answer), "version": version, "date": today})
                activations, total = (f"{n / GB:.2f} GB" if n else "-" for n in (answer.activations, answer.total))
                print(f"{answer.tool}, {answer.setting}: activations {activations}, in all {total}", flush=True)
        except ModuleNotFoundError as error:
            print(f"left out, {error}")
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        names = [field.name for field in fields(Answer)]
        table = csv.DictWriter(file, ["tool", "version", "date", *names[1:]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
