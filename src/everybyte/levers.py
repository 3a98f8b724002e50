"""What makes a training step smaller without making it another training: each lever, what it costs, how to pull it.

What a lever saves is no number here: the program is traced again with it (`everybyte.trials`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from . import changes
from .changes import Change


@dataclass(frozen=True)
class Lever:
    """An edit that saves memory.

    Attributes:
        name: In a few words.
        change: Makes it around a program that is traced.
        costs: In time, and in what is computed.
        edit: What to paste, by framework: "torch", "transformers", "lightning".
        halves: Whether each of its steps is half a batch, so that two make one of the program's.
        needs: A package without which the lever has no meaning; "" if none.
    """

    name: str
    change: Change
    costs: str
    edit: Mapping[str, str]
    halves: bool = False
    needs: str = ""


LEVERS: Final = (
    Lever(
        "mixed precision, bfloat16",
        changes.mixed_precision,
        "faster on GPUs with tensor cores for it (Ampere and later); products are rounded to 8 bits of mantissa, "
        "weights and optimizer stay float32",
        {
            "torch": 'with torch.autocast("cuda", torch.bfloat16):\n    loss = criterion(model(x), y)',
            "transformers": "TrainingArguments(..., bf16=True)",
            "lightning": 'Trainer(..., precision="bf16-mixed")',
        },
    ),
    Lever(
        "checkpoints round the repeated blocks",
        changes.checkpointing,
        "one more forward pass of the blocks: up to a third more work a step; the same gradients",
        {
            "torch": "from torch.utils.checkpoint import checkpoint\n\n"
            "for block in self.blocks:\n    x = checkpoint(block, x, use_reentrant=False)",
            "transformers": "TrainingArguments(..., gradient_checkpointing=True)",
            "lightning": "for block in self.blocks:  # in the module's forward()\n"
            "    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        },
    ),
    Lever(
        "half the batch, two microbatches a step",
        partial(changes.accumulated, 2),
        "the same work in twice as many, smaller kernels; the same gradients but for BatchNorm and for losses that are "
        "means over unequal parts",
        {
            "torch": "loss = criterion(model(x), y) / 2  # with half the batch size\n"
            "loss.backward()\n"
            "if (i + 1) % 2 == 0:\n    optimizer.step()\n    optimizer.zero_grad()",
            "transformers": "TrainingArguments(..., per_device_train_batch_size=N // 2, gradient_accumulation_steps=2)",
            "lightning": "Trainer(..., accumulate_grad_batches=2)  # and half the batch size",
        },
        halves=True,
    ),
    Lever(
        "fused optimizer",
        changes.fused_optimizer,
        "faster: one kernel in place of many; the same update but for rounding",
        {
            "torch": "optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True)",
            "transformers": 'TrainingArguments(..., optim="adamw_torch_fused")',
            "lightning": "return torch.optim.AdamW(self.parameters(), ..., fused=True)  # in configure_optimizers()",
        },
    ),
    Lever(
        "gradients cleared right after the step",
        changes.gradients_cleared,
        "nothing",
        {
            "torch": "optimizer.step()\noptimizer.zero_grad()  # here, not before loss.backward()",
            "transformers": "# Trainer does so already",
            "lightning": "def on_train_batch_end(self, *args):\n    self.optimizers().zero_grad()",
        },
    ),
    Lever(
        "fused attention",
        changes.fused_attention,
        "faster; the scores are made block by block, so sums are rounded otherwise",
        {
            "torch": "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "transformers": 'AutoModel.from_pretrained(..., attn_implementation="sdpa")',
            "lightning": "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        },
        needs="transformers",
    ),
    Lever(
        "no graph where the model evaluates",
        changes.no_graph,
        "nothing: faster",
        {
            "torch": "with torch.inference_mode():\n    prediction = model(x)",
            "transformers": "# Trainer does so already",
            "lightning": "# Trainer does so already",
        },
    ),
)
"""All of them; expandable segments, which are no edit but a setting, come beside these."""
