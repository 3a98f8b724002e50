"""Random training programs, really run and traced: equal, allocation by allocation.

The same as `tests/fuzz_programs.py` does by the thousand, for a few. Those that differed once are kept: each is what
was left of a program when all lines were taken out that it needs not.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from random_programs import LIBRARIES, outcome, programs, warm

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_program_is_traced_as_it_is_measured(text: str) -> None:
    found = outcome(text)
    assume(found.ran and not found.explained)
    assert not found.difference, f"{found.difference}\n\n{LIBRARIES}import numpy as np\n\n{text}"


COUNTEREXAMPLES = {
    "the value is made a tensor before a list of positions is": """
def train(run):
    v = run.to_device(np.ones((2, 4), "float32"))
    for step in run.steps(2):
        v[..., [1, 0]] = -1
""",
    "a tensor of zeros takes no memory, and its sum is a copy": """
def train(run):
    p = nn.Parameter(torch.randn(2, 3))
    x = p.sin()
    values, _ = x.max(1)
    loss = values.pow(2).mean() + 0.1 * x.abs().mean()
    (grad,) = torch.autograd.grad(loss, [p], create_graph=True)
    (loss + grad.pow(2).sum()).backward()
""",
    "zeros are added to a contribution where it lies": """
def train(run):
    p = nn.Parameter(torch.randn(3))
    x = torch.maximum(F.tanhshrink(p), p)
    loss = x.std() + 0.1 * p.unflatten(-1, (1, -1)).abs().mean()
    loss.backward(create_graph=True)
    p.grad.pow(2).sum().backward()
""",
    "a sum with zeros may have a number in it": """
def train(run):
    p = nn.Parameter(torch.randn(2, 3))
    x = torch.hstack((p, p))
    loss = x.std() + 0.1 * F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean").abs().mean()
    loss.backward(create_graph=True)
    p.grad.pow(2).sum().backward()
""",
    "for a second backward pass a loss's gradient is made out of place": """
def train(run):
    v = run.to_device(np.ones((4,), "float32"))
    p = nn.Parameter(torch.randn(4))
    loss = F.binary_cross_entropy_with_logits(p.sin(), v)
    (grad,) = torch.autograd.grad(loss, [p], create_graph=True)
    (loss + grad.pow(2).sum()).backward()
""",
    "the gradient of a loss's target is made out of place": """
def train(run):
    p = nn.Parameter(torch.randn(3))
    x = p.sin()
    F.binary_cross_entropy_with_logits(x, x.sigmoid()).backward()
""",
    "a gradient that is retained is added to out of place": """
def train(run):
    p = nn.Parameter(torch.randn(3))
    x = p.sin()
    x.retain_grad()
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
""",
    "what is scattered into a view copies all that lies behind it": """
def train(run):
    p = nn.Parameter(torch.randn(4, 4))
    x = torch.ones(3, 4).select_scatter(p.select(0, 0), 0, 0)
    y = p[1:].select_scatter(p.select(0, 0), 0, 0)
    z = p[:1].expand(2, 4).slice_scatter(p[:1], 0, 0, 1)
    (x.sum() + y.sum() + z.sum()).backward()
""",
    "a range keeps the shape of the tensor that it is written to": """
def train(run):
    p = nn.Parameter(torch.randn(4, 1))
    x = torch.zeros(4, 1)
    torch.linspace(0, 1, 4, out=x)
    (p * x @ x.mT).sum().backward()
""",
    "a softmax may be written to a tensor on every device": """
def train(run):
    v = run.to_device(np.ones((2, 3), "float64"))
    torch.softmax(v, -1, out=v)
""",
}
"""What each showed -> the program."""


@pytest.mark.parametrize("text", COUNTEREXAMPLES.values(), ids=COUNTEREXAMPLES)
def test_a_program_that_once_differed_is_traced_as_it_is_measured(text: str) -> None:
    found = outcome(text)
    assert found.ran
    assert not found.explained
    assert not found.difference
