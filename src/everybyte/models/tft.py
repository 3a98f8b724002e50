"""TFT-225: the Temporal Fusion Transformer over 225 features, as a memory report lists it and as it was published.

Two descriptions meet in this file.

* The *report*: ``foxhunt/docs/archive/wave_d/reports/TFT_MEMORY_ANALYSIS.md``, a post-mortem of a Rust program whose
  source is not public. It lists components and sizes; where it is silent or at odds with itself, `TFTConfig` has a
  switch.
* The *paper*: Lim, Arik, Loeff and Pfister, "Temporal Fusion Transformers for Interpretable Multi-horizon Time Series
  Forecasting", arXiv 1912.09363v3. Gated residual network: equations 2-5; variable selection: 6-8; interpretable
  attention: 13-16; the recurrence, the enrichment and the feed-forward layer: 17-22; quantiles and their loss: 23-25.

Other sources: ELU, arXiv 1511.07289. GLU, arXiv 1612.08083. Layer normalisation, arXiv 1607.06450. Attention and the
sinusoidal positional encoding, arXiv 1706.03762. LSTM, Hochreiter and Schmidhuber 1997.

Shapes, in end-of-line comments: b batch, s history (50 bars), f horizon (10 bars), t = s + f, n variables of one
stream, h hidden, a heads, d = h / a, q quantiles; w is whatever width arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybyte.models.tft_selection import StackedLayerNorm, StackedLinear, streamed_selection

CHOICES: Mapping[str, tuple[str, ...]] = {
    "context": ("every", "none", "selection"),
    "selection": ("linear", "pooled", "grn"),
    "selection_compute": ("loop", "grouped", "streamed"),
    "skip": ("project", "none"),
    "recurrence": ("linear", "lstm"),
    "attention": ("heads", "shared value"),
    "head": ("horizon", "step"),
}
DECILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BIASED = ("grn", "selection", "recurrence", "attention output", "head")


@dataclass(frozen=True)
class TFTConfig:
    """Sizes, and one switch for every point on which the report is silent or contradicts itself.

    The default is the reading this book studies: 74,203,195 parameters where the report says 3.2 million.
    `seed` reads the report's own components literally (58.9 M); `readings` names them all and says why.

    Raises:
        ValueError: a size or a switch that no model can have; the message says how to mend it.
    """

    # Sizes, all from the report's first section.
    features: int = 225  # its input_dim; the three streams below must add up to it
    static_features: int = 5  # one value a sample: what the symbol is
    known_features: int = 10  # known in advance: the calendar of the bars to come
    observed_features: int = 210  # known only up to now: prices, indicators, regimes
    history: int = 50  # bars looked back on (its sequence_length)
    horizon: int = 10  # bars forecast
    quantiles: tuple[float, ...] = DECILES  # it says 9, not which: the deciles are the even choice
    hidden: int = 256  # every vector inside the model is this wide
    heads: int = 8  # attention heads, each 256 / 8 = 32 wide
    stack_layers: int = 3  # gated residual networks after each stream's selection; the paper has none
    max_positions: int = 1000  # rows of the positional table, of which 60 are read; the paper has no table: 0

    # Where the report is silent, or at odds with itself.
    biases: tuple[str, ...] = BIASED  # it counts most without; a framework's layers have them; q, k, v: as paper
    context: str = "every"  # a projection in each GRN's list, none in its sum ("none"); paper: "selection" only
    selection: str = "linear"  # "(256 x 210) -> 210", but 53,970 is 256 -> 210 ("pooled"); paper: "grn"
    selection_compute: str = "loop"  # one variable at a time, as its code does; same result: "grouped", "streamed"
    selection_keep: int = 200  # "streamed": outputs of so many variables stay, the others are computed anew
    skip: str = "project"  # "skip_projection (if needed)": where a GRN changes width; "none": no skip there
    dropout: float = 0.1  # it lists none, yet 74 M weights on 180 windows need some; paper: before each gate
    attention_dropout: float = 0.0  # on the attention weights: in neither the report nor the paper's equations
    recurrence: str = "linear"  # "LSTM (simplified Linear layers)", and so it counts them; paper: "lstm"
    causal: bool = False  # it mentions no mask, and the calendar ahead is no secret; paper: True
    attention: str = "heads"  # q, k, v for each head, side by side; paper: "shared value", mean of the heads
    fused_attention: bool = False  # same result without the weights in memory: its "flag exists but not implemented"
    head: str = "horizon"  # Linear(256 -> 90): all steps from the last state; paper: Linear(256 -> 9) a "step"

    # What only the paper has.
    embedding: bool = False  # Linear(1 -> h) for each variable; the selection weights read these embeddings
    known_in_history: bool = False  # past bars' calendar is history too: 220 variables there instead of 210
    gates: bool = False  # gated skips, a GRN for each use of the static vector, enrichment, feed-forward

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{field.name}={value!r} is not a whole number: give an int, such as {field.default}")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} is not a switch: give True or False")
            if field.type == "int" and value < 0:
                raise ValueError(f"{field.name}={value} is negative: give a whole number, such as {field.default}")
            if field.type == "float" and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"{field.name}={value!r} is not a rate: give a number from 0 up to, not including, 1")
            if field.name in CHOICES and value not in CHOICES[field.name]:
                raise ValueError(f"{field.name}={value!r} is unknown: choose one of {', '.join(CHOICES[field.name])}")
        for name in ("static_features", "known_features", "observed_features", "history", "horizon", "hidden", "heads"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0 leaves nothing to compute: give at least 1")
        streams = (self.static_features, self.known_features, self.observed_features)
        if sum(streams) != self.features:
            raise ValueError(
                f"static, known and observed features {streams} make {sum(streams)}, not features={self.features}: "
                f"set features={sum(streams)}"
            )
        if self.hidden % self.heads:
            near = self.heads * max(1, round(self.hidden / self.heads))
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}: {near} would be")
        if 0 < self.max_positions < self.history + self.horizon:
            raise ValueError(
                f"max_positions={self.max_positions} is fewer than history + horizon = {self.history + self.horizon}: "
                f"give at least that many, or 0 for no positional encoding"
            )
        if not self.quantiles or list(self.quantiles) != sorted({float(p) for p in self.quantiles if 0 < p < 1}):
            raise ValueError(f"quantiles={self.quantiles!r} must rise, each between 0 and 1: such as (0.1, 0.5, 0.9)")
        if unknown := set(self.biases) - {*BIASED, "context", "qkv"}:
            raise ValueError(f"biases names {sorted(unknown)}: choose from {', '.join((*BIASED, 'context', 'qkv'))}")
        if self.context == "selection" and not (self.selection == "grn" or self.recurrence == "lstm" or self.gates):
            raise ValueError(
                "context='selection' feeds no layer of this model: set selection='grn', or context='every'"
            )
        if self.selection_compute == "streamed" and (self.selection != "linear" or self.embedding):
            raise ValueError(
                "selection_compute='streamed' reads the outputs one by one, other selections all at once, or the "
                "embeddings, which are as many bytes: set selection='linear' and embedding=False"
            )
        if self.known_in_history and not self.embedding:
            raise ValueError("known_in_history shares the calendar's embeddings: set embedding=True as well")

    @property
    def past_features(self) -> int:
        """Variables in each bar of the history: the observed, then, where they count as history too, the known."""
        return self.observed_features + (self.known_features if self.known_in_history else 0)

    @classmethod
    def seed(cls) -> TFTConfig:
        """The report's own listed components, read literally: 58,866,913 parameters.

        Wherever the report gives an exact count, the layer is built to have it (q, k, v, recurrence, attention output
        and head without biases, selection with), and a GRN has what its "~263K" adds up: no context projection. As no
        GRN takes a context, the static encoding is added to every time step. It lists no dropout.
        """
        return cls(context="none", biases=("grn", "selection"), dropout=0.0)

    @classmethod
    def published(cls) -> TFTConfig:
        """The published TFT (arXiv 1912.09363) at the report's sizes: 93.6 M parameters.

        LSTM encoder and decoder started from static contexts, one value shared by all heads, four static contexts,
        gated skips, known inputs in the history too (``past`` is [b, 50, 220]), quantiles step by step, no positions.
        """
        return cls(
            stack_layers=0, max_positions=0, biases=("grn", "selection", "head"), context="selection",
            selection="grn", recurrence="lstm", causal=True, attention="shared value", head="step",
            embedding=True, known_in_history=True, gates=True,
        )  # fmt: skip

    @classmethod
    def readings(cls) -> dict[str, TFTConfig]:
        """What the report's words can mean, by name, smallest first; each takes one more of them at its word.

        * ``"53,970"``: the selection layer has the parameters the report prints, Linear(256 -> n). Contradicts its own
          list of activations, where the layer's input is the concatenation [8, 50, 256 x 210]. 47.6 M.
        * ``"literal"``: `seed`; the selection layer reads that concatenation, as "(256 x 210) -> 210" says. 58.9 M.
        * ``"context"``: the default; every GRN owns the context projection that the report lists among its parts, that
          its activations include ("context addition") and that its code feeds (``grn.forward(&var_flat_2d, context)``).
          Only its sum forgets it. 74.2 M. (It also drops out, and has the 858 biases that `seed` leaves away.)
        """
        return {"53,970": replace(cls.seed(), selection="pooled"), "literal": cls.seed(), "context": cls()}

    def input_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of ``static``, ``past`` and ``future``, the arguments of `TFT.forward`, and of the ``target``."""
        return {
            "static": (batch_size, self.static_features),
            "past": (batch_size, self.history, self.past_features),
            "future": (batch_size, self.horizon, self.known_features),
            "target": (batch_size, self.horizon),
        }


