"""Architectures of transformers, each small, at random and with a batch it takes: found by rule, none by its name.

The list comes from transformers' own mappings, the sizes from each default configuration: a field's name says what it
counts, and so how it shrinks. All widths of a model shrink by one factor, so that what must divide another still does.
A batch is made of what `forward` asks for. Several sizes and shapes are tried, in order, on the CPU: the first that
trains is the recipe.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS: Final = (
    *("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "CTC", "AUDIO_CLASSIFICATION"),
    *("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    *("OBJECT_DETECTION", "DEPTH_ESTIMATION", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION"),
    *("TIME_SERIES_PREDICTION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "PRETRAINING"),
)
"""Tasks, by the names of their mappings: an architecture is trained for the first that it has; else without a head."""
_LANGUAGE: Final = frozenset(HEADS[:4]) | {"IMAGE_TEXT_TO_TEXT"}
_CLASSES: Final = frozenset(name for name in HEADS if name.endswith("CLASSIFICATION"))

BATCH, LENGTH, VOCABULARY = 2, 24, 256
_MANY: Final = 24  # what counts as a width from here on


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model type of transformers, and the class that is trained.

    Attributes:
        name: As in transformers' mappings.
        task: The mapping that the class is from; "" for the model without a head.
        model: The class's name.
    """

    name: str
    task: str
    model: str

    @property
    def config(self) -> type:
        return CONFIG_MAPPING[self.name]

    @property
    def trained(self) -> type:
        """The class; of transformers itself, or of the file beside its configuration's where that names it only."""
        if hasattr(transformers, self.model):
            return getattr(transformers, self.model)
        return getattr(import_module(self.config.__module__.replace(".configuration_", ".modeling_")), self.model)


def architectures() -> list[Architecture]:
    """All model types of `MODEL_MAPPING` that are no part of one from the same file, in the mapping's order."""
    classes: dict[str, type] = {}
    for name in auto.MODEL_MAPPING_NAMES:
        with suppress(ModuleNotFoundError, AttributeError):  # it needs a package that is not installed
            classes[name] = CONFIG_MAPPING[name]
    parts = {
        part.config_class.model_type
        for kind in classes.values()
        for part in kind.sub_configs_defaults.values()
        if part.config_class is not kind and part.config_class.__module__ == kind.__module__
    }
    return [_architecture(name) for name in classes if name not in parts]


def _architecture(name: str) -> Architecture:
    for task in HEADS:
        found = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(name)
        kind = getattr(transformers, _first(found), None) if found is not None else None
        if getattr(kind, "config_class", None) is CONFIG_MAPPING[name]:  # and not that of a part of it
            return Architecture(name, task, _first(found))
    return Architecture(name, "", _first(auto.MODEL_MAPPING_NAMES[name]))


def _first(found: Any) -> str:
    return found[0] if isinstance(found, (tuple, list)) else found


def family(architecture: Architecture, config: Any) -> str:
    """What sort of model it is, by the names of its configuration's fields and of its input."""
    named = {name for part in parts_of(config) for name, value in vars(part).items() if _is_some(value)}
    joined = " ".join(sorted(named))
    if any(re.search(r"experts|moe_", name) for name in named if "implementation" not in name):
        return "mixture of experts"
    kinds = {kind for part in parts_of(config) for kind in layer_kinds(part)}
    if re.search(r"\b(state_size|ssm_|\w*mamba_|rescale_every|lru_width)", joined) or kinds & {
        "linear_attention",
        "mamba",
        "recurrent",
    }:
        return "state space"
    inputs = architecture.trained.main_input_name
    inputs = inputs if isinstance(inputs, str) else inputs[0]
    if any(type(part) is not type(config) for part in parts_of(config)) and inputs == "input_ids":
        both = {name for part in parts_of(config) for name in vars(part)}
        if both & {"patch_size", "image_size", "num_mel_bins", "backbone_config"}:
            return "several inputs"
    if inputs.startswith("pixel_values"):
        return "vision"
    if inputs in ("input_values", "input_features") or re.search("audio|sampling_rate", joined):
        return "audio"
    if config.is_encoder_decoder:
        return "encoder-decoder"
    return "text" if inputs == "input_ids" else "other"


