"""What the rows of tft_memory_analysis.toml call: closed forms of TFT-225, and traces of small networks.

The model is the reading that the book studies, `TFTConfig()`, in fp32. What a forward pass keeps is by a CPU's rules,
where traced and measured are one number; the peak of a step is by CUDA's, for what is claimed of it is about a card. A
batch is of 8 windows unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import everybyte as eb
from everybyte import gpus
from everybyte.cards import live
from everybyte.formulas import tft, tft_checkpoints
from everybyte.formulas.terms import integer
from everybyte.models.tft import TFTConfig

CONFIG = TFTConfig()


def _bytes(terms: object, batch: int = 8, config: TFTConfig = CONFIG) -> int:
    return integer(terms, tft.sizes(config, batch))


# Parameters and what stays from step to step.


def parameters(*components: str) -> int:
    """Learned numbers in components whose names begin so; of the whole model if none is named."""
    found = {name: terms for name, terms in tft.parameters(CONFIG).items() if name.startswith(components or "")}
    return integer(found, tft.sizes(CONFIG))


def listed(component: str) -> int:
    """The same with the biases that the report counts, in its literal reading."""
    return integer(tft.parameters(TFTConfig.seed())[component], tft.sizes(TFTConfig.seed()))


def network(width_in: int, context: bool = True) -> int:
    """Learned numbers in one gated residual network to 256."""
    weights = tft.grn_weights(CONFIG, tft.h if width_in > 1 else tft.ONE, tft.h, tft.h, context)
    return integer(sum(weight.count for weight in weights), tft.sizes(CONFIG))


def state(*names: str) -> int:
    """Bytes that stay from step to step: parameters, gradients, optimizer moments, positional table."""
    return integer({name: tft.model_state(CONFIG)[name] for name in names}, tft.sizes(CONFIG))


# What forward keeps, and the step.


def kept(*components: str, batch: int = 8) -> int:
    """Bytes between forward and backward in components whose names begin so; in all if none is named."""
    found = {name: terms for name, terms in tft.saved(CONFIG).items() if name.startswith(components or "")}
    return _bytes(found, batch)


def kept_if(way: str) -> int:
    """The same if stacks and recurrence are "detached", or have checkpoints, as attention has, at the "five places"."""
    return _bytes(tft_checkpoints.kept(CONFIG)[way])


def outputs(batch: int = 8, grouped: bool = False) -> int:
    """Bytes of the 210 networks' outputs side by side; with one batched product for all networks."""
    config = replace(CONFIG, selection_compute="grouped" if grouped else "loop")
    return _bytes(tft.saved(config)["historical_selection.weights"]["stacked outputs"], batch, config)


def gradients_of_activations() -> int:
    """The most bytes of them that are alive at once: of the 210 outputs, from both their uses, and their sum."""
    terms = tft.peak(CONFIG)["backward"]
    return _bytes(
        {name: terms[name] for name in ("stacked outputs", "two gradients of these", "gradient of the static context")}
    )


def peak(batch: int = 8) -> int:
    """Bytes at the peak of a training step on a GPU, parameters and buffers included."""
    return max(_at("backward", batch), _at("optimizer", batch))


def peak_on_cpu(batch: int = 8) -> int:
    """The same by a CPU's rules, by which the step counters and wider masks count as well."""
    lasting = {name: tft.model_state(CONFIG)[name] for name in ("parameters", "positional table", "quantiles")}
    return max(_bytes(moment | lasting, batch) for moment in tft.peak(CONFIG).values())


def mended(batch: int) -> int:
    """The same with a selection that keeps nothing: the peak is Adam's, at the largest weight."""
    return _at("optimizer", batch)


def _at(moment: str, batch: int) -> int:
    return integer(live(moment), tft.sizes(CONFIG, batch, mask=1, number=0))


def card() -> int:
    """Bytes that the driver reports of an RTX A4000."""
    return gpus.find("a4000").total


# What a loop leaves behind, and what cuts it short: small networks, traced.


