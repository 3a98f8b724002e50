"""Edits to a training program that nobody has to make: each holds while a block lasts, around the program as it is.

They are what one would paste in: mixed precision around the model, checkpoints round its repeated blocks, another
batch size in the loader. So a trace can say what an edit saves before anybody makes it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.utils.data
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

Change = Callable[[], AbstractContextManager[Any]]
"""Makes an edit that holds while the block lasts."""


@contextmanager
def mixed_precision() -> Iterator[None]:
    """Every forward pass of a model under bfloat16 autocast."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _around_models(partial(torch.autocast, device, torch.bfloat16)):
        yield


@contextmanager
def no_graph() -> Iterator[None]:
    """Every forward pass of a model that is in evaluation mode without a graph."""
    with _around_models(torch.no_grad, lambda model: not model.training):
        yield


@contextmanager
def checkpointing() -> Iterator[None]:
    """Each of a model's repeated blocks (`repeated`) keeps its inputs alone, and is run again in the backward pass."""
    call, blocks, seen = nn.Module.__call__, weakref.WeakSet[nn.Module](), weakref.WeakSet[nn.Module]()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in seen:
            seen.update(module.modules())
            if hasattr(module, "gradient_checkpointing_enable"):  # of transformers, which must give up its cache too
                module.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                blocks.update(repeated(module))
        if module in blocks and module.training and torch.is_grad_enabled():
            return checkpoint(partial(call, module), *args, use_reentrant=False, **kwargs)
        return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", called):
        yield


def repeated(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that a container of a model holds several of, of one class and with modules inside."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        children = [child for child in model.children() if next(child.children(), None) is not None]
        kinds = [type(child) for child in children]
        several = [child for child in children if kinds.count(type(child)) > 1]
        yield from several
        rest = [child for child in model.children() if child not in several]
    else:
        rest = [*model.children()]
    for child in rest:
        yield from repeated(child)


@contextmanager
def fused_optimizer() -> Iterator[None]:
    """Optimizers that have a fused kernel use it."""
    initialise = optim.Optimizer.__init__

    def initialised(self: optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if "fused" in defaults and not defaults.get("differentiable"):
            defaults = {**defaults, "fused": True, "foreach": False}
        initialise(self, params, defaults)

    with mock.patch.object(optim.Optimizer, "__init__", initialised):
        yield


@contextmanager
def gradients_cleared() -> Iterator[None]:
    """Gradients go as soon as the optimizer has used them."""

    def clear(optimizer: optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    handle = optim.register_optimizer_step_post_hook(clear)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def accumulated(count: int = 2) -> Iterator[None]:
    """The optimizer steps, and gradients are cleared, only with every so many-th of the program's steps."""
    initialise, calls, open_ = optim.Optimizer.__init__, 0, False

    def initialised(self: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        step = self.step

        @wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, open_
            calls += 1
            open_ = bool(calls % count)
            return None if open_ else step(*args, **kwargs)

        self.step = stepped

    def unless_open(clear: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: None if open_ else clear(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(optim.Optimizer, "__init__", initialised))
        for owner in (optim.Optimizer, nn.Module):
            stack.enter_context(mock.patch.object(owner, "zero_grad", unless_open(owner.zero_grad)))
        yield


@contextmanager
def fused_attention() -> Iterator[None]:
    """Models of transformers attend by `scaled_dot_product_attention`."""
    modeling = sys.modules["transformers.modeling_utils"].PreTrainedModel
    initialise = modeling.__init__

    def initialised(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        if self._supports_sdpa and config._attn_implementation == "eager":
            config._attn_implementation = "sdpa"
        initialise(self, config, *args, **kwargs)

    with mock.patch.object(modeling, "__init__", initialised):
        yield


class Loaders:
    """Looks at, and changes, the batch size of what a program reads.

    Attributes:
        batch_size: Of the first loader that was read; None if none was, or it has none.
        samples: How many samples that loader has to give; None if unknown.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.samples: int | None = None

    @contextmanager
    def watched(self) -> Iterator[Loaders]:
        """Notes the first loader that is read while the block lasts."""
        begin = torch.utils.data.DataLoader.__iter__

        def begun(loader: torch.utils.data.DataLoader[Any]) -> Any:
            if self.batch_size is None:
                size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
                self.batch_size = size if isinstance(size, int) else None
                self.samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
            return begin(loader)

        with mock.patch.object(torch.utils.data.DataLoader, "__iter__", begun):
            yield self


@contextmanager
def loader_batches(now: int, then: int) -> Iterator[None]:
    """Loaders that are made for batches of one size give batches of another."""
    initialise = torch.utils.data.DataLoader.__init__
    signature = inspect.signature(initialise)

    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        if given.arguments.get("batch_size", 1) == now and given.arguments.get("batch_sampler") is None:
            given.arguments["batch_size"] = then
        initialise(*given.args, **given.kwargs)

    with mock.patch.object(torch.utils.data.DataLoader, "__init__", initialised):
        yield


@contextmanager
def _around_models(
    enter: Callable[[], AbstractContextManager[Any]], which: Callable[[nn.Module], bool] = lambda model: True
) -> Iterator[None]:
    """Enters something around each call of a module from outside any module."""
    depth, inside = 0, ExitStack()

    def before(module: nn.Module, args: Any) -> None:
        nonlocal depth
        if depth == 0 and which(module):
            inside.enter_context(enter())
        depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            inside.close()

    handles = (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        inside.close()
        for handle in handles:
            handle.remove()
