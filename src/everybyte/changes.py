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
from functools import partial
from types import MethodType
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
    """Forward pass and loss under bfloat16 autocast: from where a model is called to where the backward pass begins.

    A program that has autocast of its own where it calls the model is left as it is.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inside, backward = ExitStack(), torch.autograd.backward

    def begin(module: nn.Module) -> None:
        if not torch.is_autocast_enabled(device):
            inside.enter_context(torch.autocast(device, torch.bfloat16))

    def end(*_: Any) -> None:
        inside.close()

    def before_backward(*args: Any, **kwargs: Any) -> None:
        end()
        backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", before_backward))
        stack.callback(optim.register_optimizer_step_pre_hook(end).remove)
        stack.callback(end)
        stack.enter_context(_outermost(begin, lambda: None if torch.is_grad_enabled() else end()))
        yield


@contextmanager
def no_graph() -> Iterator[None]:
    """Every forward pass of a model that is in evaluation mode without a graph."""
    inside = ExitStack()

    def begin(module: nn.Module) -> None:
        if not module.training:
            inside.enter_context(torch.no_grad())

    with inside, _outermost(begin, inside.close):
        yield


@contextmanager
def checkpointing() -> Iterator[None]:
    """Each of a model's repeated blocks (`repeated`) keeps its inputs alone, and is run again in the backward pass."""
    call, blocks, seen = nn.Module.__call__, weakref.WeakSet[nn.Module](), weakref.WeakSet[nn.Module]()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in seen:
            seen.update(module.modules())
            own = _checkpointing_themselves(module)
            blocks.update(block for block in repeated(module) if block not in own)
        if module in blocks and module.training and torch.is_grad_enabled():
            return checkpoint(partial(call, module), *args, use_reentrant=False, **kwargs)
        return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", called):
        yield


def _checkpointing_themselves(model: nn.Module) -> set[nn.Module]:
    """Has models of transformers checkpoint by themselves: they must give up their cache, too. All modules in them."""
    own: set[nn.Module] = set()
    for module in model.modules():
        if module not in own and getattr(module, "supports_gradient_checkpointing", False):
            module.gradient_checkpointing_enable({"use_reentrant": False})
            own.update(module.modules())
    return own


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
    """Each optimizer steps, and gradients are cleared, only with every so many-th of the program's steps."""
    initialise, open_ = optim.Optimizer.__init__, weakref.WeakSet[optim.Optimizer]()

    def initialised(self: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        me, step, calls = weakref.ref(self), type(self).step, 0

        def stepped(_: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % count == 0:
                loss = step(me(), *(() if closure is None else (closure,)), *args, **kwargs)
                open_.discard(me())
                return loss
            with torch.enable_grad():
                loss = closure and closure()
            open_.add(me())
            return loss

        self.step = MethodType(stepped, weakref.proxy(self))  # a method: schedulers look for its function

    def unless_open(clear: Callable[..., None], theirs: Callable[[Any], bool]) -> Callable[..., None]:
        return lambda self, *args, **kwargs: None if theirs(self) else clear(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(optim.Optimizer, "__init__", initialised))
        for owner, theirs in ((optim.Optimizer, open_.__contains__), (nn.Module, lambda module: bool(open_))):
            stack.enter_context(mock.patch.object(owner, "zero_grad", unless_open(owner.zero_grad, theirs)))
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
        batch_size: Of the loader that was read last before an optimizer stepped, for some evaluate before they train;
            None if none was, or it has none.
        samples: How many samples that loader has to give; None if unknown.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.samples: int | None = None

    @contextmanager
    def watched(self) -> Iterator[Loaders]:
        """Notes the loader that is read while the block lasts."""
        begin, stepped = torch.utils.data.DataLoader.__iter__, False

        def begun(loader: torch.utils.data.DataLoader[Any]) -> Any:
            if not stepped:
                size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
                self.batch_size = size if isinstance(size, int) else None
                self.samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
            return begin(loader)

        def step(*_: Any) -> None:
            nonlocal stepped
            stepped = True

        with ExitStack() as stack:
            stack.callback(optim.register_optimizer_step_post_hook(step).remove)
            stack.enter_context(mock.patch.object(torch.utils.data.DataLoader, "__iter__", begun))
            yield self


@contextmanager
def loader_batches(now: int, then: int) -> Iterator[None]:
    """Loaders, and samplers of batches, that are made for batches of one size give batches of another."""

    def of_another_size(initialise: Callable[..., None], by_itself: Callable[[dict[str, Any]], bool]) -> Any:
        signature = inspect.signature(initialise)

        def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            if given.arguments["batch_size"] == now and by_itself(given.arguments):
                given.arguments["batch_size"] = then
            initialise(*given.args, **given.kwargs)

        return initialised

    loader, sampler = torch.utils.data.DataLoader, torch.utils.data.BatchSampler
    with (
        mock.patch.object(
            loader, "__init__", of_another_size(loader.__init__, lambda given: given["batch_sampler"] is None)
        ),
        mock.patch.object(sampler, "__init__", of_another_size(sampler.__init__, lambda given: True)),
    ):
        yield


@contextmanager
def _outermost(begin: Callable[[nn.Module], object], end: Callable[[], object]) -> Iterator[None]:
    """Calls something before, and something after, each call of a module from outside any module."""
    depth = 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal depth
        if depth == 0:
            begin(module)
        depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            end()

    with ExitStack() as stack:
        stack.callback(hooks.register_module_forward_pre_hook(before).remove)
        stack.callback(hooks.register_module_forward_hook(after, always_call=True).remove)
        yield
