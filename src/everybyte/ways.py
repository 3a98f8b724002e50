"""Ways to take a training step, one after another in one run: what each keeps, and how high it goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from .run import Run
from .saved import Saved, saved
from .training import one_thread

Loss = Callable[[nn.Module, Any], Tensor]
"""Of a model and a batch, with its graph."""

Way = Callable[[nn.Module, torch.optim.Optimizer, Any, Loss], None]
"""Takes a step and leaves no gradients behind. It calls the loss that it is given, once or for each microbatch."""


def take(
    run: Run,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    batch: Any,
    loss: Loss,
    ways: Mapping[str, Way],
    watched: Collection[str] | None = None,
) -> tuple[pd.DataFrame, dict[str, list[Saved]]]:
    """Takes a step each way on the same batch.

    The first is not like the others, since it makes the optimizer's state.

    Args:
        run: An `everybyte.trace` or an `everybyte.measure` that has not begun.
        build: Makes the model and its optimizer, inside the run.
        batch: On the host; each step brings it to the device anew.
        loss: Of a forward pass.
        ways: Functions by name; their order is the steps'.
        watched: Names of the ways whose forward passes are looked into; all if left out.

    Returns:
        A frame with a row a way, `peak`, the most bytes that were live in its step, and `growth`, what it left behind;
        and by name of each way that is watched what its forward passes kept, in their order.
    """
    kept: dict[str, list[Saved]] = {name: [] for name in ways if watched is None or name in watched}
    with one_thread(), run:
        torch.manual_seed(0)
        model, optimizer = build()
        for step in run.steps(len(ways)):
            name = [*ways][step]
            watch = noting(loss, kept[name]) if name in kept else loss
            ways[name](model, optimizer, run.to_device(batch), watch)
    steps = run.timeline.without("scratch").growth_per_step()
    return steps.set_axis([*ways])[["peak", "growth"]], kept


def noting(loss: Loss, kept: list[Saved]) -> Loss:
    """The same loss, which appends to a list what its forward pass kept."""

    def noted(model: nn.Module, batch: Any) -> Tensor:
        made: list[Tensor] = []
        kept.append(saved(lambda: made.append(loss(model, batch)) or made[0]))
        return made[0]

    return noted
