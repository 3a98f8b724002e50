"""Packages with kernels of their own, which no rule covers: a trace ends where one is used, and names it.

That a package is there, or imported, means nothing: frameworks look for many that a run does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any, Final

from .importing import Change, changed

_USED: Final = {
    "bitsandbytes.nn.modules": ("Linear4bit.__init__", "Linear8bitLt.__init__", "Embedding8bit.__init__"),
    "bitsandbytes.optim.optimizer": ("Optimizer8bit.__init__",),
    "bitsandbytes.autograd._functions": ("matmul", "matmul_4bit"),
    "flash_attn.flash_attn_interface": (
        *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"),
        *("flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"),
    ),
    "xformers.ops.fmha": ("memory_efficient_attention", "memory_efficient_attention_forward"),
    "apex.optimizers.fused_adam": ("FusedAdam.__init__",),
    "apex.normalization.fused_layer_norm": ("FusedLayerNorm.__init__", "FusedRMSNorm.__init__"),
    "triton.runtime.jit": ("JITFunction.run",),
}
"""By module, what is called where such a kernel is used, or is sure to be."""

PYTORCHS: Final = frozenset(
    {
        *("aten", "prim", "prims", "debugprims", "rngprims", "profiler", "c10d", "_c10d_functional", "inductor"),
        *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized", "quantized_decomposed", "sparse"),
        "torchao",
    }
)
"""Namespaces of ops that the rules know; those of other ones are kernels of others."""


def refused() -> AbstractContextManager[None]:
    """Ends a trace, while the block lasts, where a package's own kernel is used."""
    return changed({name: partial(_refusals, names) for name, names in _USED.items()})


def _refusals(names: tuple[str, ...], module: ModuleType) -> Iterator[Change]:
    for path in names:
        *inner, name = path.split(".")
        owner = getattr(module, inner[0], None) if inner else module
        if owner is not None:
            yield owner, name, _refusing(f"{module.__name__.split('.')[0]}'s {path.removesuffix('.__init__')}")


def _refusing(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{what} has kernels of its own, which no rule covers; leave it out")

    return refused
