"""Autocast in a trace: which dtypes, whose casts are kept and for how long."""

import warnings

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F

import everybyte as eb
from everybyte.rules import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("half", [BF16, FP16])


def parameter(*shape, dtype=FP32):
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def made(run, op, **where):
    """Bytes of what an op allocated, in order, whatever is said of it in brackets."""
    frame = run.timeline.frame()
    return frame[(frame["op"].str.split(" ").str[0] == op) & (frame["action"] == "alloc")]["nbytes"].tolist()


def kept(function, half=BF16):
    """Bytes of what autograd keeps of a call under autocast, in order."""

    def forward():
        with torch.autocast("cuda", half):
            return function()

    return [row["nbytes"] for row in eb.saved(forward, rules="cuda").rows]


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, lists", [("CUDA", autocast.CUDA), ("CPU", autocast.CPU)])
def test_the_lists_hold_every_op_that_pytorch_s_own_autocast_knows(device, lists):
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}")
    }
    of_named_tensors = {name for name in known if "imname" in name or "names" in name}  # until 2.12
    of_other_builds = {"_cudnn_rnn"} if device == "CUDA" else set()
    assert set(lists) == known - of_named_tensors | of_other_builds


def square(dtype):
    return torch.ones(4, 4, dtype=dtype)


CALLS = {
    "product": lambda t: t(FP32) @ t(FP32),
    "product of a half": lambda t: t(BF16) @ t(FP32),
    "linear": lambda t: F.linear(t(FP32), t(FP32), t(FP32)[0]),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(FP32), t(FP32)),
    "convolution": lambda t: F.conv1d(t(FP32)[None], t(FP32)[..., None]),
    "prelu": lambda t: F.prelu(t(FP32), t(FP32)[0]),
    "attention": lambda t: F.scaled_dot_product_attention(*(t(FP32)[None, None] for _ in range(3))),
    "a product in double precision": lambda t: t(torch.float64) @ t(torch.float64),
    "squared error of halves": lambda t: F.mse_loss(t(BF16), t(BF16)),
    "product of all": lambda t: t(BF16).prod(),
    "distances": lambda t: torch.cdist(t(BF16), t(BF16)),
    "sum of two": lambda t: t(BF16) + t(FP32),
    "relu": lambda t: t(BF16).relu(),
    "cross entropy": lambda t: F.cross_entropy(t(BF16), torch.zeros(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_call_returns_the_dtype_of_a_real_one(name):
    """On the host for real, under both rules where the two lists agree, as they do on these."""
    with torch.autocast("cpu", BF16):
        real = CALLS[name](square).dtype
    for device in ("cpu", "cuda"):
        with eb.trace(rules=device), torch.autocast(device, BF16):
            assert CALLS[name](square).dtype == real, device


@HALVES
@pytest.mark.parametrize(
    "call, single",
    [
        (lambda x: x.exp(), True),
        (lambda x: x**2, True),
        (lambda x: 1 / x, True),  # by the reciprocal
        (lambda x: x.softmax(-1), True),
        (lambda x: F.log_softmax(x, -1), True),
        (lambda x: x.softmax(-1, dtype=torch.float64), None),
        (lambda x: F.layer_norm(x, (4,)), True),
        (lambda x: F.rms_norm(x, (4,)), "rms_norm" in autocast.CUDA),  # from 2.12 on
        (lambda x: F.group_norm(x, 2), True),
        (lambda x: x.sum(), True),
        (lambda x: x.mean(), False),
        (lambda x: x.cumsum(0), True),
        (lambda x: torch.norm(x), True),
        (lambda x: torch.linalg.vector_norm(x), True),
        (lambda x: F.l1_loss(x, x), True),
        (lambda x: F.binary_cross_entropy_with_logits(x, x), True),
        (lambda x: F.gelu(x), False),
        (lambda x: F.batch_norm(x, None, None, training=True), False),
        (lambda x: torch.cat([x, x.float()]), True),  # by the kernel, not by a cast
        (lambda x: torch.addcmul(x, x, x.float()), True),
        (lambda x: torch.addcmul(x, x, x), False),
        (lambda x: F.interpolate(x[None], scale_factor=2.0), True),
    ],
)
def test_an_op_on_halves_runs_in_the_precision_that_the_list_of_the_gpu_says(call, single, half):
    with eb.trace(rules="cuda"), torch.autocast("cuda", half):
        expected = {True: FP32, False: half, None: torch.float64}[single]
        assert call(torch.ones(4, 4, dtype=half)).dtype == expected


def test_what_autocast_refuses_is_refused():
    with eb.trace(rules="cuda"), torch.autocast("cuda", BF16):
        p = torch.ones(4, 4)
        with pytest.raises(RuntimeError, match=r"test_autocast.py:\d+: .*unsafe to autocast; use .*_with_logits"):
            F.binary_cross_entropy(p, p)
        with pytest.raises(RuntimeError, match=r"test_autocast.py:\d+: .*float16 where autocast runs in .*bfloat16"):
            torch.addcmul(p.half(), p, p)
        with torch.autocast("cuda", enabled=False):
            F.binary_cross_entropy(p, p)


def test_only_floating_tensors_of_the_device_are_cast():
    with eb.trace(rules="cuda") as run, torch.autocast("cuda", BF16):
        here, there = torch.ones(4, 4), torch.ones(4, 4, device="cpu")
        assert (there @ there).dtype == FP32
        assert (here.double() @ here.double()).dtype == torch.float64
        assert here.long().sum().dtype == torch.int64
        assert made(run, "_to_copy")[:1] == [4 * 4 * 8]


# -- what is kept ------------------------------------------------------------------------------------------------------


@HALVES
def test_a_linear_layer_keeps_its_input_and_its_weight_in_half_precision(half):
    b, n, m = 8, 32, 16
    assert kept(lambda: nn.Linear(n, m)(parameter(b, n)), half) == [2 * b * n, 2 * n * m]
    # An input that learns nothing passes no gradient on: the cast weight is not kept.
    assert kept(lambda: nn.Linear(n, m)(torch.empty(b, n)), half) == [2 * b * n]


@HALVES
def test_a_layer_norm_of_halves_keeps_a_copy_in_single_precision(half):
    b, h = 8, 32
    assert kept(lambda: nn.LayerNorm(h)(parameter(b, h, dtype=half)), half) == [4 * b * h, 4 * b, 4 * b]
    if "rms_norm" in autocast.CUDA:  # from 2.12 on
        assert kept(lambda: nn.RMSNorm(h)(parameter(b, h, dtype=half)), half) == [4 * b * h, 4 * b]


@pytest.mark.parametrize("half, copied", [(FP16, False), (BF16, True)])
def test_a_softmax_of_halves_keeps_its_output_in_single_precision(half, copied):
    with eb.trace(rules="cuda") as run, torch.autocast("cuda", half):
        F.softmax(parameter(8, 32, dtype=half), -1)
    assert made(run, "_to_copy") == ([4 * 8 * 32] if copied else [])
    assert made(run, "_softmax") == [4 * 8 * 32]


@HALVES
def test_cross_entropy_keeps_a_log_softmax_in_half_precision_and_takes_the_loss_in_single(half):
    """`ATen/native/LossNLL.cpp`, `cross_entropy_loss_symint`, names the dtype of the logits."""
    b, v = 8, 32
    with eb.trace(rules="cuda") as run, torch.autocast("cuda", half):
        F.cross_entropy(parameter(b, v, dtype=half), torch.zeros(b, dtype=torch.int64))
    assert made(run, "_log_softmax") == [2 * b * v]
    assert made(run, "_to_copy") == [4 * b * v]
    assert made(run, "nll_loss_forward") == [4, 4]


@HALVES
def test_attention_in_single_precision_becomes_flash_attention(half):
    b, a, s, d = 2, 4, 16, 8
    with eb.trace(rules="cuda") as run, torch.autocast("cuda", half):
        F.scaled_dot_product_attention(*(parameter(b, a, s, d) for _ in range(3)))
    assert made(run, "_to_copy") == 3 * [2 * b * a * s * d]
    assert made(run, "_scaled_dot_product_flash_attention")[0] == 2 * b * a * s * d
    assert run.remarks == []


def test_weights_and_the_half_copies_that_the_cache_holds_are_two_lines_of_the_peak():
    # 5.0 GB of weights in single precision and 2.5 GB of copies: 7.5 GB, where weights in halves would take 2.5.
    width, layers = 25_000, 2
    with eb.trace(rules="cuda") as run:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.zeros(1, width, dtype=torch.float16)
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            model(x)
    by = run.timeline.by("op")["nbytes"]
    assert by[autocast.CACHED] == layers * 2 * width**2 == 2_500_000_000
    assert run.timeline.by("category")["nbytes"]["parameter"] == layers * 4 * width**2 == 5_000_000_000
    assert "autocast's cache of weights" in run.timeline.by("op").to_string()
    assert run.timeline.peak_bytes == 7_500_000_000 + 3 * 2 * width  # and input, hidden and output row


# -- the cast weights --------------------------------------------------------------------------------------------------

N, WEIGHT = 16, 2 * 16 * 16


def weight_casts(use, *, half=BF16, rules="cuda", **options):
    """How many times a weight [16, 16] is cast, and the run."""
    with eb.trace(rules=rules) as run:
        w, x = parameter(N, N), torch.ones(1, N)
        with torch.autocast(rules, half, **options):
            use(w, x)
    return made(run, "_to_copy").count(WEIGHT)


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_a_weight_is_cast_once_however_often_it_is_used(rules):
    def twice(w, x):
        return F.linear(F.linear(x, w), w)

    def inside(w, x):
        with torch.autocast(rules, BF16):  # the inner region ends and forgets nothing
            F.linear(x, w)
        F.linear(x, w)

    def after(w, x):
        with torch.autocast(rules, enabled=False):
            F.linear(x, w)
        F.linear(x, w)

    for use in (twice, inside, after):
        assert weight_casts(use, rules=rules) == 1
    assert weight_casts(twice, rules=rules, cache_enabled=False) == 2


def test_what_is_no_weight_is_cast_each_time():
    def frozen(w, x):
        w.requires_grad_(False)
        F.linear(F.linear(x, w), w)

    def view(w, x):
        F.linear(F.linear(x, w.view(N, N)), w.view(N, N))

    def computed(w, x):
        w = w * 1
        F.linear(F.linear(x, w), w)

    def inference(w, x):
        with torch.inference_mode():
            F.linear(F.linear(x, w), w)

    for use in (frozen, view, computed, inference):
        assert weight_casts(use) == 2, use.__name__


def test_a_weight_that_was_cast_without_gradients_learns_all_the_same():
    def use(w, x):
        with torch.no_grad():
            F.linear(x, w)
        F.linear(x, w).sum().backward()
        assert w.grad is not None

    assert weight_casts(use) == 1


def test_the_cast_weight_lives_until_the_outermost_region_ends_or_as_long_as_the_graph_keeps_it():
    def live(run, nbytes):
        return sum(run.timeline.frame().query("nbytes == @nbytes")["action"].map({"alloc": 1, "free": -1}))

    with eb.trace(rules="cuda") as run:
        w, x = parameter(N, N), torch.ones(1, N)
        with torch.autocast("cuda", BF16):
            with torch.autocast("cuda", BF16):
                F.linear(x, w)
            assert live(run, WEIGHT) == 1
        assert live(run, WEIGHT) == 0
        with torch.autocast("cuda", BF16):
            out = F.linear(x.requires_grad_(), w)
        assert live(run, WEIGHT) == 1
        out.sum().backward()
        assert live(run, WEIGHT) == 0


# -- the surface -------------------------------------------------------------------------------------------------------


def test_every_way_to_say_autocast_acts():
    def product():
        return (torch.ones(4, 4) @ torch.ones(4, 4)).dtype

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with eb.trace(rules="cuda") as run:
            assert product() == FP32
            with torch.autocast("cuda"):
                assert product() == FP16
            with torch.amp.autocast("cuda", BF16):
                assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (True, BF16)
                assert product() == BF16
                with torch.autocast("cuda", enabled=False):
                    assert not torch.is_autocast_enabled("cuda")
                    assert product() == FP32
            assert torch.autocast("cuda", BF16)(product)() == BF16
            warnings.simplefilter("ignore")  # from here on what PyTorch calls outdated
            with torch.cuda.amp.autocast(dtype=BF16):
                assert (torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()) == (True, BF16)
                assert product() == BF16
            with torch.autocast("cpu", BF16):
                assert product() == FP32
            assert not torch.is_autocast_enabled("cuda")
    assert run.not_covered == set()


def test_a_region_around_the_trace_acts_in_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this machine has no GPU
        region = torch.autocast("cuda", BF16)
    region._enabled = True
    with region, eb.trace(rules="cuda"):
        assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == BF16


def test_pytorch_s_own_autocast_is_back_when_the_trace_is_over():
    def own():
        return {name: torch._C._dispatch_dump(f"aten::{name}") for name in autocast.CPU | autocast.CUDA}

    before, switch, clear = own(), torch.set_autocast_enabled, torch.clear_autocast_cache
    for device in ("cpu", "cuda"):
        with eb.trace(rules=device), torch.autocast(device, BF16):
            torch.ones(4, 4) @ torch.ones(4, 4)
    assert own() == before
    assert (torch.set_autocast_enabled, torch.clear_autocast_cache) == (switch, clear)


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(context, x, w):
        context.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(context, gradient):
        x, w = context.saved_tensors
        return gradient @ w.T, x.T @ gradient


def test_a_function_of_one_s_own_that_asks_for_single_precision_gets_it():
    with eb.trace(rules="cuda") as run:
        x, w = parameter(4, 8, dtype=BF16), parameter(8, 2)
        with torch.autocast("cuda", BF16):
            out = Product.apply(x, w)
        (out * out).sum().backward()
    assert out.dtype == FP32
    assert made(run, "mm") == [4 * 4 * 2, 4 * 4 * 8, 4 * 8 * 2]
    assert made(run, "_to_copy") == [4 * 4 * 8, 2 * 4 * 8]  # the input there, its gradient back


@pytest.mark.filterwarnings("ignore")
def test_a_backward_pass_inside_the_region_is_cast_too():
    """As on the host for real, allocation by allocation."""

    def body(run, device):
        layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        x = run.to_device(torch.ones(3, 8, device="cpu"))
        for _ in run.steps(2):
            out = layers(x).sum()
            with torch.autocast(device, BF16):
                out.backward()
            layers.zero_grad()
            del out

    with eb.measure(device="cpu") as real:
        body(real, "cpu")
    with eb.trace(rules="cpu") as traced:
        body(traced, "cpu")
    mine, theirs = (run.timeline.without("scratch") for run in (traced, real))
    assert mine.allocations(1).equals(theirs.allocations(1))
    assert mine.peak_bytes == theirs.peak_bytes
    with eb.trace(rules="cuda") as run:
        body(run, "cuda")
    # Three products a step, two operands and the result of each.
    assert len(made(run, "_to_copy")) == 2 * 3 * 3
