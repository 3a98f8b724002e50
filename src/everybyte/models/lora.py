"""LoRA (Hu et al., arXiv 2106.09685): a frozen layer learns through a narrow path beside it.

Gradients and optimizer state then belong to the narrow path alone. Activations hardly change: the input is kept for the
path's first product where it was kept for the layer's.

Shapes, in end-of-line comments: i width in, o width out, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class LoRALinear(nn.Module):
    """``base(x) + alpha / r * up(down(x))``; only ``down`` [r, i] and ``up`` [o, r] learn."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float | None = None) -> None:
        """Args:
        base: the layer that is adapted; it is frozen.
        rank: r, width of the path.
        alpha: strength of the path, with r divided out; None: r.

        Raises:
            ValueError: a rank below 1 or beyond the layer's own.
        """
        super().__init__()
        widest = min(base.in_features, base.out_features)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= widest:
            raise ValueError(f"rank={rank!r} is not one of this layer's: give a whole number from 1 to {widest}")
        place = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, **place)
        self.up = nn.Linear(rank, base.out_features, **place)
        self.scale = 1.0 if alpha is None else alpha / rank
        nn.init.zeros_(self.up.weight)  # at the start the layer is as it was

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x) * self.scale)  # (..., i) -> (..., r) -> (..., o)


def add_lora(model: nn.Module, rank: int, layers: Sequence[str] = ("q", "v"), alpha: float | None = None) -> nn.Module:
    """Freezes a model and adapts its linear layers of some names, in place.

    Args:
        model: is changed, and returned.
        rank: of every path.
        layers: names of attributes that hold linear layers; the paper's choice is the queries' and the values'.
        alpha: as in `LoRALinear`.

    Raises:
        ValueError: a name that no linear layer has, or a rank that a layer cannot have.
    """
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if name in layers and isinstance(layer, nn.Linear)
    ]
    if missing := set(layers) - {name for _, name, _ in found}:
        named = sorted({path.split(".")[-1] for path, module in model.named_modules() if isinstance(module, nn.Linear)})
        raise ValueError(f"no linear layer is called {sorted(missing)}: choose from {', '.join(named)}")
    model.requires_grad_(False)
    for parent, name, layer in found:
        setattr(parent, name, LoRALinear(layer, rank, alpha))
    return model
