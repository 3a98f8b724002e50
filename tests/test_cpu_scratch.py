"""What CPU kernels take for themselves: traced, it is what the profiler sees of a real run, kernel by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import differences_between
from torch import Tensor, nn

import everybyte as eb
from everybyte.rules import asked
from everybyte.timeline import Timeline


def _taken(timeline: Timeline) -> Counter[tuple[str, int]]:
    frame = timeline.frame().query("category == 'scratch' and action == 'alloc'")
    return Counter(zip(frame["op"].astype(str), frame["nbytes"].tolist(), strict=True))


def assert_agree_with_scratch(body: Callable[[Any], None]) -> eb.Trace:
    """Holds the peaks and each kernel's scratch of a traced run against those of a real one, and all the rest."""
    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    assert _taken(traced.timeline) == _taken(measured.timeline)
    assert traced.timeline.peak_bytes == measured.timeline.peak_bytes
    differences = differences_between(traced.timeline.without("scratch"), measured.timeline.without("scratch"))
    assert not differences, f"\n{differences}"
    return traced


def _training(model: Callable[[], nn.Module], x: Tensor, optimizer: Any = torch.optim.Adam, steps: int = 2) -> Any:
    def body(run: Any) -> None:
        torch.manual_seed(0)
        net = model()
        learns = optimizer(net.parameters())
        for _ in run.steps(steps):
            net(run.to_device(x)).square().mean().backward()
            learns.step()
            learns.zero_grad()

    return body


def test_a_number_becomes_a_tensor_in_the_operands_dtype_at_the_peak_of_adam() -> None:
    assert_agree_with_scratch(_training(lambda: nn.Linear(1024, 1024), torch.randn(8, 1024)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.bool])
def test_calls_of_one_op_on_one_shape_take_each_what_its_numbers_make_them(dtype) -> None:
    def body(run: Any) -> None:
        x = run.to_device(torch.ones(300, device="cpu").to(dtype))
        for number in (2, 0.5, True, 3, 1.5, False):
            x * number, number * x, x == number, x / number if number else None
        with torch.no_grad():
            for number in (True, 2, 0.5) if dtype.is_floating_point else (True,):
                x.mul_(number), x.clone().mul_(number)

    assert_agree_with_scratch(body)


def _gan(run: Any) -> None:
    def blocks(*layers: nn.Module) -> nn.Sequential:
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    generator = blocks(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    critic = blocks(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32), nn.LeakyReLU(0.2, True), nn.Conv2d(32, 1, 2, 1, 0), nn.Sigmoid(),
    )  # fmt: skip
    of_generator, of_critic = (torch.optim.Adam(net.parameters(), 2e-4) for net in (generator, critic))
    real, loss = run.to_device(torch.randn(8, 3, 8, 8, device="cpu")), nn.BCELoss()
    for _ in run.steps(2):
        critic.zero_grad()
        label = torch.full((8,), 1.0)
        loss(critic(real).view(-1), label).backward()
        fake = generator(torch.randn(8, 16, 1, 1))
        label.fill_(0.0)
        loss(critic(fake.detach()).view(-1), label).backward()
        of_critic.step()
        generator.zero_grad()
        label.fill_(1.0)
        loss(critic(fake).view(-1), label).backward()
        of_generator.step()


