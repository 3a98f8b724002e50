"""What stays from step to step: weights, gradients and optimizer state, in bytes, for P learned numbers.

Step counters, a few bytes a tensor and on the host, are left out. Shards and blocks are rounded up: the counts are
those of the GPU that has most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import sympy as sp
from sympy import Expr

from .terms import HIDDEN, L, P, Terms, choose, e, expression, present, whole

N, largest = sp.symbols("N P_largest", positive=True, integer=True)
"""GPUs that share the work; numbers in the largest parameter tensor."""

PARTS: Final = ("weights", "gradients", "fp32 gradients", "master copy", "momentum", "variance")

RECIPES: Final[dict[str, tuple[int, ...]]] = {
    "bf16": (2, 2, 0, 0, 2, 2),
    "fp32 without gradients": (4, 0, 0, 0, 4, 4),
    "fp32": (4, 4, 0, 0, 4, 4),
    "bf16, master copy": (2, 2, 0, 4, 4, 4),
    "bf16, master copy, fp32 gradients": (2, 0, 4, 4, 4, 4),
    "bf16, master copy, both gradients": (2, 2, 4, 4, 4, 4),
}
"""Bytes a parameter under Adam, by `PARTS`: 8 in pure bf16; 12 where gradients are not counted; 16 in fp32; 16 in mixed
precision (Rajbhandari et al. 2020, "ZeRO", section 3.1); 18 where gradients are added up in fp32, and those in bf16 not
kept (Megatron-LM's distributed optimizer); 20 where both are."""

OPTIMIZER: Final = ("master copy", "momentum", "variance")


def adam(recipe: str, count: Expr = P) -> Terms:
    """Bytes under Adam, part by part.

        >>> from everybyte.formulas import model_state
        >>> sum(model_state.adam("bf16, master copy", 1_000).values())  # 2 + 2 + 4 + 4 + 4 bytes for each
        16000

    Args:
        recipe: One of `RECIPES`.
        count: Learned numbers.

    Raises:
        ValueError: If there is no such recipe.
    """
    choose("recipe", recipe, RECIPES)
    count = expression("count", count)
    return present({part: width * count for part, width in zip(PARTS, RECIPES[recipe], strict=True)})


def step(recipe: str, implementation: str = "foreach") -> Terms:
    """What is live at the most in Adam's step: the state, and what the update makes on its way.

    Args:
        recipe: One of `RECIPES`. A master copy is updated by gradients in fp32, which are made for the step where the
            recipe does not keep them: all, or in a loop those of one tensor, whose update is a call of its own.
        implementation: "foreach" (CUDA's default) takes the square roots of all variances at once, one copy of the
            numbers that are updated; "for loop" has the roots of one tensor, the roots divided, and until then the last
            tensor's divided ones (exact if the two largest follow each other); "fused" has none
            (torch/optim/adam.py, `_multi_tensor_adam`, `_single_tensor_adam`, `_fused_adam`).
    """
    choose("implementation", implementation, ("foreach", "for loop", "fused"))
    state, width = adam(recipe), dict(zip(PARTS, RECIPES[recipe], strict=True))["variance"]
    at_once = largest if implementation == "for loop" else P
    makes = "master copy" in state and "fp32 gradients" not in state
    roots = {"foreach": 1, "for loop": 2 if makes else 3, "fused": 0}[implementation]
    return present({
        **state,
        "gradients of the master copy": 4 * at_once if makes else 0,
        "square roots": roots * width * at_once,
    })  # fmt: skip


def adam_8bit(block: int = 2048, count: Expr = P, weights: int = 2) -> Terms:
    """Adam with moments of one byte and an fp32 constant for each block (Dettmers et al. 2022, "8-bit Optimizers via
    Block-wise Quantization", section 2.1: blocks of 2048; bitsandbytes today: 256).

    That a library leaves the moments of small tensors in fp32 (bitsandbytes: under 4096 numbers), and its two tables of
    256 values, are left out.

    Args:
        block: Numbers that share a constant.
        count: Learned numbers.
        weights: Bytes of a weight and of a gradient.
    """
    count = expression("count", count)
    width, constants = whole("weights", weights), 4 * sp.ceiling(count / whole("block", block))
    return {
        "weights": width * count,
        "gradients": width * count,
        "momentum": count,
        "momentum constants": constants,
        "variance": count,
        "variance constants": constants,
    }


def lora_parameters(rank: Any, matrices: Iterable[tuple[Any, Any, Any]]) -> Expr:
    """Learned numbers of low-rank paths, r (h_in + h_out) for each matrix (Hu et al. 2021, "LoRA", section 4.1).

    Args:
        rank: r.
        matrices: (width in, width out, copies) of each adapted kind of matrix.

    Raises:
        ValueError: If one of them is a number, and no positive integer.
    """
    rank = expression("rank", rank)
    sizes = ([expression("matrices", size) for size in matrix] for matrix in matrices)
    return sp.expand(sum((rank * (wide + out) * copies for wide, out, copies in sizes), sp.S.Zero))


def lora(adapters: Expr, recipe: str = "bf16", base: Terms | None = None) -> Terms:
    """A frozen base, which has no gradients, and adapters, which have all.

    Args:
        adapters: Their learned numbers, as `lora_parameters` counts them.
        recipe: The adapters', one of `RECIPES`.
        base: The frozen weights; P of two bytes if None, `nf4()` for QLoRA.
    """
    base = {"frozen weights": 2 * P} if base is None else base
    return base | {f"adapters' {part}": term for part, term in adam(recipe, adapters).items()}


def nf4(double: bool = True, count: Expr = P) -> Terms:
    """Weights in 4 bits with an 8-bit constant for each 64, and an fp32 one for each 256 of those: 0.127 bits a weight
    for constants, where without this double quantization fp32 constants take 0.5 (Dettmers et al. 2023, "QLoRA",
    section 3).

    The tables of 16 and 256 values, and the mean that a library takes off the constants, are left out.
    """
    count = expression("count", count)
    blocks = sp.ceiling(count / 64)
    constants = {"constants": blocks, "constants of the constants": 4 * sp.ceiling(blocks / 256)}
    return {"4-bit weights": sp.ceiling(count / 2)} | (constants if double else {"constants": 4 * blocks})


def per_gpu(sharding: str, recipe: str = "bf16, master copy", *, buckets: bool = False) -> Terms:
    """One GPU's share among N that train together (Rajbhandari et al. 2020, "ZeRO", figure 1 and section 5).

    Args:
        sharding: "ddp", all is everywhere; "zero-1", each has 1 / N of the optimizer's state, rounded up; "zero-2", of
            the gradients too; "zero-3", and of the weights.
        recipe: One of `RECIPES`.
        buckets: DDP reduces gradients in a second copy, as it does unless `gradient_as_bucket_view=True`.

    Buffers for communication, and the layers that zero-3 gathers, come on top.
    """
    sharded = {
        "ddp": (),
        "zero-1": OPTIMIZER,
        "zero-2": (*OPTIMIZER, "gradients", "fp32 gradients"),
        "zero-3": PARTS,
    }
    choose("sharding", sharding, sharded)
    whole_state, shard = adam(recipe), adam(recipe, sp.ceiling(P / N))
    terms = {part: shard[part] if part in sharded[sharding] else whole_state[part] for part in whole_state}
    reduced = whole_state.get("fp32 gradients", whole_state.get("gradients", sp.S.Zero))
    return present({**terms, "gradient buckets": reduced if buckets else 0})


def chain_peak(cleared: str) -> Terms:
    """The peak of forward and backward through L equal linear layers, by when the last step's gradients are cleared.

    Each layer keeps its input, [b, s, h], and has P / L weights, which take no more room than such a state does. At
    most L + 1 states are live: in forward the output is one, in backward two gradients stand for inputs used up. L is
    at least 3, all has e bytes, and the gradient of the output is one number, as of its sum.

    Args:
        cleared: "before forward": two layers' gradients are there at the peak, in backward. "after forward": the peak
            is where forward ends, on top of all old gradients. "set to zero": they are never freed, and each new one is
            made before it is added (torch/optim/optimizer.py, `zero_grad(set_to_none=False)`).
    """
    gradients = {"before forward": 2 * P / L, "after forward": P, "set to zero": P + P / L}
    choose("cleared", cleared, gradients)
    return {"weights": e * P, "states": e * HIDDEN * (L + 1), "gradients": e * gradients[cleared]}
