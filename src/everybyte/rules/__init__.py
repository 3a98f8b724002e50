"""What real kernels do that the meta device does not show, one module for each side that differs.

engine    what the tracer's own presence changes in autograd, undone
layout    how the results of pointwise kernels lie in memory, on every device
dtypes    which tensors a kernel refuses to mix, where the meta device lets them pass
base      what a set of rules is
cpu       what CPU kernels return and keep; cpu_scratch, and by asking this machine's libraries asked, what they take
cuda      what CUDA kernels return and keep; cuda_attention, cuda_dropout, cuda_reduction
autocast  which ops autocast runs in which precision
candle    what another framework keeps for a gradient, in the place of what PyTorch keeps
"""

from typing import Final

from . import cpu, cuda
from .base import Rules

RULES: Final[dict[str, Rules]] = {rules.name: rules for rules in (cpu.RULES, cuda.RULES)}
"""The rules that a trace can follow, by name."""