def linear(width_in: int, width: int, bias: bool, copies: int | None = None) -> nn.Module:
    """One linear layer, or ``copies`` of them side by side."""
    return nn.Linear(width_in, width, bias) if copies is None else StackedLinear(copies, width_in, width, bias)


class AddNorm(nn.Module):
    """LayerNorm(x + skip): what the report has after attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(x + skip)


class GatedSkip(nn.Module):
    """LayerNorm(GLU(x) + skip), the paper's way to let a layer switch itself off (equations 2 and 5).

    The GLU is two products, ``value`` and ``opening``, as the report counts it.
    """

    def __init__(self, config: TFTConfig, width_in: int, width: int, copies: int | None = None) -> None:
        super().__init__()
        bias = "grn" in config.biases
        self.dropout = nn.Dropout(config.dropout)
        self.value = linear(width_in, width, bias, copies)
        self.opening = linear(width_in, width, bias, copies)
        self.norm = nn.LayerNorm(width) if copies is None else StackedLayerNorm(copies, width)

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        x = self.dropout(x)
        x = self.value(x) * torch.sigmoid(self.opening(x))
        return self.norm(x if skip is None else x + skip)


class GatedResidualNetwork(nn.Module):
    """Two layers and a gate round which the input can pass (equations 2-5): [..., width_in] -> [..., width].

    The context, where there is one and this network has a layer for it, is [b, 1, h] and joins before the ELU.
    ``paper_context`` marks the places where the paper feeds one; ``TFTConfig.context`` decides.
    """

    def __init__(
        self,
        config: TFTConfig,
        width_in: int,
        width_inner: int,
        width: int,
        paper_context: bool = False,
        copies: int | None = None,
    ) -> None:
        super().__init__()
        bias = "grn" in config.biases
        owns_context = {"every": True, "none": False, "selection": paper_context}[config.context]
        self.linear1 = linear(width_in, width_inner, bias, copies)
        self.context = linear(config.hidden, width_inner, "context" in config.biases, copies) if owns_context else None
        self.linear2 = linear(width_inner, width_inner, bias, copies)
        self.same_width = width_in == width
        self.skip = linear(width_in, width, bias, copies) if config.skip == "project" and not self.same_width else None
        self.gate = GatedSkip(config, width_inner, width, copies)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.linear1(x)  # (..., inner)
        if self.context is not None and context is not None:
            y = y + self.context(context)
        y = self.linear2(F.elu(y))
        skip = x if self.same_width else self.skip(x) if self.skip is not None else None
        return self.gate(y, skip)  # (..., width)


class Variables(nn.Module):
    """Takes a stream apart into its variables: [..., n] -> n tensors [..., 1], views; embedded, each is [..., h]."""

    def __init__(self, config: TFTConfig, n: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(1, config.hidden) for _ in range(n)) if config.embedding else None

    def forward(self, x: Tensor) -> list[Tensor]:
        scalars = list(x.split(1, dim=-1))
        if self.embeddings is None:
            return scalars
        return [embed(scalar) for embed, scalar in zip(self.embeddings, scalars, strict=True)]


class VariableSelection(nn.Module):
    """Gives each variable a network of its own, then mixes them with weights that sum to one (equations 6-8)."""

    def __init__(self, config: TFTConfig, n: int, paper_context: bool = True) -> None:
        super().__init__()
        h, width_in = config.hidden, config.hidden if config.embedding else 1
        self.compute, self.keep = config.selection_compute, config.selection_keep
        self.pooled, self.reads_inputs = config.selection == "pooled", config.embedding
        if self.compute == "grouped":
            self.variables = GatedResidualNetwork(config, width_in, h, h, copies=n)
        else:
            self.variables = nn.ModuleList(GatedResidualNetwork(config, width_in, h, h) for _ in range(n))
        if config.selection == "grn":
            self.weights = GatedResidualNetwork(config, n * h, h, n, paper_context)
        else:
            self.weights = nn.Linear(h if self.pooled else n * h, n, "selection" in config.biases)

    def forward(self, variables: list[Tensor], context: Tensor | None = None) -> Tensor:
        if self.compute == "streamed":
            context = context if self.variables[0].context is not None else None
            return streamed_selection(self.variables, self.weights, variables, context, self.keep)
        if self.compute == "loop":
            outputs = [network(x, context) for network, x in zip(self.variables, variables, strict=True)]
            outputs = torch.stack(outputs, dim=-2)  # (..., n, h), the copy that backward keeps
        else:
            each = None if context is None else context.expand(len(variables), *context.shape)
            outputs = self.variables(torch.stack(variables), each)  # (n, ..., h)
            outputs = outputs.movedim(0, -2).contiguous()  # (..., n, h)
        read = torch.stack(variables, dim=-2) if self.reads_inputs else outputs
        read = read.mean(-2) if self.pooled else read.flatten(-2)  # (..., h) or (..., n*h)
        logits = self.weights(read, context) if isinstance(self.weights, GatedResidualNetwork) else self.weights(read)
        weights = logits.softmax(-1)  # (..., n)
        return (weights.unsqueeze(-2) @ outputs).squeeze(-2)  # (..., h)


class Stack(nn.ModuleList):
    """Gated residual networks one after another, all with the same context: [..., h] -> [..., h]."""

    def __init__(self, config: TFTConfig) -> None:
        h = config.hidden
        super().__init__(GatedResidualNetwork(config, h, h, h) for _ in range(config.stack_layers))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        for network in self:
            x = network(x, context)
        return x


class Recurrence(nn.Module):
    """Runs over the history, then over the horizon: linear layers in the report, LSTMs in the paper.

    The LSTM encoder starts from the static contexts ``state`` and ``cell``, the decoder from where the encoder ended.
    """

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        self.lstm = config.recurrence == "lstm"
        self.encoder, self.decoder = self._layer(config), self._layer(config)

    def _layer(self, config: TFTConfig) -> nn.Module:
        h = config.hidden
        return nn.LSTM(h, h, batch_first=True) if self.lstm else nn.Linear(h, h, "recurrence" in config.biases)

    def forward(self, past: Tensor, future: Tensor, state: Tensor, cell: Tensor) -> Tensor:
        if not self.lstm:
            return torch.cat([self.encoder(past), self.decoder(future)], dim=1)  # (b, t, h)
        start = tuple(c.transpose(0, 1).contiguous() for c in (state, cell))  # (1, b, h) each
        past, end = self.encoder(past, start)
        future, _ = self.decoder(future, end)
        return torch.cat([past, future], dim=1)  # (b, t, h)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of each position (arXiv 1706.03762, section 3.5): a table, not learned."""

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        position = torch.arange(config.max_positions, dtype=torch.float32)[:, None]  # (max, 1)
        column = torch.arange(config.hidden)[None]  # (1, h)
        angle = position * torch.exp(-math.log(10_000.0) * (column - column % 2) / config.hidden)  # (max, h)
        self.register_buffer("table", torch.where(column % 2 == 0, angle.sin(), angle.cos()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]  # (b, t, h)


class AttentionHead(nn.Module):
    """One head: softmax(q k^T / sqrt(d)) v, over all t steps. Without a value layer it takes the value as it comes.

    Fused, PyTorch's kernel does the same without its weights ever being in memory; they can still be asked for.
    """

    def __init__(self, config: TFTConfig, own_value: bool) -> None:
        super().__init__()
        h, d, bias = config.hidden, config.hidden // config.heads, "qkv" in config.biases
        self.fused = config.fused_attention
        self.query, self.key = nn.Linear(h, d, bias), nn.Linear(h, d, bias)
        self.value = nn.Linear(h, d, bias) if own_value else nn.Identity()
        self.dropout = nn.Dropout(config.attention_dropout)
        self.scale = 1 / math.sqrt(d)

    def weights(self, x: Tensor, hidden_from: Tensor | None = None) -> Tensor:
        """How much each step looks at each: [b, t, h] -> [b, t, t], rows that sum to one."""
        scores = self.query(x) @ self.key(x).transpose(1, 2) * self.scale  # (b, t, t)
        if hidden_from is not None:
            scores = scores.masked_fill(hidden_from, -math.inf)
        return scores.softmax(-1)

    def forward(self, x: Tensor, value: Tensor, hidden_from: Tensor | None) -> Tensor:
        if not self.fused:
            return self.dropout(self.weights(x, hidden_from)) @ self.value(value)  # (b, t, d)
        q, k, v = (y.unsqueeze(1) for y in (self.query(x), self.key(x), self.value(value)))  # (b, 1, t, d)
        rate = self.dropout.p if self.training else 0.0
        causal = hidden_from is not None
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal, scale=self.scale).squeeze(1)


