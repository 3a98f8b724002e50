"""Another author's model of 3.4 billion parameters, recorded on a Hopper GPU by an older PyTorch, against its trace.

It is written from the recordings' notes and the lines they name. What differs from the plain model of the other
recordings: a norm by `linalg.vector_norm`, rotation into a tensor made first, a mask for every head, an optimizer that
writes in place, and products with the weight on the left, which PyTorch's `einsum` has reordered since.
"""

import math
from difflib import SequenceMatcher

import torch
from torch import nn

import everybyte as eb
from everybyte.models.lm import LMConfig

BATCH = 4
CONFIG = LMConfig(context=128, hidden=2560, layers=32, heads=32, d_ff=10_240)


class Linear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x):
        columns = x.flatten(0, -2).t()
        out = torch.bmm(self.weight[None], columns[None]).squeeze(0)
        return out.t().unflatten(0, x.shape[:-1])


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONFIG.hidden))

    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = torch.sqrt(norm**2 / CONFIG.hidden + 1e-5)
        return x / rms * self.weight


def rotated(x, cos, sin):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def softmax(x):
    highest = torch.max(x, -1, keepdim=True).values
    e = torch.exp(x - highest)
    return e / e.sum(-1, keepdim=True)


def attend(q, k, v, mask):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, -math.inf)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(CONFIG.hidden, CONFIG.hidden) for _ in range(4))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        products = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (CONFIG.heads, -1)).transpose(1, 2) for t in products)
        places = torch.arange(s).expand(b, s)
        q, k = (rotated(t, cos[places].unsqueeze(1), sin[places].unsqueeze(1)) for t in (q, k))
        mask = torch.tril(torch.ones(s, s)).bool()
        mask = mask.clone().expand(b, CONFIG.heads, s, s)
        return self.out(attend(q, k, v, mask).transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        h, d_ff = CONFIG.hidden, CONFIG.d_ff
        self.w1, self.w2, self.w3 = Linear(h, d_ff), Linear(d_ff, h), Linear(h, d_ff)

    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        return self.w2(gate * torch.sigmoid(gate) * up)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RMSNorm(), Attention()
        self.norm2, self.feed_forward = RMSNorm(), FeedForward()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(CONFIG.vocabulary, CONFIG.hidden))
        self.blocks = nn.ModuleList(Block() for _ in range(CONFIG.layers))
        self.norm, self.head = RMSNorm(), Linear(CONFIG.hidden, CONFIG.vocabulary)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(CONFIG.context, CONFIG.hidden // CONFIG.heads // 2))

    def forward(self, tokens):
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def cross_entropy(logits, targets):
    logits, targets = logits.flatten(0, -2), targets.flatten()
    x = logits - torch.max(logits, -1, keepdim=True).values
    total = torch.exp(x).sum(-1)
    of_targets = x[torch.arange(len(x), device="cpu"), targets]
    return (torch.log(total) - of_targets).mean()


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            m = state["m"] = torch.zeros_like(p)
            v = state["v"] = torch.zeros_like(p)
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            denominator = v.sqrt() + 1e-8
            p.addcdiv_(m, denominator, value=-1e-3)
            p.mul_(1 - 1e-4)


def traced(step):
    """Rows of the first step with the workspaces of the products, on a GPU of the recorded kind."""
    with eb.trace(rules="cuda", gpu="h100-80gb") as run:
        model = LM()
        optimizer = AdamW(model.parameters())
        tokens, targets = (torch.empty(BATCH, CONFIG.context, dtype=torch.int64) for _ in range(2))
        for _ in run.steps(1):
            logits = model(tokens)
            if step:
                loss = cross_entropy(logits, targets)
                loss.backward()
                optimizer.step()
    frame = run.timeline.with_workspaces().frame().query("step == 0")
    return frame["nbytes"].where(frame["action"] == "alloc", -frame["nbytes"]).tolist()


def peak(events):
    live = highest = 0
    for size in events:
        live += math.copysign(-(-abs(size) // 512) * 512, size)
        highest = max(highest, live)
    return highest


def differences(recorded, made):
    recorded, made = ([size for size in events if size > 0] for events in (recorded, made))
    matcher = SequenceMatcher(None, recorded, made, autojunk=False)
    return [(recorded[i:j], made[k:n]) for tag, i, j, k, n in matcher.get_opcodes() if tag != "equal"]


def test_a_forward_pass_of_3_4_billion_parameters_is_there_allocation_by_allocation(recorded_events):
    recorded, made = recorded_events("lm-2.7b-ctx128-forward-fp32"), traced(step=False)
    assert sum(size > 0 for size in recorded) == 2058
    assert differences(recorded, made) == []
    assert peak(made) == peak(recorded) == 19_498_420_224 - 13_774_469_120


def test_its_first_training_step_differs_only_in_an_index_from_the_host(recorded_events):
    recorded, made = recorded_events("lm-2.7b-ctx128-train-fp32"), traced(step=True)
    assert sum(size > 0 for size in recorded) == 6771
    index = BATCH * CONFIG.context * 8  # the loss picks targets by a range that lies on the host:
    copied, wrapped = ([index], []), ([], [index])  # it is copied to the GPU to read, and wrapped there before writing
    assert differences(recorded, made) == [copied, wrapped]
    assert peak(made) == peak(recorded) == 55_078_640_128 - 13_904_525_312
