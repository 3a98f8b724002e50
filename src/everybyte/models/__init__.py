"""The networks the book studies: plain PyTorch that knows nothing of the tracer."""

from everybyte.models.gpt import GPT, Block, GPTConfig, KVCache, QuantizedKVCache, generate
from everybyte.models.lora import LoRALinear, add_lora
from everybyte.models.master import MasterWeights
from everybyte.models.tft import TFT, TFTConfig, parameters_by_component, quantile_loss

__all__ = [
    "GPT",
    "TFT",
    "Block",
    "GPTConfig",
    "KVCache",
    "LoRALinear",
    "MasterWeights",
    "QuantizedKVCache",
    "TFTConfig",
    "add_lora",
    "generate",
    "parameters_by_component",
    "quantile_loss",
]
