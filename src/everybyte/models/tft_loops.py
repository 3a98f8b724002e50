"""Training loops for the TFT that differ by a line or two, each a mistake that people make; the first is right.

A loop runs one step: it takes the model, its optimizer, a batch (the arguments of `TFT.forward` and the target) and
`held`, the list that outlives the step and in which something may be left behind. `AttentionCache` is another such
holder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everybyte.models.tft import TFT, TFTConfig, batch_loss, quantile_loss

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # static, past, future, target
Loop = Callable[[TFT, torch.optim.Optimizer, Batch, list[Any]], None]


class Output(NamedTuple):
    """What a forward pass gives that can be kept: the attention's output, the forecast, the loss."""

    states: Tensor
    forecast: Tensor
    loss: Tensor


class AttentionCache(OrderedDict[int, Tensor]):
    """The last attention outputs, numbered from 0, at most so many.

    Args:
        most: Entries; one more, and the oldest goes.
        detached: Whether an entry is stored without its graph.
    """

    def __init__(self, most: int = 2_000, detached: bool = False) -> None:
        super().__init__()
        self.most, self.detached = most, detached

    def store(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """Stores an output; a hook for `register_forward_hook`."""
        key = next(reversed(self), -1) + 1
        self[key] = output.detach() if self.detached else output
        if len(self) > self.most:
            self.popitem(last=False)


def zeros(config: TFTConfig, batch: int) -> Batch:
    """A batch of the right shapes, in host memory."""
    return tuple(torch.zeros(shape, device="cpu") for shape in config.input_shapes(batch).values())


def forward(model: TFT, batch: Batch) -> Output:
    """A forward pass and its loss."""
    seen: list[Tensor] = []
    hook = model.attention.register_forward_hook(lambda module, given, output: seen.append(output))
    *inputs, target = batch
    forecast = model(*inputs)
    hook.remove()
    return Output(seen.pop(), forecast, quantile_loss(forecast, target, model.quantiles))


def learn(adam: torch.optim.Optimizer, loss: Tensor, **how: bool) -> None:
    """The rest of a step; `how` goes to `backward`."""
    loss.backward(**how)
    adam.step()
    adam.zero_grad()


def step(model: TFT, adam: torch.optim.Optimizer, batch: Batch, train: bool = True, **how: bool) -> None:
    """One step, or the forward pass of a validation; the forecast lives through it, as in `training.train_step`."""
    _, loss = forward(model, batch)[1:]
    if train:
        learn(adam, loss, **how)


def plain(model, adam, batch, held):
    step(model, adam, batch)


def not_cleared(model, adam, batch, held):
    _, loss = forward(model, batch)[1:]
    loss.backward()
    adam.step()  # and no zero_grad


def gradients_kept(model, adam, batch, held):
    _, loss = forward(model, batch)[1:]
    loss.backward()
    adam.step()
    held.append([p.grad for p in model.parameters()])
    adam.zero_grad()


def losses_summed(model, adam, batch, held):
    loss = forward(model, batch).loss
    held[:] = [sum(held) + loss]
    learn(adam, loss)


def no_backward(model, adam, batch, held):
    held[:] = [sum(held) + forward(model, batch).loss]


def outputs_of_forward(model, adam, batch, held):
    held.append(forward(model, batch).states)


def keep(what: str, detach: bool = False, most: int | None = None, **how: bool) -> Loop:
    """The loop that keeps one of the `Output`s, the last `most` of them or all; `how` goes to `backward`."""

    def loop(model, adam, batch, held):
        output = forward(model, batch)
        kept = getattr(output, what)
        held.append(kept.detach() if detach else kept)
        if most:
            del held[:-most]
        learn(adam, output.loss, **how)

    return loop


def logged(item: bool = False, learned: bool = True) -> Loop:
    """The loop that keeps its loss for a log: as a number or as it is, after a backward pass or without one."""

    def loop(model, adam, batch, held):
        loss = forward(model, batch).loss
        if learned:
            learn(adam, loss)
        held.append({"loss": loss.item() if item else loss})

    return loop


def readings(run: Any, config: TFTConfig, loop: Loop, batch: int, steps: int = 3) -> list[int]:
    """What `torch.cuda.memory_allocated` says after each step of a loop.

    Args:
        run: A trace under CUDA's rules, not yet begun.
        config: Of the model.
        loop: One of `LOOPS`.
        batch: Windows in a batch.
        steps: How many.
    """
    read, held, host = [], [], zeros(config, batch)
    with run:
        model = TFT(config)
        adam = torch.optim.Adam(model.parameters(), 1e-4, foreach=True)
        for _ in run.steps(steps):
            loop(model, adam, run.to_device(host), held)
            read.append(torch.cuda.memory_allocated())
    return read


def in_turn(run: Any, config: TFTConfig, loops: Sequence[Loop], batches: Sequence[int]) -> Any:
    """Steps of one model, each by a loop of its own and with so many windows.

    Args:
        run: A trace or a measurement, not yet begun.
        config: Of the model.
        loops: One a step; `held` is the same for all.
        batches: Windows of each.

    Returns:
        The run's timeline.
    """
    held: list[Any] = []
    with run:
        model = TFT(config)
        adam = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
        for i in run.steps(len(loops)):
            loops[i](model, adam, run.to_device(zeros(config, batches[i])), held)
    return run.timeline


def overfit(model: TFT, batch: Batch, steps: int, rate: float = 1e-3) -> tuple[Tensor, dict[str, bool]]:
    """Trains on a single batch.

    Args:
        model: Trained in place.
        batch: On the model's device.
        steps: How many.
        rate: Of Adam.

    Returns:
        The loss of each step, [steps], and by name of each parameter whether a bit of it has changed.
    """
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    adam = torch.optim.Adam(model.parameters(), rate, foreach=False)
    losses = []
    for _ in range(steps):
        loss = batch_loss(model, batch)
        losses.append(loss.detach())
        learn(adam, loss)
    return torch.stack(losses), {name: not torch.equal(first[name], p) for name, p in model.named_parameters()}


LOOPS: Mapping[str, Loop] = {
    "plain": plain,
    "gradients not cleared": not_cleared,
    "gradients kept": gradients_kept,
    "losses summed": losses_summed,
    "losses summed, no backward": no_backward,
    "predictions kept, detached": keep("forecast", detach=True),
    "predictions kept": keep("forecast"),
    "outputs cached, detached": keep("states", detach=True),
    "outputs cached": keep("states"),
    "outputs cached, graph retained": keep("states", retain_graph=True),
}
"""The ten loops, by name."""

LOGS: Mapping[str, Loop] = {
    "before": logged(learned=False),
    "after": logged(),
    "item": logged(item=True),
}
"""The loops that log a loss, by when: before a backward pass that never comes, after it, and as a number."""
