"""The plain language model computes what its parts are named after."""

import pytest
import torch
from torch.nn import functional as F

from everybyte.models.lm import LM, AdamW, LMConfig, RMSNorm, cross_entropy, learn, softmax

SMALL = LMConfig(context=6, vocabulary=11, hidden=8, layers=2, heads=2, d_ff=12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LM(SMALL)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    angle = torch.rand(model.cos.shape)
    model.cos.copy_(angle.cos())
    model.sin.copy_(angle.sin())
    return model


def test_softmax_and_the_loss_and_the_norm_are_the_usual_ones():
    x, targets = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    torch.testing.assert_close(softmax(x), F.softmax(x, -1))
    torch.testing.assert_close(cross_entropy(x, targets), F.cross_entropy(x.flatten(0, 1), targets.flatten()))
    norm = RMSNorm(11)
    torch.nn.init.ones_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (11,), eps=1e-5))


def test_a_token_changes_no_logits_before_it(model):
    tokens = torch.randint(11, (1, 6))
    other = tokens.clone()
    other[0, 3] = (tokens[0, 3] + 1) % 11
    differs = (model(tokens) != model(other)).any(-1)[0]
    assert differs.tolist() == [False] * 3 + [True] * 3


def test_training_it_lowers_the_loss(model):
    optimizer, tokens = AdamW(model.parameters(), lr=1e-2), torch.randint(11, (4, 6))
    targets = tokens.roll(-1, 1)
    before = cross_entropy(model(tokens), targets).item()
    for _ in range(60):
        learn(model, optimizer, tokens, targets)
    assert cross_entropy(model(tokens), targets).item() < before / 2