def test_two_networks_against_each_other_take_what_their_convolutions_copy() -> None:
    assert_agree_with_scratch(_gan)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pictures_in_either_layout(layout: torch.memory_format) -> None:
    def model() -> nn.Module:
        layers = (
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4, stride=2),
            nn.GroupNorm(4, 16), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3, groups=16),
            nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 10),
        )  # fmt: skip
        return nn.Sequential(*layers).to(memory_format=layout)

    assert_agree_with_scratch(_training(model, torch.randn(4, 3, 16, 16).to(memory_format=layout)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformers_layer(dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True, dtype=dtype)

    assert_agree_with_scratch(_training(model, torch.randn(2, 40, 64).to(dtype)))


def test_an_lstm() -> None:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0][:, -1]

    assert_agree_with_scratch(_training(lambda: Last(12, 20, 2, batch_first=True), torch.randn(3, 9, 12)))


A, HALF, WHOLE = torch.randn(6, 10), torch.randn(6, 10).bfloat16(), torch.arange(60).view(6, 10)
CALLS: dict[str, Callable[[Any], Any]] = {
    "sum of two dtypes": lambda on: on(A) + on(HALF),
    "product in place with another dtype": lambda on: on(HALF).mul_(on(A)),
    "whole numbers and a fraction": lambda on: on(WHOLE) * 0.5,
    "quotient of whole numbers": lambda on: on(WHOLE) / on(WHOLE),
    "root of whole numbers": lambda on: on(WHOLE).sqrt(),
    "comparison of whole numbers with a fraction": lambda on: on(WHOLE) < 2.5,
    "power of a number": lambda on: 10000.0 ** on(A),
    "power of a fraction to whole numbers": lambda on: 0.5 ** on(WHOLE),
    "truth values and numbers": lambda on: (on(WHOLE) > 3) * on(A),
    "choice of two dtypes": lambda on: torch.where(on(WHOLE) > 3, on(A), on(HALF)),
    "one dtype": lambda on: on(A) + on(A),
    "a number in half precision": lambda on: on(HALF) * 2.0,
    "sum of truth values": lambda on: (on(WHOLE) > 3).sum(),
    "mean": lambda on: on(A).mean(-1),
    "mean in half precision": lambda on: on(HALF).mean(0),
    "logarithm of a sum": lambda on: on(A).logsumexp(-1),
    "softmax of a transposed matrix": lambda on: on(A).t().softmax(-1),
    "product with rows apart": lambda on: on(A)[:, ::2] @ on(A)[:5],
    "product with a number repeated": lambda on: torch.ones(()).expand(8, 6) @ on(A),
    "products of matrices repeated": lambda on: on(A).expand(3, 6, 10).mT @ on(A).expand(3, 6, 10),
    "loss of each": lambda on: F.binary_cross_entropy_with_logits(on(A), on(A), reduction="none"),
    "loss": lambda on: F.binary_cross_entropy_with_logits(on(A), on(A), pos_weight=on(A)[0]),
    "loss in half precision": lambda on: F.binary_cross_entropy_with_logits(on(HALF), on(HALF)),
    "squares": lambda on: F.mse_loss(on(HALF), on(HALF)),
    "repeated": lambda on: on(A).repeat(2, 1, 3),
    "sorted": lambda on: on(A).sort(-1),
    "dropout": lambda on: torch.native_dropout(on(A), 0.1, True),
    "many tensors at once": lambda on: torch._foreach_mul([on(A), on(A)], 2.0),
    "many tensors and numbers": lambda on: torch._foreach_add_([on(A), on(A)], [1.0, 2.0]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_kernel_after_another(call: Callable[[Any], Any]) -> None:
    def body(run: Any) -> None:
        for _ in run.steps(1):
            call(run.to_device)

    assert_agree_with_scratch(body)


def test_what_is_too_large_to_ask_about_is_left_out_by_name() -> None:
    with eb.trace(rules="cpu") as run:
        nn.Conv2d(64, 64, 3)(torch.zeros(8, 64, 512, 512))
    assert [name for name in run.left_out if name.startswith("convolution: ")]
    small = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert asked.left_out(torch.ops.aten.convolution.default)(*small) is None


def test_a_profiler_of_the_users_own_is_not_disturbed() -> None:
    with eb.trace(rules="cpu") as run, torch.autograd.profiler.profile() as profile:
        nn.Conv2d(3, 4, 3)(torch.zeros(2, 3, 8, 8))
    assert profile.function_events
    assert run.left_out


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "reflected": lambda: nn.ReflectionPad2d(1),
    "replicated": lambda: nn.ReplicationPad2d(1),
    "shuffled": lambda: nn.PixelShuffle(2),
    "unshuffled": lambda: nn.PixelUnshuffle(2),
    "channels shuffled": lambda: nn.ChannelShuffle(2),
    "gated": lambda: nn.GLU(1),
    "logarithm of a sigmoid": lambda: nn.LogSigmoid(),
    "groups": lambda: nn.GroupNorm(2, 8),
    "instances": lambda: nn.InstanceNorm2d(8),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_of_pictures_hands_on_its_layout(layer: Callable[[], nn.Module]) -> None:
    pictures = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), layer(), nn.AvgPool2d(2)).to(memory_format=torch.channels_last)

    assert_agree_with_scratch(_training(model, pictures))


def test_windows_are_rolled_in_two_dimensions_one_after_the_other() -> None:
    def body(run: Any) -> None:
        x = run.to_device(torch.randn(2, 8, 8, 16)).requires_grad_()
        for _ in run.steps(1):
            (x.roll((2, 2), (1, 2)) * 2).sum().backward()

    assert_agree_with_scratch(body)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, torch.tensor(1e-3), fused=True)


@pytest.mark.parametrize("optimizer", [_fused, lambda p: torch.optim.Adam(p, torch.tensor(1e-3))])
def test_a_learning_rate_that_is_a_tensor(optimizer: Any) -> None:
    assert_agree_with_scratch(_training(lambda: nn.Linear(8, 8), torch.randn(2, 8), optimizer))


def test_an_average_of_weights_is_told_the_device_of_its_groups() -> None:
    def body(run: Any) -> None:
        model = nn.Linear(8, 8)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in run.steps(3):
            average.update_parameters(model)

    assert_agree_with_scratch(body)
    with eb.trace(rules="cuda"):
        groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[torch.ones(2)]])
        assert [device.type for device, _ in groups] == ["cuda"]
