"""`eb.saved`: what autograd keeps, each storage once, with its role and its reason, in a real run and in a trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everybyte as eb

BATCH, SEQUENCE, HIDDEN, HEADS = 2, 6, 16, 4
MiB = 2**20

either_way = pytest.mark.parametrize("rules", [None, "cpu"], ids=["real", "traced"])


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape or (BATCH, SEQUENCE, HIDDEN), dtype=dtype, requires_grad=True)


def mlp(activation: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), activation, nn.Linear(4 * HIDDEN, HIDDEN)).to(dtype)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(query @ key.transpose(-1, -2), -1), 0.1) @ value


class Attended(nn.Module):
    """A block with views, a buffer, residuals, and tensors that two formulas need."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", torch.full((HIDDEN,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(BATCH, SEQUENCE, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        return x + self.out(attention(*heads).transpose(1, 2).reshape(x.shape) * self.scale)


FORWARDS = {
    "linear": lambda: nn.Linear(HIDDEN, 8)(states()),
    "attention": lambda: attention(*(states(BATCH, HEADS, SEQUENCE, 4) for _ in range(3))),
    "gelu": lambda: F.gelu(states()),
    "relu": lambda: F.relu(states()),
    "sigmoid": lambda: torch.sigmoid(states()),
    "dropout": lambda: F.dropout(states(), 0.1),
    "softmax": lambda: torch.softmax(states(), -1),
    "layer norm": lambda: nn.LayerNorm(HIDDEN)(states()),
    "layer norm in bf16": lambda: nn.LayerNorm(HIDDEN).bfloat16()(states(dtype=torch.bfloat16)),
    "layer norm in fp32 of bf16": lambda: nn.LayerNorm(HIDDEN)(states(dtype=torch.bfloat16)),
    "factors": lambda: states() * states(),
    "sum": lambda: states() + states(),
    "embedding": lambda: nn.Embedding(9, HIDDEN)(torch.tensor([[1, 2, 3]])),
    "cross-entropy": lambda: F.cross_entropy(states(5, 9), torch.tensor([0, 1, 2, 3, 4])),
    "gelu mlp": lambda: mlp(nn.GELU())(states()),
    "block": lambda: Attended()(states()),
    "in place": lambda: nn.Linear(HIDDEN, 8, bias=False)(states()).relu_(),
    "in place on a view": lambda: F.dropout(mlp(nn.ReLU(inplace=True))(states()), 0.1, inplace=True),
    "in place by an operator": lambda: _multiplied_in_place(),
}

forwards = pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())


def _multiplied_in_place() -> torch.Tensor:
    y = nn.Linear(HIDDEN, HIDDEN)(states())
    y *= torch.full(y.shape, 3.0)
    return y


class Held:
    """What autograd gets from a hook in place of a tensor: it dies when the graph lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def bytes_that_hooks_see(forward) -> int:
    """The same question put another way: storages behind the saved tensors that are alive after the forward pass."""
    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    parameters: set[int] = set()

    def pack(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        alive.add(held)
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            parameters.add(tensor.untyped_storage().data_ptr())
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        output = forward()
    storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in alive}
    assert output.requires_grad
    return sum(nbytes for address, nbytes in storages.items() if address not in parameters)


# -- how many bytes ----------------------------------------------------------------------------------------------------


@either_way
@pytest.mark.parametrize(("activation", "per_sbh"), [(nn.GELU(), 18), (nn.ReLU(), 10)], ids=["gelu", "relu"])
def test_an_mlp_in_bf16_keeps_18_sbh_with_gelu_and_10_sbh_with_relu(activation, per_sbh, rules):
    kept = eb.saved(lambda: mlp(activation, torch.bfloat16)(states(dtype=torch.bfloat16)), rules=rules)
    assert kept.total_bytes == per_sbh * SEQUENCE * BATCH * HIDDEN


@either_way
def test_a_swiglu_written_with_tensor_operations_keeps_four_tensors_of_the_mlps_width(rules):
    """Gate, its SiLU, the other factor and the product; 23 sbh where that width is 2.625 h."""
    wide = 21 * HIDDEN // 8

    def forward() -> torch.Tensor:
        gate, up = (nn.Linear(HIDDEN, wide, bias=False, dtype=torch.bfloat16) for _ in range(2))
        down = nn.Linear(wide, HIDDEN, bias=False, dtype=torch.bfloat16)
        x = states(dtype=torch.bfloat16)
        return down(F.silu(gate(x)) * up(x))

    assert eb.saved(forward, rules=rules).total_bytes == 23 * SEQUENCE * BATCH * HIDDEN


def test_a_layer_used_100_times_keeps_100_inputs_and_its_weight_once():
    """A GPU reports 4044.00390625 MiB after this forward pass, asked of torchinfo's developers ("recursive Models")."""
    with eb.trace(rules="cpu") as run:
        layer, x = nn.Linear(1024, 1024), run.to_device(torch.empty(10240, 1024, device="meta"))

        def forward() -> torch.Tensor:
            y = x
            for _ in range(100):
                y = layer(y)
            return y

        kept = eb.saved(forward)
        output = forward()
        live = run.timeline.live_bytes[-1]
        del output
    assert kept.total_bytes == 4000 * MiB
    assert len(kept.frame()) == 100
    assert kept.parameter_bytes == 4 * MiB
    assert kept.output.unsaved_bytes == kept.output.nbytes == 40 * MiB
    assert live / MiB == 4044.00390625


@forwards
def test_no_kept_storage_is_missed_or_counted_twice(forward):
    assert eb.saved(forward).total_bytes == bytes_that_hooks_see(forward)


@forwards
def test_a_trace_gives_the_same_rows_as_a_real_run(forward):
    real, traced = eb.saved(forward), eb.saved(forward, rules="cpu")
    assert traced.frame().equals(real.frame())
    assert traced.output == real.output
    assert traced.parameter_bytes == real.parameter_bytes


@either_way
def test_views_of_one_storage_are_counted_once_and_at_its_full_size(rules):
    def forward() -> torch.Tensor:
        x = states(4, 10)
        return x[:, :2] @ x[:, 2:4].t()

    kept = eb.saved(forward, rules=rules)
    assert kept.frame()["nbytes"].tolist() == [4 * 4 * 10]
    assert kept.frame()["uses"].tolist() == [2]


@either_way
def test_a_parameter_is_left_out_in_every_guise(rules):
    def forward() -> torch.Tensor:
        tied = nn.Embedding(7, HIDDEN)
        head = nn.Linear(HIDDEN, 7, bias=False)
        head.weight = tied.weight
        return head(tied(torch.tensor([[1, 2]]))) + (tied.weight[0] * states(HIDDEN)).sum()

    kept = eb.saved(forward, rules=rules)
    assert kept.parameter_bytes == 4 * 7 * HIDDEN
    assert sorted(kept.frame()["nbytes"]) == [8 * 2, 4 * HIDDEN, 4 * 2 * HIDDEN]  # ids, the factor, the head's input


@either_way
def test_a_number_that_a_gradient_needs_is_kept_as_a_tensor_of_8_bytes(rules):
    kept = eb.saved(lambda: states(5) / 2.0, rules=rules).frame()
    assert kept[["nbytes", "shape", "why"]].values.tolist() == [[8, [], "divisor: the gradient is divided by it too"]]


def test_more_kept_bytes_than_64_bits_can_say_are_refused():
    def forward(factors):
        learned = nn.Parameter(torch.empty(1))
        return sum(learned * torch.empty(2**59) for _ in range(factors))

    assert eb.saved(lambda: forward(3), rules="cpu").total_bytes == 3 * 2**61
    with pytest.raises(ValueError, match=r"more than 2\*\*63 - 1"):
        eb.saved(lambda: forward(4), rules="cpu")


def test_a_frozen_weight_keeps_no_input():
    assert eb.saved(lambda: nn.Linear(HIDDEN, 8).requires_grad_(False)(states())).total_bytes == 0


@either_way
def test_what_an_in_place_operation_on_a_view_keeps_is_found(rules):
    """A 3-D product returns a view; autograd hides the node of an in-place operation on it."""
    kept = eb.saved(lambda: F.dropout(nn.Linear(HIDDEN, 8)(states()), 0.1, inplace=True), rules=rules).frame()
    assert kept["op"].tolist() == ["addmm", "dropout"]
    assert kept["nbytes"].tolist() == [4 * BATCH * SEQUENCE * HIDDEN, 4 * BATCH * SEQUENCE * 8]
    assert kept["why"][1] == "mask: which elements were dropped"


def test_gradients_are_right_though_an_in_place_operation_was_looked_at():
    weight, x = torch.randn(8, HIDDEN, requires_grad=True), states()
    outputs = []

    def forward() -> torch.Tensor:
        outputs.append(F.relu(F.linear(x, weight, torch.zeros(8)), inplace=True).mul_(torch.full((8,), 3.0)))
        return outputs[-1]

    eb.saved(forward)
    (looked_at,) = torch.autograd.grad(outputs[0].square().sum(), weight)
    (plain,) = torch.autograd.grad((3 * F.relu(x @ weight.t())).square().sum(), weight)
    torch.testing.assert_close(looked_at, plain)


# -- what hooks have packed away ---------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Keeps a tensor by hand."""

    @staticmethod
    def forward(context, x: torch.Tensor) -> torch.Tensor:
        context.factor = torch.full_like(x, 2.0)
        return x * 2

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * context.factor


def as_bytes() -> torch.autograd.graph.saved_tensors_hooks:
    """Activations kept as int8 with their scale."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.detach().abs().max() / 127
        return (tensor.detach() / scale).to(torch.int8), scale

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0] * packed[1])


def sharp(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with as_bytes():
        return torch.sin(block(x))


def segments() -> dict:
    """Forward passes whose nodes hold what they keep indirectly. The module is made outside, the input inside."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(HIDDEN, 8), nn.ReLU(inplace=True), nn.Dropout(0.1, inplace=True), nn.Linear(8, 8))
    again = {"use_reentrant": False, "preserve_rng_state": False}

    def nested(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, torch.sin(x), **again).relu()

    def closed_over(x: torch.Tensor) -> torch.Tensor:
        shift = x.detach() + 1
        return checkpoint(lambda: block(x * shift), **again)

    return {
        "checkpoint": lambda: checkpoint(block, states(), use_reentrant=False),
        "without its random state": lambda: checkpoint(block, states(), **again),
        "reentrant": lambda: checkpoint(block, states(), use_reentrant=True),
        "nested": lambda: checkpoint(nested, states(), **again),
        "twice over": lambda: checkpoint(block, checkpoint(torch.tanh, states(), **again), **again),
        "a list": lambda: checkpoint(lambda xs: block(xs[0] * xs[1]), [states(), states()], **again),
        "by name": lambda: checkpoint(lambda x: block(x).exp(), x=states(), **again),
        "closed over": lambda: closed_over(states()),
        "by hand": lambda: Doubled.apply(block(states())),
        "as bytes": lambda: sharp(block[0], states().detach()),
    }


@pytest.mark.parametrize("name", segments())
def test_what_hooks_hold_is_what_a_measured_forward_pass_leaves_alive(name):
    forward = segments()[name]
    with eb.measure(device="cpu") as run:
        output = forward()
    kept = eb.saved(forward)
    assert kept.total_bytes + kept.output.unsaved_bytes == run.timeline.live_bytes[-1]
    del output


@pytest.mark.parametrize("name", segments())
def test_what_hooks_hold_is_the_same_in_a_trace(name):
    real, traced = eb.saved(segments()[name]), eb.saved(lambda: segments()[name](), rules="cpu")
    assert traced.total_bytes == real.total_bytes
    assert sorted(traced.frame()["nbytes"]) == sorted(real.frame()["nbytes"])


def test_looking_at_a_checkpoint_holds_nothing_of_it_alive():
    weights = weakref.WeakSet()

    def forward():
        layer = nn.Linear(HIDDEN, HIDDEN)
        weights.add(layer.weight)
        return checkpoint(layer, states(), use_reentrant=False)

    gc.disable()  # a cycle would be found sooner or later, and until then sit in the timeline
    try:
        eb.saved(forward)
        assert not weights
    finally:
        gc.enable()


def test_a_checkpoint_keeps_its_input_and_the_generator_s_state():
    kept = eb.saved(segments()["checkpoint"]).frame()
    assert kept[["nbytes", "op", "role", "operand"]].values.tolist() == [
        [4 * BATCH * SEQUENCE * HIDDEN, "checkpoint", "input", "input"],
        [torch.get_rng_state().nbytes, "checkpoint", "activation", "random state"],
    ]
    assert kept["why"][0] == "computed anew in backward, with all that lies between, from this"


@either_way
def test_a_checkpoint_round_each_linear_layer_saves_nothing(rules):
    """Asked of PyTorch's developers: a layer's input is what the checkpoint keeps and what the layer keeps."""

    def forward(again: bool) -> torch.Tensor:
        x = torch.ones(137, 256)
        for layer in [nn.Linear(256, 256) for _ in range(8)]:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if again else layer(x)
        return x

    plain, checkpointed = (eb.saved(lambda again=again: forward(again), rules=rules) for again in (False, True))
    assert plain.total_bytes == checkpointed.total_bytes == 8 * 4 * 137 * 256 == 1_122_304


# -- what the rows say -------------------------------------------------------------------------------------------------


@either_way
def test_inputs_and_masks_and_buffers_have_their_roles(rules):
    def forward() -> torch.Tensor:
        block, x = Attended(), torch.ones(BATCH, SEQUENCE, HIDDEN)
        return F.dropout(block(x), 0.1)

    kept = eb.saved(forward, rules=rules).frame()
    roles = kept[kept["op"] == "native_layer_norm"].set_index("operand")["role"]
    assert (roles["input"], roles["result1"]) == ("input", "activation")
    masks = kept[(kept["op"] == "mul") & (kept["operand"] == "other") & (kept["role"] == "activation")]
    assert [BATCH, HEADS, SEQUENCE, SEQUENCE] in masks["shape"].tolist()
    assert [BATCH, SEQUENCE, HIDDEN] in masks["shape"].tolist()
    (buffer,) = kept[kept["role"] == "buffer"].to_dict("records")
    assert (buffer["nbytes"], buffer["shape"]) == (4 * HIDDEN, [HIDDEN])
    assert set(kept["role"]) == {"input", "activation", "buffer"}


def test_a_tensor_from_the_functions_surroundings_is_an_input():
    x, other = torch.ones(3, HIDDEN), torch.full((3, 8), 2.0)
    layer = nn.Linear(HIDDEN, 8)
    assert eb.saved(lambda: layer(x) * other).frame()["role"].tolist() == ["input", "input"]


def test_a_tensor_given_to_a_trace_is_an_input():
    with eb.trace(rules="cpu") as run:
        batch = {"x": run.to_device(torch.ones(3, HIDDEN))}
        model = nn.Linear(HIDDEN, 8)
        kept = eb.saved(lambda: model(batch["x"]))
    assert kept.frame()["role"].tolist() == ["input"]


@either_way
def test_each_row_says_what_kept_it_where_and_why(rules):
    def forward() -> torch.Tensor:
        model = nn.Sequential(nn.LayerNorm(HIDDEN), mlp(nn.GELU()))
        return model(states())

    kept = eb.saved(forward, rules=rules).frame()
    assert list(kept.columns) == ["nbytes", "shape", "dtype", "module", "op", "role", "operand", "why", "uses"]
    assert kept[["module", "op", "operand"]].values.tolist() == [
        ["0", "native_layer_norm", "input"],
        ["0", "native_layer_norm", "result1"],
        ["0", "native_layer_norm", "result2"],
        ["1.0", "addmm", "mat1"],
        ["1.1", "gelu", "self"],
        ["1.2", "addmm", "mat1"],
    ]
    assert kept["why"].tolist() == [
        "normalised anew in backward, from the two statistics",
        "mean of each row",
        "reciprocal standard deviation of each row",
        "input of a product whose weight learns: its gradient is X^T dY",
        "the gradient of gelu depends on its input",
        "input of a product whose weight learns: its gradient is X^T dY",
    ]
    assert set(kept["dtype"]) == {"float32"}


def test_a_storage_that_two_formulas_need_names_the_first_and_counts_both():
    kept = eb.saved(lambda: mlp(nn.ReLU())(states())).frame()
    assert kept["op"].tolist() == ["addmm", "relu"]
    assert kept["why"][1] == "the gradient of relu is written in its output"
    assert kept["uses"].tolist() == [1, 2]


def test_by_sums_to_the_total_and_refuses_a_column_that_is_not_there():
    kept = eb.saved(lambda: Attended()(states()))
    assert kept.by("module")["nbytes"].sum() == kept.total_bytes
    assert kept.by("op")["storages"].sum() == len(kept.frame())
    with pytest.raises(ValueError, match="no column 'bytes'; choose one of nbytes"):
        kept.by("bytes")


# -- that looking changes nothing --------------------------------------------------------------------------------------


@either_way
def test_a_partition_puts_every_storage_under_one_name(rules):
    kept = eb.saved(lambda: mlp(nn.GELU())(states()), rules=rules)
    parts = {"inputs": ("0 addmm mat1", "2 addmm mat1"), "GELU": "1 gelu *", "softmax": "* softmax *"}
    one = BATCH * SEQUENCE * HIDDEN * 4
    assert kept.partition(parts) == {"inputs": one + 4 * one, "GELU": 4 * one, "softmax": 0}


@pytest.mark.parametrize(
    "patterns, message",
    [
        ({"inputs": "* addmm *"}, "'1 gelu self', 1,024 B, fits no name"),
        ({"inputs": "* addmm *", "all": "*"}, "'0 addmm mat1', 256 B, fits 'inputs' and 'all'"),
    ],
)
def test_a_partition_that_leaves_a_storage_out_or_counts_it_twice_is_refused(patterns, message):
    kept = eb.saved(lambda: mlp(nn.GELU())(torch.ones(4, HIDDEN)))
    with pytest.raises(ValueError, match=message):
        kept.partition(patterns)


def test_saved_holds_no_tensor():
    made: list[weakref.ref] = []

    def forward() -> torch.Tensor:
        inner = F.relu(nn.Linear(HIDDEN, 8)(states()), inplace=True)
        made.append(weakref.ref(inner.untyped_storage()))
        return torch.sigmoid(inner)

    kept = eb.saved(forward)
    gc.collect()
    assert kept.total_bytes
    assert made[0]() is None


@forwards
def test_saved_inside_a_trace_leaves_the_timeline_as_it_was(forward):
    def timeline(look) -> eb.Timeline:
        with eb.trace(rules="cpu") as run:
            for _ in run.steps(2):
                look(forward)
                forward().sum().backward()
        return run.timeline

    looked, plain = timeline(lambda function: eb.saved(function)), timeline(lambda function: function())
    assert looked.peak_bytes == plain.peak_bytes
    assert looked.growth_per_step().equals(plain.growth_per_step())
    assert events(looked, "alloc") == events(plain, "alloc")
    assert sorted(events(looked, "free")) == sorted(events(plain, "free"))  # of several at once, any may be first


def events(timeline: eb.Timeline, action: str) -> list[tuple]:
    frame = timeline.frame().drop(columns=["line", "own"])
    return list(frame[frame["action"] == action].itertuples(index=False, name=None))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [lambda: torch.ones(2) + 1, lambda: torch.no_grad()(nn.Linear(2, 2))(torch.ones(2)), lambda: None],
    ids=["nothing learns", "no_grad", "nothing returned"],
)
def test_without_a_graph_the_error_says_what_to_do(forward):
    with pytest.raises(ValueError, match=r"no gradient graph: run with gradients enabled .* return the output"):
        eb.saved(forward)


def test_other_rules_than_the_running_traces_are_refused():
    with eb.trace(rules="cpu"), pytest.raises(ValueError, match="rules='cuda' inside a trace by the rules 'cpu'"):
        eb.saved(lambda: nn.Linear(2, 2)(torch.ones(1, 2)), rules="cuda")
