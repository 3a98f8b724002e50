"""Memory beside the tensors: workspaces of cuBLAS in PyTorch's allocator, and the CUDA context outside of it.

A thread's first matrix product takes a workspace from the allocator, after its result and before its kernel, and keeps
it for each stream until the process ends (`ATen/cuda/CublasHandlePool.cpp`, `setWorkspaceForHandle`). The forward pass
is one thread, autograd's engine another, so a training step holds two. They are no tensors: a traced timeline does not
count them, `Timeline.with_workspaces` puts them where they come.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .gpus import GPU, find
from .units import KiB, MiB, format_bytes

PRODUCTS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "mv", "addmv", "dot", "vdot")
)
"""Ops, by name, that ask for a handle of cuBLAS (`ATen/native/cuda/Blas.cpp`)."""

DEFAULT: Final = 2 * 4096 * KiB + 8 * 16 * KiB  # :4096:2:16:8
_LARGE: Final = 32 * MiB
_NAMES: Final = {DEFAULT: ":4096:2:16:8, the default before Hopper", _LARGE: "the default on Hopper and Blackwell"}


def cublas_bytes(gpu: GPU | str, version: str | None = None, config: str | None = None) -> int:
    """Bytes of a workspace of cuBLAS (`CublasHandlePool.cpp`, `parseChosenWorkspaceSize`).

    8,519,680 B; 32 MiB on Hopper, and from PyTorch 2.12 on Blackwell (pytorch/pytorch#175344).

        >>> eb.workspace.cublas_bytes("a100-80gb", config=""), eb.workspace.cublas_bytes("a100-80gb", config=":16:8")
        (8519680, 131072)

    Args:
        gpu: The GPU, or its name.
        version: Of PyTorch; of the one that is installed unless given.
        config: As `CUBLAS_WORKSPACE_CONFIG`, which is read where it is None: sizes in KiB, each with how many of it.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if config is None else config
    pieces = re.findall(r":([0-9]+):([0-9]+)", config)
    if pieces:
        return sum(int(size) * KiB * int(count) for size, count in pieces)
    large = (9,) if _release(version) < (2, 12) else (9, 10, 11, 12)
    return _LARGE if find(gpu).capability[0] in large else DEFAULT


def cublaslt_bytes(version: str | None = None) -> int:
    """Bytes that cuBLASLt, which multiplies where a bias is added, takes beside the workspace of cuBLAS.

    1 MiB, on every GPU (pytorch/pytorch#73439), and none from PyTorch 2.12 on, where it uses cuBLAS's
    (pytorch/pytorch#168175, pytorch/pytorch#175879). Each thread keeps it from 2.9 on (pytorch/pytorch#156495); before,
    each call took it and gave it back.
    `CUBLASLT_WORKSPACE_SIZE` sets it, in KiB.
    """
    size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "1024")
    return 0 if _release(version) >= (2, 12) else (int(size) if size.isdecimal() else 1024) * KiB


def libraries() -> tuple[str, ...]:
    """Those that take a workspace for a thread."""
    return ("cuBLAS", "cuBLASLt") if cublaslt_bytes() else ("cuBLAS",)


def _release(version: str | None) -> tuple[int, ...]:
    if version is None:
        from torch import __version__ as version  # nothing else here needs torch
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@dataclass(frozen=True)
class Workspace:
    """A workspace that a thread took and keeps.

    Attributes:
        library: "cuBLAS" or "cuBLASLt".
        thread: "forward", the caller's, or "backward", autograd's.
        nbytes: Its size.
        event: The event of the timeline that it comes before.
        op: The product that asked for it.
        line: The line of that product, outside of PyTorch.
        own: The line of the user's own code that led there.
    """

    library: str
    thread: str
    nbytes: int
    event: int
    op: str
    line: str
    own: str = ""

    def __str__(self) -> str:
        kept = "kept by the thread of the forward pass" if self.thread == "forward" else "kept by autograd's thread"
        what = f" ({_NAMES[self.nbytes]})" if self.nbytes in _NAMES else ""
        return f"{format_bytes(self.nbytes)}: {self.library}'s workspace{what}, {kept} since its first, {self.op}"


def asked(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], gpu: GPU) -> dict[str, int]:
    """The workspaces that a call asks for, by library, in order: bytes. Empty matrices are not multiplied."""
    tensors = (x for x in (*args, *kwargs.values()) if hasattr(x, "numel"))
    if str(op) not in PRODUCTS or not all(tensor.numel() for tensor in tensors):
        return {}
    by_library = {"cuBLAS": cublas_bytes(gpu), "cuBLASLt": cublaslt_bytes() if _adds_bias(op, args, kwargs) else 0}
    return {library: nbytes for library, nbytes in by_library.items() if nbytes}


def _adds_bias(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether cuBLASLt multiplies (`ATen/native/cuda/Blas.cpp`, `addmm_out_cuda_impl`)."""
    if str(op) not in ("aten.addmm.default", "aten._addmm_activation.default") or kwargs.get("beta", 1) != 1:
        return False
    bias, _, matrix = args[:3]
    return bias.shape == matrix.shape[1:] and bias.is_contiguous() and min(matrix.shape) > 1


def named(nbytes: int) -> str | None:
    """What a block of this size is that remains when all tensors are gone; None if it is no workspace by default."""
    if nbytes not in _NAMES:
        return None
    return (
        f"{format_bytes(nbytes)}, the size of cuBLAS's workspace ({_NAMES[nbytes]}), which a thread keeps from its "
        "first matrix product on: no leak, and torch._C._cuda_clearCublasWorkspaces() gives it back"
    )


def beside(gpu: GPU | str) -> str:
    """What a process takes of a GPU outside of PyTorch's allocator, in a sentence."""
    gpu = find(gpu)
    least, most = gpu.context
    return (
        f"Outside of PyTorch's allocator a process holds a CUDA context and the kernels that have run: {least:,} to "
        f"{most:,} B are reported on {gpu.name}, and about 1 GB where all kernels are loaded at once, as before "
        "PyTorch 1.13. nvidia-smi counts them, with all that the allocator has reserved; no tensor holds them, and "
        "nothing but the end of the process gives them back."
    )