class TemporalAttention(nn.Module):
    """Attention over history and horizon together, head by head, joined to its input by a skip.

    ``"heads"``: each head has its value layer, and the heads stand side by side. ``"shared value"``: one value for all,
    and the mean of the heads, so that their weights can be read as one attention (equations 14-16).
    """

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        h, d, t = config.hidden, config.hidden // config.heads, config.history + config.horizon
        self.shared = config.attention == "shared value"
        self.value = nn.Linear(h, d, "qkv" in config.biases) if self.shared else nn.Identity()
        self.heads = nn.ModuleList(AttentionHead(config, own_value=not self.shared) for _ in range(config.heads))
        self.output = nn.Linear(d if self.shared else h, h, "attention output" in config.biases)
        self.join = GatedSkip(config, h, h) if config.gates else AddNorm(h)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1) if config.causal else None  # True: a later bar
        self.register_buffer("hidden_from", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)  # (b, t, d) where shared, else x itself
        heads = [head(x, value, self.hidden_from) for head in self.heads]  # a times (b, t, d)
        y = torch.stack(heads).mean(0) if self.shared else torch.cat(heads, dim=-1)  # (b, t, d) or (b, t, h)
        return self.join(self.output(y), x)  # (b, t, h)


class QuantileHead(nn.Module):
    """The forecast: the whole horizon from the last state, or each step's quantiles from that step's state."""

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        self.horizon, self.q, self.stepwise = config.horizon, len(config.quantiles), config.head == "step"
        width = self.q if self.stepwise else self.horizon * self.q
        self.output = nn.Linear(config.hidden, width, "head" in config.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.stepwise:
            return self.output(x[:, -self.horizon :])  # (b, f, q)
        return self.output(x[:, -1]).unflatten(-1, (self.horizon, self.q))  # (b, f, q)


class StaticContexts(NamedTuple):
    """What the static variables tell the rest of the network, each [b, 1, h]; the report has one for all uses."""

    selection: Tensor
    enrichment: Tensor
    state: Tensor
    cell: Tensor


class StaticEncoder(nn.Module):
    """Turns the selected static vector [b, h] into `StaticContexts`, by one stack; in the paper, by a GRN for each."""

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        h = config.hidden
        self.stack = Stack(config)
        self.contexts = (
            nn.ModuleDict({name: GatedResidualNetwork(config, h, h, h) for name in StaticContexts._fields})
            if config.gates
            else None
        )

    def forward(self, static: Tensor) -> StaticContexts:
        static = self.stack(static)[:, None]  # (b, 1, h)
        if self.contexts is None:
            return StaticContexts(static, static, static, static)
        return StaticContexts(*(network(static) for network in self.contexts.values()))


class TFT(nn.Module):
    """Forecasts quantiles of the next bars from what a symbol is, what it did, and what is known of the days to come.

    Args:
        config: sizes and switches; `TFTConfig()` is the reading this book studies.
    """

    def __init__(self, config: TFTConfig) -> None:
        super().__init__()
        h, self.config = config.hidden, config
        self.static_variables = Variables(config, config.static_features)
        self.observed_variables = Variables(config, config.observed_features)
        self.known_variables = Variables(config, config.known_features)
        self.static_selection = VariableSelection(config, config.static_features, paper_context=False)
        self.historical_selection = VariableSelection(config, config.past_features)
        self.future_selection = VariableSelection(config, config.known_features)
        self.static_encoder = StaticEncoder(config)
        self.historical_stack = Stack(config)
        self.future_stack = Stack(config)
        self.recurrence = Recurrence(config)
        self.recurrence_join = GatedSkip(config, h, h) if config.gates else None
        self.enrichment = GatedResidualNetwork(config, h, h, h, paper_context=True) if config.gates else None
        self.position = PositionalEncoding(config) if config.max_positions else nn.Identity()
        self.attention = TemporalAttention(config)
        self.feed_forward = GatedResidualNetwork(config, h, h, h) if config.gates else None
        self.feed_forward_join = GatedSkip(config, h, h) if config.gates else None
        self.head = QuantileHead(config)
        self.register_buffer("quantiles", torch.tensor(config.quantiles), persistent=False)

    def forward(self, static: Tensor, past: Tensor, future: Tensor) -> Tensor:
        """Forecast.

        Args:
            static: [b, static_features].
            past: [b, history, past_features]; where known inputs count as history too, they come after the observed.
            future: [b, horizon, known_features].

        Returns:
            [b, horizon, quantiles]; nothing forces the quantiles of one step to be in order.
        """
        for name, given in (("static", static), ("past", past), ("future", future)):
            if tuple(given.shape[1:]) != (wanted := self.config.input_shapes(0)[name][1:]):
                raise ValueError(
                    f"{name} is {list(given.shape)}, not [b, {', '.join(map(str, wanted))}]: make it for this TFTConfig"
                )
        observed, known = past.tensor_split([self.config.observed_features], dim=-1)  # known: (b, s, 0) in the report
        past_variables = self.observed_variables(observed)
        if self.config.known_in_history:
            past_variables = past_variables + self.known_variables(known)

        context = self.static_encoder(self.static_selection(self.static_variables(static)))  # each (b, 1, h)
        past = self.historical_selection(past_variables, context.selection)  # (b, s, h)
        future = self.future_selection(self.known_variables(future), context.selection)  # (b, f, h)
        past = self.historical_stack(past, context.selection)
        future = self.future_stack(future, context.selection)

        x = self.recurrence(past, future, context.state, context.cell)  # (b, t, h)
        if self.config.context == "none":
            x = x + context.selection  # no network takes the static encoding, so it joins here
        if not self.config.gates:
            return self.head(self.attention(self.position(x)))

        x = self.recurrence_join(x, torch.cat([past, future], dim=1))
        y = self.attention(self.position(self.enrichment(x, context.enrichment)))
        return self.head(self.feed_forward_join(self.feed_forward(y), x))


def quantile_loss(forecast: Tensor, target: Tensor, quantiles: Tensor) -> Tensor:
    """The pinball loss (equations 24-25): summed over quantiles, averaged over samples and steps.

    Args:
        forecast: [b, f, q].
        target: [b, f].
        quantiles: [q], each in (0, 1), on the forecast's device; `TFT.quantiles`.

    Returns:
        A scalar, in the target's unit. Too low a forecast costs p for each unit that it is off, too high a one 1 - p.
    """
    missed = target.unsqueeze(-1) - forecast  # (b, f, q)
    return torch.maximum(quantiles * missed, (quantiles - 1) * missed).sum(-1).mean()


def batch_loss(model: TFT, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The `quantile_loss` of a batch: the arguments of `TFT.forward` and the target."""
    *inputs, target = batch
    return quantile_loss(model(*inputs), target, model.quantiles)


def parameters_by_component(model: TFT, with_gradient: bool = False) -> dict[str, int]:
    """Learned numbers in each component, in the order of the forward pass; their sum is the model's.

    Names are the model's own, and a selection network shows its two parts: ``historical_selection.variables`` and
    ``historical_selection.weights``.

    Args:
        model: Any TFT.
        with_gradient: Whether to count only those that have a gradient now.
    """
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        component = ".".join(parts[:2]) if parts[0].endswith("_selection") else parts[0]
        counted = parameter.numel() if parameter.grad is not None or not with_gradient else 0
        counts[component] = counts.get(component, 0) + counted
    return counts