def _is_some(value: Any) -> bool:
    return value not in (None, 0, False) if isinstance(value, (int, type(None))) else True


def parts_of(config: Any) -> list[Any]:
    """A configuration and those in it."""
    parts = [config]
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            parts += parts_of(value)
    return parts


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """How small a model is made: widths are divided by `factor`, stacks have at most `layers`.

    Attributes:
        fewer_heads: Whether there are fewer heads rather than narrower ones.
        whole_ends: Whether vocabularies and pictures are left as large as they are.
    """

    factor: int
    layers: int
    fewer_heads: bool = False
    whole_ends: bool = False


SIZES: Final = (
    *(Size(8, 2), Size(8, 4, True), Size(8, 4), Size(16, 2, True), Size(4, 4), Size(16, 4), Size(8, 12)),
    *(Size(32, 2, True), Size(8, 2, True, True), Size(16, 2, False, True), Size(2, 4, True)),
)
"""Tried in this order."""


def _named(*patterns: str) -> Callable[[str], bool]:
    return re.compile("|".join(patterns)).search


_is_token = _named(r"token_(id|index)s?$", r"^(bos|eos|pad|sep|unk|mask|im_start|im_end)_(id|index)$", r"_pad_id$")
_is_vocabulary = _named(r"vocab(ulary)?_size(s|_per_layer_input)?$", r"_vocab_size", r"^vocab$")
_is_place = _named(r"ind(ex|ic)(es)?$", r"_ids$", r"feature_layers?$", r"^intermediate_hook_ids$")
_is_stack = _named(
    r"layers?$", r"^depths?$", r"_depths?$", r"^num_(encoder_|c2f_)?blocks$", r"block_repeats$", r"first_k_dense"
)
_is_pool = _named(r"^(num|n)(_\w+)?_experts$", r"moe_num_experts$")
_is_position = _named(r"max(_source|_target|_speech|_text)?_position", r"^n_positions$", r"^n_ctx$")
_is_window = _named(
    r"sliding_window(_size)?$", r"attention_(window|chunk_size)", r"^local_attention$", r"^window_size$"
)
_is_heads = _named(r"heads$", r"^n_head$")
_is_of_a_head = _named(
    r"head_dim", r"^d_kv$", r"mrope_section", r"query_pre_attn_scalar", r"^rotary_dim$", r"dim_head$"
)
_is_width = _named(
    r"hidden_(size|dim)", r"intermediate_(size|dim)", r"embed(ding)?s?_(dim|size)", r"^d_", r"_dims?$", r"^dim(_|$)",
    r"n_embd", r"ffn", r"(ff|feedforward|feed_forward)(_size|_hidden_size)?$", r"_rank$", r"channels$", r"_filters$",
    r"projection", r"mrope_section", r"^query_pre_attn_scalar$", r"coordinate_size|shape_size", r"pos_feats",
    r"proj_size$", r"_width$", r"^axial_pos_embds", r"_units$", r"head_size$", r"bottleneck_size", r"_latents_dim",
    r"^channels$", r"^out_features$", r"_groups$", r"dff$", r"hidden_dimension$", r"stage_(in|mid|out)_channels$",
    r"base_attn_unit_dims",
)  # fmt: skip
_draws_layers = _named(r"layer_?drop$")
_is_main = _named(r"pixel_values$", r"^input_(features|values)$")


_UNSET: Final = {"vocab_size": VOCABULARY, "prediction_length": 8, "num_experts_per_tok": 2}
"""What a default leaves open and no model can be made without."""