class Chain(nn.Module):
    """Four layers, each detached from the one before or not."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.layers, self.detached = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), detached

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = x.detach() if self.detached and layer is not self.layers[-1] else x
        return x


def _steps(step: Callable[[nn.Module, Tensor], None], count: int = 6) -> eb.Timeline:
    with eb.trace(rules="cuda") as run:
        model = Chain(detached=False)
        x = run.to_device(torch.zeros(32, 64))
        for _ in run.steps(count):
            step(model, x)
    return run.timeline


def grows_uncleared() -> int:
    """Bytes that a step leaves behind when gradients are never cleared, once they are there."""
    live = _steps(lambda model, x: model(x).sum().backward()).growth_per_step()["growth"]
    return int(live.iloc[-1])


def grows_by_cached_outputs(detached: bool) -> int:
    """Bytes that a step leaves behind if its output, [32, 64] in fp32, is put into a cache before backward runs."""
    cache = []

    def step(model: nn.Module, x: Tensor) -> None:
        y = model(x)
        cache.append(y.detach() if detached else y)

    return int(_steps(step).growth_per_step()["growth"].iloc[-1])


def kept_before_detach() -> int:
    """Bytes that autograd keeps for the layers whose results are detached."""
    frame = eb.saved(lambda: Chain(detached=True)(torch.randn(32, 64)), rules="cuda").frame()
    return int(frame.loc[frame["module"].isin([f"layers.{i}" for i in range(3)]), "nbytes"].sum())


def layers_that_learn(detached: bool) -> int:
    """Of four layers, those that a backward pass reaches."""
    model = Chain(detached)
    model(torch.ones(2, 64)).sum().backward()
    return sum(layer.weight.grad is not None for layer in model.layers)


def kept_by_attention(parts: int) -> int:
    """Bytes that eager attention over [8, 60, 256] keeps when the batch is worked off in so many parts."""

    def forward() -> Tensor:
        x, q, k, v = torch.randn(8, 60, 256), *(nn.Linear(256, 256) for _ in range(3))
        heads = [layer(part).unflatten(-1, (8, 32)).transpose(1, 2) for part in x.chunk(parts) for layer in (q, k, v)]
        some = zip(heads[::3], heads[1::3], heads[2::3], strict=True)
        return torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in some])

    return eb.saved(forward, rules="cuda").total_bytes


def fused_attention_grows(quantity: str) -> bool:
    """Whether what fused attention keeps is four times as much, or twice, at twice the length."""

    def kept_at(length: int) -> int:
        def forward() -> Tensor:
            q, k, v = (torch.randn(8, 8, length, 32).bfloat16().requires_grad_() for _ in range(3))
            return nn.functional.scaled_dot_product_attention(q, k, v)

        return eb.saved(forward, rules="cuda").total_bytes - 24  # the random state

    return kept_at(4096) == {"linear": 2, "quadratic": 4}[quantity] * kept_at(2048)


def underflows(dtype: str) -> bool:
    """Whether 2^-30 is 0 in a dtype."""
    return torch.tensor(2.0**-30).to(getattr(torch, dtype)).item() == 0


def integers_learn() -> bool:
    """Whether autograd takes a tensor of INT8."""
    try:
        torch.zeros(1, dtype=torch.int8).requires_grad_()
    except RuntimeError:
        return False
    return True


def runs_flash_attention_3() -> bool:
    """Whether an RTX A4000 has the capability that its `mha_fwd` asks for (hopper/flash_api.cpp), 8.0 or more."""
    return gpus.find("a4000").capability >= (8, 0)


def shapes_of_the_listing() -> bool:
    """Whether narrow, flatten, unsqueeze and flatten give [8, 50, 1], [8, 50], [8, 50, 1] and [400, 1]."""
    x = torch.empty(8, 50, 210, device="meta").narrow(2, 7, 1)
    shapes = [x.shape, (x := x.flatten(1, 2)).shape, (x := x.unsqueeze(2)).shape, x.flatten(0, 1).shape]
    return [*map(tuple, shapes)] == [(8, 50, 1), (8, 50), (8, 50, 1), (400, 1)]
