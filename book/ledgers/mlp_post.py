"""What a row of mlp_post.toml calls."""

import torch
from torch import nn

import everybyte as eb


def kept(b: int, h: int) -> int:
    """Bytes that autograd keeps of an MLP h → 4h → h over b rows: traced, so nothing is computed."""

    def forward() -> torch.Tensor:
        mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
        return mlp(torch.randn(b, h))

    return eb.saved(forward, rules="cuda").total_bytes
