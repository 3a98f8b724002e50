"""The networks the book studies: plain PyTorch that knows nothing of the tracer."""

from everybyte.models.gpt import GPT, Block, GPTConfig, KVCache, QuantizedKVCache, generate
from everybyte.models.tft import TFT, TFTConfig, parameters_by_component, quantile_loss

__all__ = [
    "GPT",
    "TFT",
    "Block",
    "GPTConfig",
    "KVCache",
    "QuantizedKVCache",
    "TFTConfig",
    "generate",
    "parameters_by_component",
    "quantile_loss",
]
