"""AdamW for a model in half precision: 16 bytes a parameter, all in one place.

Mixed-precision training (Micikevicius et al., arXiv 1710.03740, section 3.1) computes in 16 bits and adds up in 32: an
update is often smaller than half the distance of two neighbouring bfloat16 numbers, and would be rounded away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class MasterWeights(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) over copies in float32 of parameters in float16 or bfloat16.

    Between steps a parameter takes 2 bytes for its weight and 2 for its gradient, both the model's, and here 4 for the
    copy and 4 for each of two moments: 16, until `zero_grad` 14. The state appears with the first step, the step
    counters (4 bytes a tensor) on the host.

    During a step gradients in float32 come on top: all of them, 4 bytes a parameter, or with ``foreach=False`` those
    of one tensor at a time.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        foreach: bool | None = None,
    ) -> None:
        """The arguments are those of `torch.optim.AdamW`.

        Raises:
            ValueError: a parameter that is not in half precision.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.foreach = foreach
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float16, torch.bfloat16):
                    raise ValueError(
                        f"a parameter of {parameter.dtype} needs no copy in float32: give it to torch.optim.AdamW, or "
                        "make the model in bfloat16"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of the copies, then of the parameters, which are the copies rounded."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            learned = [parameter for parameter in group["params"] if parameter.grad is not None]
            for some in [[parameter] for parameter in learned] if self.foreach is False else [learned]:
                self._update(some, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                master = parameter.float()
                moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
                self.state[parameter] = {"step": torch.tensor(0.0, device="cpu"), "master": master, **moments}
        states = [self.state[parameter] for parameter in parameters]
        masters, first, second, steps = (
            [state[name] for state in states] for name in ("master", "exp_avg", "exp_avg_sq", "step")
        )
        gradients = [parameter.grad.float() for parameter in parameters]
        adamw(
            masters, gradients, first, second, [], steps, foreach=self.foreach, amsgrad=False, beta1=group["betas"][0],
            beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)
