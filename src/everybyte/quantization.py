"""A trained model's products in 8-bit integers, by torchao: what is left of its bytes, and of its forecasts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .saved import saved

ZERO_POINT = 1
SCALE = 4
"""Bytes of the two numbers that each row of a quantized weight has beside its integers (torchao `Int8Tensor`)."""


def int8(model: nn.Module, activations: bool = False) -> nn.Module:
    """A copy of a model for inference whose linear layers hold their weights in INT8, a scale a row.

    Everything else stays as it is: biases, norms, recurrences, and linear layers of one input, whose weight is no
    larger than its scales.

    Args:
        model: in fp32.
        activations: quantize each layer's input too, row by row, when it arrives, and multiply integers; otherwise the
            weight is made a floating-point matrix again for each product.

    Raises:
        ImportError: torchao is not installed.
    """
    logging.disable(logging.WARNING)  # its extensions for other machines do not load here, and it says so with paths
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ImportError('quantization is torchao\'s: pip install "everybyte[book]"') from error
    finally:
        logging.disable(logging.NOTSET)
    copied = copy.deepcopy(model).eval()
    how = Int8DynamicActivationInt8WeightConfig() if activations else Int8WeightOnlyConfig()
    quantize_(copied, how, filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and layer.in_features > 1)
    return copied


def weight_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters by what they are: ``"fp32"``, or of its quantized weights each inner tensor."""
    found: dict[str, int] = {}
    for parameter in model.parameters():
        for name, part in _parts(parameter):
            found[name] = found.get(name, 0) + part.nbytes
    return found


def training_step(model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any) -> dict[str, int]:
    """What is left of a training step: bytes kept for backward as real numbers and as integers, tensors that learn.

    Of the real numbers those are told apart that are a weight's: a parameter itself is not counted, a copy of it is.
    """
    made: list[torch.Tensor] = []
    kept = saved(lambda: made.append(loss(model, batch)) or made[0]).frame()
    made.pop().backward()
    integers = kept["dtype"].str.contains("int")
    real, whole = (int(kept["nbytes"][chosen].sum()) for chosen in (~integers, integers))
    copies = int(kept["nbytes"][kept["why"].str.startswith("weight of a product")].sum())
    learn = [p.grad is not None for p in model.parameters()]
    model.zero_grad()
    bytes_kept = {"kept in fp32": real, "of it copies of weights": copies, "kept in INT8": whole}
    return bytes_kept | {"tensors that learn": sum(learn), "of": len(learn)}


def _parts(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if not is_traceable_wrapper_subclass(parameter):
        return [(str(parameter.dtype).removeprefix("torch.").replace("float32", "fp32"), parameter)]
    names, _ = parameter.__tensor_flatten__()
    return [(name, getattr(parameter, name)) for name in names]
