"""`from_pretrained` while a trace runs: shapes follow from a model's configuration, so no weights are read or fetched.

Hugging Face's own loading then goes on with outlines for weights: dtypes, layers that stay in single precision, and
where each weight is put are its decisions, as in a real run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch

from .importing import Change, changed

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",  # what is not on this machine is not fetched
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # weights are placed in the thread that is traced
}
_OF_LOADING: Final = frozenset(
    {
        *("attn_implementation", "device_map", "dtype", "experts_implementation", "generation_config", "key_mapping"),
        *("ignore_mismatched_sizes", "kernel_config", "low_cpu_mem_usage", "max_memory", "offload_buffers"),
        *("offload_folder", "output_loading_info", "quantization_config", "torch_dtype", "use_kernels"),
        *("use_safetensors", "variant", "weights_only"),
    }
)
"""Arguments of a model's `from_pretrained` that are not those of its configuration's."""


@contextmanager
def shapes_alone() -> Iterator[None]:
    """While the block lasts, `from_pretrained` of transformers reads a configuration and no weights."""
    with (
        mock.patch.dict(os.environ, _ENVIRONMENT),
        changed({"transformers.modeling_utils": _of_models, "huggingface_hub.constants": _of_the_hub}),
    ):
        yield


def _of_the_hub(module: ModuleType) -> Iterator[Change]:
    yield module, "HF_HUB_OFFLINE", True


def _of_models(module: ModuleType) -> Iterator[Change]:
    model = module.PreTrainedModel
    yield model, "from_pretrained", classmethod(_loading(model.from_pretrained.__func__))


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None or name is None:
            return load(cls, name, *args, config=config, **kwargs)
        if not isinstance(config, cls.config_class):
            own = {key: kwargs.pop(key) for key in [*kwargs] if key in _OF_LOADING}
            config, rest = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
            kwargs = own | rest
        quantized = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
        if quantized is not None:
            raise NotImplementedError(
                f"quantized weights ({type(quantized).__name__}) have kernels of their own, which no "
                "rule covers; load them unquantized, or measure on the GPU"
            )
        with torch.device("meta"):
            shapes = cls(config).state_dict()
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        weights = {
            key: torch.empty(shape.shape, dtype=stored if shape.is_floating_point() else shape.dtype, device="cpu")
            for key, shape in shapes.items()
        }
        model = load(cls, None, *args, config=config, state_dict=weights, **kwargs)
        loaded = model[0] if isinstance(model, tuple) else model
        loaded.name_or_path = loaded.config.name_or_path = str(name)
        return model

    return from_pretrained