class Shrinking:
    """Smaller arguments for an architecture's configuration; what has one value in its parts has one there, too."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._tokens: dict[int, int] = {}
        self._images: dict[Any, Any] = {}

    def arguments(self, kind: type, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Arguments for a kind of configuration, of what its defaults, with those given, would be."""
        defaults = _defaults(kind) | (given or {})
        layers = max(self.size.layers, _enough(kind, given or {}))
        smaller = {name: number for name, number in _UNSET.items() if name in defaults and defaults[name] is None}
        for name, value in defaults.items():
            if name in smaller:
                continue
            small = self._small(name, value, defaults, layers)
            if small != value or name in (given or {}):
                smaller[name] = small
        if defaults.get("is_encoder_decoder") and defaults.get("decoder_start_token_id") is None:
            smaller["decoder_start_token_id"] = 0
        width, heads = (smaller.get(name, defaults.get(name)) for name in ("hidden_size", "num_attention_heads"))
        if "head_dim" in defaults and width and heads and getattr(_made(kind), "head_dim", 0) is None:
            smaller["head_dim"] = width // heads
        for name, part in kind.sub_configs_defaults.items():
            if defaults.get(name) is None and not part.optional:
                smaller[name] = self._part(part)
        return smaller

    def _part(self, part: Any) -> Any:
        kind = part.config_class
        if not issubclass(kind, transformers.PreTrainedConfig):
            kind = CONFIG_MAPPING[part.model_type]
        return kind(**self.arguments(kind, dict(part.init_kwargs)))

    def _small(self, name: str, value: Any, all_: dict[str, Any], layers: int) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, dict) and "layer" in name and all(isinstance(key, int) for key in value):
            return dict(zip(self._places(list(value), all_, layers), value.values(), strict=True))
        if isinstance(value, dict):
            return {key: self._small(key, inner, all_, layers) for key, inner in value.items()}
        if isinstance(value, float):
            return 0.0 if _draws_layers(name) else value
        if name == "axial_pos_shape":
            return [4, LENGTH // 4]
        if name in ("image_size", "input_size", "pretrain_image_size", "crop_size"):
            return value if self.size.whole_ends else self._image(value, all_.get("patch_size"))
        if isinstance(value, (list, tuple)):
            if _is_place(name) and not _is_token(name):
                return self._places(value, all_, layers)
            return type(value)(self._small(name, inner, all_, 2 if _is_stack(name) else layers) for inner in value)
        if not isinstance(value, int):
            return value
        if _is_token(name) or _is_vocabulary(name):
            if self.size.whole_ends:
                return value
            return self._token(value) if _is_token(name) else min(value, VOCABULARY)
        if _is_pool(name):
            return min(value, 16)
        if _is_position(name):
            return min(value, 64)
        if _is_window(name):
            return min(value, 8)
        if _is_stack(name):
            return min(value, layers)
        if self.size.fewer_heads and _is_of_a_head(name):
            return value
        if self.size.fewer_heads and _is_heads(name):
            return max(1, value // self.size.factor)
        if _is_width(name) and value >= _MANY:
            return max(1, round(value / self.size.factor))
        return value

    def _token(self, value: int) -> int:
        if 0 <= value < VOCABULARY // 2:
            return value
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens)) if value > 0 else value

    def _image(self, value: Any, patch: Any) -> Any:
        if isinstance(value, dict):
            return value
        if isinstance(value, (list, tuple)):
            patches = patch if isinstance(patch, (list, tuple)) else [patch] * len(value)
            return type(value)(self._image(one, p) for one, p in zip(value, patches, strict=False))
        if value not in self._images:
            self._images[value] = min(value, 8 * patch if isinstance(patch, int) and patch > 1 else 64)
        return self._images[value]

    def _places(self, value: Any, all_: dict[str, Any], layers: int) -> Any:
        whole = next((n for name, n in all_.items() if _is_stack(name) and isinstance(n, int)), 0)
        if not whole or not all(isinstance(at, int) for at in value):
            return value
        return type(value)(at if at < 0 else at * min(layers, whole) // whole for at in value)


def _defaults(kind: type) -> dict[str, Any]:
    """What a kind of configuration takes unless it is told otherwise; None where that follows from the rest."""
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return {name: value for name, value in defaults.items() if name != "chunk_size_feed_forward"}


@cache
def _made(kind: type) -> Any:
    """A kind of configuration by its defaults, with what follows from them; None where these alone make none."""
    try:
        return kind()
    except Exception:
        return None


def _enough(kind: type, given: dict[str, Any]) -> int:
    """How many layers show each kind of layer that a configuration's default has; at most 8."""
    kinds = layer_kinds(_made(kind))
    first = {name: kinds.index(name) for name in kinds}
    return min(8, 1 + max(first.values(), default=0))


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer, where a configuration says it."""
    found = []
    for name in ("layer_types", "layers_block_type", "layers_num_experts", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and kinds:
            found.append([str(kind) for kind in kinds])
    return tuple("/".join(kinds) for kinds in zip(*found, strict=False))


# -- batches -----------------------------------------------------------------------------------------------------------


class Batches:
    """Batches that an architecture may take, likeliest first.

    Args:
        architecture: Whose.
        config: Its small configuration.
        beside: Inputs that it has asked for, beside those that it must have.
    """

    def __init__(self, architecture: Architecture, config: Any, beside: Iterable[str] = ()) -> None:
        self._architecture = architecture
        self._beside = list(beside)
        self._parts = parts_of(config)
        self._config = config
        self._random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        names = self._names()
        choices = [list(self._choices(name)) for name in names]
        for made in itertools.islice(itertools.product(*choices), 12):
            batch = dict(zip(names, made, strict=True))
            yield {name: value for name, value in batch.items() if value is not None}

    def _names(self) -> list[str]:
        """The inputs that are given: the main one, those that must be, labels, and what a decoder begins with."""
        model = self._architecture.trained
        takes = inspect.signature(model.forward).parameters
        main = model.main_input_name
        names = [name for name in ([main] if isinstance(main, str) else list(main)) if name in takes]
        required = [
            name
            for name, parameter in takes.items()
            if parameter.default is parameter.empty
            and name not in ("self", "kwargs", "args")
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        names = names or ["input_ids"]
        for name in required:
            if name not in names:
                names.append(name)
        tail = [name for name in takes if _is_main(name)]
        if not set(names) & {"input_ids", "inputs", *tail} and "input_ids" in takes:
            names.append("input_ids")
        if "labels" in takes and self._labels(0) is not None:
            names.append("labels")
        elif "decoder_input_ids" in takes and "decoder_input_ids" not in names:
            names.append("decoder_input_ids")
        return [*names, *(name for name in self._beside if name not in names)]

    def asked_for(self, message: str) -> list[str]:
        """An input that is not given and that an error message names or, where that is of None, may have missed."""
        given = self._names()
        left = [name for name in inspect.signature(self._architecture.trained.forward).parameters if name not in given]
        named = [name for name in dict.fromkeys(re.findall(r"\w+", message)) if name in left]
        missed = [name for name in left if _is_main(name)] if "None" in message else []
        return [*named, *missed][:1]

    def _find(self, *names: str) -> Any:
        """The first of these fields that a part of the configuration has."""
        for name in names:
            for part in self._parts:
                value = getattr(part, name, None)
                if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
                    return value
        return None

    def _tokens(self, *shape: int) -> np.ndarray:
        special = {
            value
            for part in self._parts
            for name, value in vars(part).items()
            if _is_token(name) and isinstance(value, int)
        }
        vocabulary = min(n for part in self._parts for n in [getattr(part, "vocab_size", None) or VOCABULARY])
        plain = [token for token in range(min(vocabulary, VOCABULARY)) if token not in special] or [0]
        return self._random.choice(plain, shape)

    def _numbers(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape).astype("float32")

    def _labels(self, length: int) -> np.ndarray | None:
        task = self._architecture.task
        if task in _LANGUAGE:
            return self._tokens(BATCH, length)
        if task == "CTC":
            return self._tokens(BATCH, 4)
        if task in _CLASSES:
            return np.arange(BATCH) % max(2, getattr(self._config, "num_labels", 2) or 2)
        return None

    def _choices(self, name: str) -> Iterator[np.ndarray | None]:
        if name == "labels":
            yield self._labels(LENGTH)
        elif "attention_mask" in name or name in ("past_observed_mask", "future_observed_mask", "padding_mask"):
            yield np.ones((BATCH, LENGTH), "int64")
        elif name == "bbox":
            yield np.zeros((BATCH, LENGTH, 4), "int64")
        elif "ids" in name:
            yield self._tokens(BATCH, LENGTH)
            if books := self._find("num_codebooks", "n_codebooks", "num_quantizers", "num_channels"):
                yield self._tokens(BATCH, LENGTH, books)
                yield self._tokens(BATCH, books, LENGTH)
                yield self._tokens(BATCH * books, LENGTH)
        elif name.startswith("pixel_values") or name in ("image", "images"):
            yield from self._pixels()
        elif name in ("input_features", "input_values", "audio_features", "waveform", "audio_values"):
            yield from self._sound(name)
        elif name in ("inputs_embeds", "hidden_states", "inputs", "encoder_hidden_states"):
            if name == "inputs":
                yield self._tokens(BATCH, LENGTH)
            yield self._numbers(BATCH, LENGTH, self._find("hidden_size", "d_model", "embed_dim") or 32)
        elif name.startswith(("past_", "future_")):
            yield from self._series(name)
        else:
            yield self._numbers(BATCH, LENGTH)

    def _pixels(self) -> Iterator[np.ndarray]:
        channels = self._find("num_channels", "in_channels", "in_chans", "num_input_channels") or 3
        channels = channels if isinstance(channels, int) else 3
        size = self._find("image_size", "input_size", "img_size", "crop_size") or 64
        height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
        if isinstance(height, (list, tuple)) or not isinstance(height, int):
            height = width = 64
        frames = self._find("num_frames", "frames_per_clip")
        if frames:
            yield self._numbers(BATCH, frames, channels, height, width)
        yield self._numbers(BATCH, channels, height, width)
        yield self._numbers(BATCH, 2, channels, height, width)
        yield self._numbers(BATCH, channels, 2 * height, 2 * width)
        yield self._numbers(BATCH, channels, 224, 224)

    def _sound(self, name: str) -> Iterator[np.ndarray]:
        bins = self._find(
            "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "n_mels"
        )
        frames = self._find("max_length", "max_source_positions")
        if name != "input_values" and bins:
            if isinstance(frames, int):
                yield self._numbers(BATCH, bins, 2 * frames)
            yield self._numbers(BATCH, 64, bins)
            yield self._numbers(BATCH, bins, 64)
            if window := self._find("n_window"):
                yield self._numbers(BATCH, bins, 2 * window)
            yield self._numbers(BATCH, 1, 128, bins)
        if name == "input_values" and bins and isinstance(frames, int):
            yield self._numbers(BATCH, frames, bins)
        yield self._numbers(BATCH, 8000)
        yield self._numbers(BATCH, 1, 8000)
        if bins:
            yield self._numbers(BATCH, 64, bins)

    def _series(self, name: str) -> Iterator[np.ndarray]:
        context, ahead = self._find("context_length") or LENGTH, self._find("prediction_length") or 8
        lags = self._find("lags_sequence") or [0]
        length = (
            context + max(lags) if isinstance(lags, (list, tuple)) and "past" in name and "lags" in name else context
        )
        length = context + max(lags) if hasattr(self._config, "lags_sequence") and name.startswith("past") else length
        length = length if name.startswith("past") else ahead
        features = sum(self._find(name) or 0 for name in ("num_time_features", "num_dynamic_real_features"))
        channels = self._find("num_input_channels", "input_size")
        if name.endswith("time_features"):
            yield self._numbers(BATCH, length, features)
        elif (channels and channels > 1) or hasattr(self._config, "num_input_channels"):
            yield self._numbers(BATCH, length, channels)
        else:
            yield self._numbers(BATCH, length)


# -- training ----------------------------------------------------------------------------------------------------------


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss where it has one, else the means of all its floating outputs that learn, added up."""
    if isinstance(getattr(output, "loss", None), torch.Tensor) and output.loss.requires_grad:
        return output.loss if output.loss.dim() == 0 else output.loss.mean()
    values = output.values() if hasattr(output, "values") else output
    leaves = [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
    return sum(leaf.mean() for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad)
