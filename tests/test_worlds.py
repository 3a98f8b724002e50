"""Programs whose memory hangs on values that no trace knows, and others that only look at such values."""

import json
import sys
import textwrap

import pytest
import torch
from in_order import InOrder

import everybyte as eb
from everybyte import trials
from everybyte.cli import main
from everybyte.forecast import UNSEEN, Forecast
from everybyte.script import Failed, Program
from everybyte.worlds import WORLDS, Answers

GPU = eb.gpus.find("a4000")
BIG = 2**28  # bytes

TRAIN = """\
import json, math, pickle, random, sys
from decimal import Decimal
import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

model = nn.Linear(64, 64).cuda()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
names, best, history, losses = [*"abcdefgh"], 1.0, [], torch.zeros(3)
x = torch.ones(8, 64, device="cuda")
for step in range(3):
    sgd.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    sgd.step()
{body}
"""


@pytest.fixture
def forecast(tmp_path, monkeypatch):
    """What the command would say of a script; other worlds are tried in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials.Trials, "__enter__", lambda self: vars(self).update(_pool=InOrder()) or self)
    monkeypatch.setattr(trials.Trials, "__exit__", lambda self, *_: None)

    def said(text, **options):
        (tmp_path / "train.py").write_text(text)
        return Forecast.of(Program("train.py", **options), GPU)

    return said


def training(body):
    return TRAIN.format(body=textwrap.indent(textwrap.dedent(body).strip(), "    "))


def line_of(text, code):
    return f"train.py:{next(i for i, line in enumerate(text.splitlines(), 1) if code in line)}"


LOST = {
    "math": "decided = math.exp(loss.item()) < 10",
    "float": "history.append(float(loss.item()))\ndecided = history[-1] < 0.01",
    "float of a tensor": "history.append(float(loss.detach()))\ndecided = history[-1] < 0.01",
    "signed text": "history.append(f'{loss.item():+.4f}')\ndecided = not sum(map(float, history)) < 0",
    "a sign": "decided = not str(loss.item()).startswith('-')",
    "text": "decided = float(f'{loss.item():.4f}') < 10",
    "json": "decided = json.loads(json.dumps({'loss': loss.item()}))['loss'] < 10",
    "pickle": "decided = pickle.loads(pickle.dumps(loss.item())) < 10",
    "complex": "decided = abs(complex(loss.item())) < 10",
    "Decimal": "decided = Decimal(loss.item()) < 10",
    "NumPy": "decided = np.mean([loss.item(), loss.item()]) < 10",
    "NumPy's own": "a = loss.detach().cpu().numpy()\ndecided = a.mean() < 10",
    "pandas": "decided = pd.Series([loss.item()]).mean() < 10",
    "a host tensor": "losses[step] = loss.item()\ndecided = losses.mean() < best",
    "a host tensor, from the device": "losses[step] = loss.detach()\ndecided = losses.mean().item() < best",
    "a host tensor, filled": "losses.fill_(loss.detach())\ndecided = losses.numpy().mean() < best",
    "a host tensor, at an index": "losses[torch.tensor([1])] = loss.detach()\ndecided = math.exp(losses[1]) < 10",
    "a host tensor, masked": "losses[losses < 9] = loss.detach()\ndecided = math.exp(losses[1]) < 10",
    "a host tensor, stacked": "decided = torch.tensor([loss.item()] * 2).mean() < best",
    "the device and back": "t = torch.tensor(loss.item(), device='cuda')\ndecided = t.item() < 10",
    "an index": "decided = names[out[0].argmax().item()] == 'a'",
    "the largest of an array": "a = out.detach().cpu().numpy()\ndecided = names[a[0, :2].argmax()] == 'a'",
    "a key": "decided = {0: True}.get(out[0].argmax().item(), False)",
    "the norm of gradients": "norm = float(clip_grad_norm_(model.parameters(), 1.0))\nhistory.append(norm)\n"
    "decided = max(history) <= 100",
    "ReduceLROnPlateau": "plateau.step(loss.item())\ndecided = sgd.param_groups[0]['lr'] > 0.05",
    "best so far": "history.append(loss.item())\ndecided = np.argmin(history) == step",
    "a time": "e = [torch.cuda.Event(enable_timing=True) for _ in 'ab']\ne[0].record(); e[1].record()\n"
    "decided = np.median([e[0].elapsed_time(e[1])]) < 10",
    "a tensor's text": "decided = 'tensor(0.' in str(loss.detach())",
    "a tensor's text, formatted": "history.append(f'{out.detach()}')\ndecided = history[-1].startswith('tensor([[0.')",
    "a scale": "scaler = torch.amp.GradScaler('cuda')\nscaler.scale((x @ model.weight).sum()).backward()\n"
    "scaler.step(sgd)\nscaler.update()\ndecided = scaler.get_scale() >= 65536",
    "two at once": "accuracy, error = map(float, out[0, :2].detach())\ndecided = not (accuracy > 0.9) or error > 0.6",
}


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("how", LOST)
def test_a_number_that_is_lost_and_decides_what_is_allocated_is_found(how, taken, forecast):
    negated = "" if taken else "not "
    text = training(
        f"{LOST[how]}\nif {negated}decided:\n    kept = torch.empty({BIG}, dtype=torch.uint8, device='cuda')"
    )
    found = forecast(text)
    assert found.verdict.word == "cannot say"
    assert {where[1] for where in found.worlds.parts.values()} == {line_of(text, "kept =")}
    peaks = [run["peak_allocated"] for run in (found.answer, *found.answer["worlds"])]
    assert BIG <= max(peaks) < 2 * BIG + 2**26
    where = line_of(text, "kept =") if not found.worlds.conditional else found.worlds.conditional[0]
    assert where in found.verdict.why and "with others" in found.verdict.why


@pytest.mark.parametrize(
    "decides",
    [
        "token in {3, 5}",
        "set(out.argmax(-1).tolist()) & {3}",
        "{token, 8} == {3, 8}",
        "(token, 1) in {(3, 1): 0}",
        "hash(token) == 3",
        "str(out.argmax(-1)) == 'tensor([3, 3, 3, 3, 3, 3, 3, 3])'",
    ],
)
def test_a_single_value_that_is_looked_for_is_not_taken_for_known(decides, forecast):
    text = training(f"token = out[0].argmax().item()\nif {decides}:\n    kept = torch.empty({BIG}, device='cuda')")
    found = forecast(text)
    assert found.verdict.word == "cannot say" and found.answer["conditional"]


def test_what_a_tensor_shows_is_what_it_would_on_a_gpu():
    with eb.trace(rules="cuda", gpu="a4000"):
        weight = torch.zeros(64, 64, requires_grad=True)
        unknown = torch.rand(64, 64)
        assert repr(torch.arange(3) + 1) == "tensor([1, 2, 3], device='cuda:0')"
        assert str(unknown.sum()) == f"{unknown.sum()!s}" == "tensor(0., device='cuda:0')"
        assert f"{unknown[0, :2].half()}" == "tensor([0., 0.], device='cuda:0', dtype=torch.float16)"
        assert str((weight @ unknown)[0, 0]) == "tensor(0., device='cuda:0', grad_fn=<SelectBackward0>)"
        assert str(unknown.detach().cpu()[0, :2]) == "tensor([0., 0.])"
        assert "..., " in str(unknown)
        assert "size=(3,)" in str(torch.zeros(3, device="meta"))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "body",
    [
        "print(f'{loss.item():.3f}', math.exp(loss.item()))",
        "history.append(math.exp(loss.item()))\nif min(history) == history[-1]: print('best')",
        "losses[step] = loss.item()\nbest = min(best, float(losses.mean()))",
        "if math.isnan(loss.detach().cpu().item()): kept = torch.empty(2**28, device='cuda')",
        "with torch.autograd.detect_anomaly(): model(x).mean().backward()\nprint(math.exp(loss.item()))",
        "json.dumps([loss.item()], indent=1)\nnumber = loss.item()\nif number != number: raise ValueError('NaN')",
        "print(loss, ''.join({9: 'a'}.get(i, '?') for i in out.argmax(-1).tolist()))",
        "scaler = torch.amp.GradScaler('cuda')\nbefore = scaler.get_scale()\nscaler.scale((x @ model.weight).sum())"
        ".backward()\nscaler.step(sgd)\nscaler.update()\nif scaler.get_scale() < before: print('skipped')",
        "if not torch.isfinite(loss): raise ValueError('diverged')",
        "import yaml; yaml.safe_dump({'loss': loss.item(), 'best': [out[0].argmax().item()]}); yaml.dump(loss.item())",
        "torch.save({'loss': loss.item(), 'n': out.argmax().item()}, 'a.pt'); torch.load('a.pt', weights_only=True)",
        "print('%.3f %d' % (loss.item(), out.argmax().item()), f'{loss.item():.2e} {out.argmax().item():,}')",
        "pd.DataFrame([{'loss': loss.item()}]).to_csv('log.csv'); np.savez('log.npz', loss=loss.item())",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
        "torch.zeros(8, device='cuda') if math.exp(loss.item()) < 3 else torch.ones(8, device='cuda')",
    ],
)
def test_what_decides_nothing_of_the_memory_leaves_the_verdict(body, forecast):
    found = forecast(training(body))
    assert (found.verdict.word, found.verdict.why) == ("fits", "")
    assert not {*found.answer["remarks"]} - {UNSEEN}
    assert not found.worlds.parts and found.is_sure


def test_a_program_that_asks_for_nothing_is_traced_once(forecast):
    assert forecast(training("history.append(loss.detach())")).worlds.others == ()


def test_a_way_that_is_named_says_what_the_other_one_takes(forecast):
    either = forecast(training("if loss.item() < 3: print('small')"))
    assert "train.py:20 a value" in either.verdict.why and either.verdict.word == "cannot say"
    assert either.verdict.why.endswith(
        f"either way it peaks at {eb.units.format_bytes(either.answer['peak_allocated'])}"
    )
    never = forecast(training("if 0.30 < loss.item() < 0.31: kept = torch.zeros(2**26, device='cuda')"))
    assert never.verdict.why.endswith("figures are of the way taken")
    other = forecast(training("if loss.item() > 3: kept = torch.zeros(2**26, device='cuda')"))
    assert "with others it peaks at 553," in other.verdict.why
    within = forecast(training("if math.exp(loss.item()) > 3:\n    if loss.item() > 5: print('large')"))
    assert within.answer["conditional"] == ["train.py:21"]  # in another world alone


LIBRARY = """
import torch

kept = []

def log(loss):
    if loss.item() < 3: print("small")

def keep(loss, best=[float("inf")]):
    if loss < best[0]: best[0] = loss

def stops(loss, best=[float("inf")]):
    best[0] = min(best[0], loss)
    return best[0] < loss

def hoard(loss):
    if loss > 3: kept.append(torch.zeros(2**26, device="cuda"))

def compare(loss):
    if abs(loss - 0.305) < 0.005: pass

def size(loss):
    torch.zeros(int(loss) + 1, device="cuda")

def check(loss):
    if loss > 3: raise ValueError("diverged")
"""


@pytest.fixture
def with_library(forecast, tmp_path, monkeypatch):
    """`forecast` of a loop that gives its loss to an installed library."""
    packages = tmp_path / "env" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "watcher.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(packages))
    yield lambda body: forecast(training(f"import watcher\n{body}"))
    sys.modules.pop("watcher", None)


def test_a_way_that_a_library_takes_leaves_the_verdict_if_the_other_one_takes_as_much(with_library):
    either = with_library("watcher.log(loss)")
    peak = eb.units.format_bytes(either.answer["peak_allocated"])
    (said,) = either.answer["remarks"]
    assert said.endswith(f"watcher.py:7: a value that no trace knows decides the way; either way it peaks at {peak}")
    assert (either.verdict.word, either.is_sure) == ("fits", True)
    # Early stopping and the like keep the best loss: 512 bytes in which the ways differ.
    best = with_library("watcher.keep(loss.detach())")
    assert best.verdict.word == "fits" and best.worlds.parts and best.is_sure
    assert len(best.worlds.settled) == 1
    # PyTorch's own comparisons are a library's, too.
    plateau = "if step == 0: plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)\nplateau.step(loss)"
    assert with_library(plateau).verdict.word == "fits"


def test_the_user_s_own_branch_leaves_no_verdict_beside_a_library_s(with_library):
    stopped = with_library("if watcher.stops(loss.item()): break")
    assert stopped.verdict.word == "fits" and any("end" in seen.ended for seen in stopped.worlds.others)
    own = with_library("watcher.keep(loss.detach())\nif loss.item() < 3: print('small')")
    assert own.verdict.word == "cannot say" and "train.py:22 a value" in own.verdict.why


@pytest.mark.parametrize(
    "body",
    [
        "watcher.hoard(loss.item())",  # a hundred such would not fit
        "watcher.compare(loss.item())",  # never so
        "watcher.size(loss.item())",  # which size it is, two answers do not say
        "watcher.check(loss.item())",  # what comes after that way is not known
    ],
)
def test_a_way_that_is_named_leaves_no_verdict_where_the_other_one_is_not_known_to_be_alike(body, with_library):
    found = with_library(body)
    assert found.verdict.word == "cannot say" and found.worlds.settled == frozenset()


def test_a_world_that_the_program_does_not_bear_is_compared_up_to_there(forecast):
    diverging = training(
        "if math.exp(loss.item()) > 1e4: raise ValueError('diverged')\nlate = torch.zeros(8, device='cuda')"
    )
    found = forecast(diverging)
    assert found.verdict.word == "fits"
    assert [(seen.world, seen.ended != "") for seen in found.worlds.others] == [
        *(("large", False), ("falling", True), ("mixed", True), ("negative", True), ("rising", False))
    ]
    before = "kept = [torch.zeros(2**26, device='cuda')] if math.sqrt(loss.item()) > 3 else []\n"
    assert "from train.py:20 on" in forecast(diverging.replace("    if math", f"    {before}    if math")).verdict.why
    # A large number does not suit the program; a smaller one shows what hangs on it.
    gentler = training("if math.exp(loss.item()) > 1e4: kept = torch.zeros(2**26, device='cuda')")
    assert [seen.world for seen in forecast(gentler).worlds.others] == [
        "large",
        "falling",
        "mixed",
        "negative",
        "rising",
    ]
    assert "from train.py:20 on" in forecast(gentler).verdict.why


def test_where_every_other_value_ends_the_program_nothing_is_sure(forecast):
    found = forecast(training("['only'][out[0].argmax().item()]\nkept = torch.zeros(8, device='cuda')"))
    assert "with other values it fails: train.py:20: IndexError: list index out of range" in found.verdict.why
    assert "nobody knows what would come then" in found.verdict.why
    # One that goes on is enough.
    assert forecast(training("if math.sqrt(loss.item()) > 1: raise ValueError('diverged')")).verdict.word == "fits"


@pytest.mark.parametrize(
    ("code", "cannot_say"),
    [
        ("math.log(loss.item())", True),
        ("assert math.exp(loss.item()) > 1.5", True),
        ("np.random.choice(64, p=out.detach().softmax(1)[0].cpu().numpy())", True),
        ("np.from_dlpack(loss.detach().cpu())", True),
        ("loss.detach().cpu().untyped_storage().tolist()", True),
        ("{float: str}[type(loss.item())]", True),
        ("if str(loss.item())[0] == '0': raise RuntimeError('is zero')", True),
        ("if type(loss.item()) is not float: raise TypeError('not a number')", True),
        ("print(loss.item(), there_is_none)", False),
        ("print(loss.item()); model(out.flatten())", False),
        ("print(loss.item()); model.load_state_dict({})", False),
        ("print(loss.item()); [].there_is_none", False),
        ("int('x')", False),
    ],
)
def test_a_failure_for_want_of_a_value_is_no_error_of_the_user_s(code, cannot_say, forecast):
    with pytest.raises(Failed, match=r"train\.py:20: |mtrand\.pyx") as failed:
        forecast(training(code))
    assert failed.value.cannot_say == cannot_say


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("kept = out[out > 0]", "with other values it comes to what cannot be traced: train.py:21: the result of"),
        ("torch.compile(model)", "with other values it comes to what cannot be traced: train.py:21: torch.compile is"),
        ("while True: pass", "with other values it does not end within 2 seconds"),
    ],
)
def test_where_no_trace_can_follow_the_other_way_nothing_is_sure(code, why, forecast, monkeypatch):
    monkeypatch.setattr("everybyte.forecast.PATIENCE", 2)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    found = forecast(training(f"if math.sqrt(loss.item()) > 3:\n    {code}"))
    assert found.verdict.word == "cannot say" and why in found.verdict.why


GENERATES = """\
tokens = torch.zeros(2, 1, dtype=torch.long, device="cuda")
unfinished = torch.ones(2, dtype=torch.long, device="cuda")
with torch.no_grad():
    while True:
        token = (x[:2] @ model.weight).argmax(-1)
        tokens = torch.cat([tokens, token[:, None]], 1)
        stops = torch.isin(token, torch.tensor([3], device="cuda"))
        stops = stops | torch.full((2,), tokens.shape[1] >= {most}, device="cuda")
        unfinished = unfinished & ~stops
        if unfinished.max() == 0:
            break
print(tokens.shape[1])
"""


def test_a_loop_whose_bound_is_known_ends_there(forecast, capsys):
    found = forecast(training(GENERATES.format(most=9)))
    lengths = capsys.readouterr().out.split()
    assert lengths[:3] == ["9"] * 3 and min(lengths[3:]) == "2"  # with other answers its first token ends it
    assert found.answer["conditional"] == [line_of(training(GENERATES), "if unfinished")]


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (GENERATES.format(most="10**9"), "if unfinished"),
        (
            "done = False\nwhile not done: done = loss.isnan().logical_not() & ((x @ model.weight).max() > 3)",
            "while not",
        ),
        ("history = [1.0]\nwhile min(history) > 1e-9: history.append((x @ model.weight).mean().item())", "while min"),
        ("while math.exp((x @ model.weight).mean().item()) < 2: x = x * 2", "while math"),
        ("def goes_on(): return (x @ model.weight).mean().item() < 1\nwhile goes_on(): x = x * 2", "def goes_on"),
    ],
)
def test_a_loop_that_waits_for_a_value_ends(loop, line, forecast, monkeypatch):
    monkeypatch.setattr("everybyte.worlds.PATIENT", 32)
    text = training(loop)
    found = forecast(text)
    assert (found.verdict.word, found.answer["ended"]) == ("cannot say", "the script's end")
    assert line_of(text, line) in found.verdict.why


def test_where_a_loop_never_ends_nothing_is_sure(forecast, monkeypatch):
    monkeypatch.setattr(sys.modules["everybyte.trace"], "ENDLESS", 1100)
    text = training("while True:\n    try:\n        while loss.item() != 0.3: pass\n    except: pass")
    with pytest.raises(Failed, match=r"^train\.py:22: a loop has asked 1,10. times for a value") as failed:
        forecast(text)
    assert failed.value.cannot_say


DRAWS = "n = int(np.random.default_rng().integers(2**20, 2**24))\nkept = torch.zeros(n, device='cuda')\n"


def test_where_two_runs_do_not_allocate_alike_values_are_not_blamed(forecast):
    text = training(f"{DRAWS}print(math.exp(loss.item()))")
    found = forecast(text)
    assert found.verdict.word == "fits" and not found.worlds.parts
    assert f"{line_of(text, 'kept =')}: from here on two runs" in found.answer["remarks"][0]
    # What parts before that hangs on values; and where some of the runs fit and others do not, nothing is sure.
    early = training(f"if math.sqrt(loss.item()) > 3: early = torch.zeros(8, device='cuda')\n{DRAWS}")
    assert f"from {line_of(early, 'early =')} on" in forecast(early).verdict.why
    late = training(f"{DRAWS}if math.sqrt(loss.item()) > 3: late = torch.zeros(2**33, device='cuda')\n")
    assert "and of some the verdict is does not fit and of others fits" in forecast(late).verdict.why


@pytest.mark.parametrize(
    "draw", ["random.randrange", "np.random.randint", "lambda a, b: torch.randint(a, b, ()).item()"]
)
def test_what_is_drawn_at_random_is_the_same_in_all_worlds_and_goes_on_after_them(draw, forecast):
    text = training(f"n = ({draw})(2**10, 2**20)\nkept = torch.zeros(n, device='cuda')\nprint(math.exp(loss.item()))")
    torch.manual_seed(5)
    first = torch.rand(())
    torch.manual_seed(5)
    assert (found := forecast(text)).verdict.word == "fits" and found.answer["remarks"] == []
    assert torch.rand(()) == first


NANOGPT = """\
import math, torch
from torch import nn

model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)).to("cuda")
adam = torch.optim.AdamW(model.parameters())
best, always_save = 1e9, False

def batch():
    tokens = torch.randint(256, (4, 17))
    return tokens[:, :-1].to("cuda"), tokens[:, 1:].to("cuda")

def loss_of(x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

@torch.no_grad()
def estimate_loss():
    out = {{}}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(4)
        for k in range(4):
            losses[k] = loss_of(*batch()).item()
        out[split] = losses.mean()
    model.train()
    return out

for step in range(3):
    losses = estimate_loss()
    print(f"step {{step}}: train loss {{losses['train']:.4f}}, val loss {{losses['val']:.4f}}")
    if losses["val"] < best or always_save:
        best = losses["val"]
        {best}
    loss = loss_of(*batch())
    loss.backward()
    adam.step()
    adam.zero_grad(set_to_none=True)
    print(f"{{loss.item():.4f}}, {{math.exp(loss.item()):.1f}}")
"""


def test_evaluation_as_nanogpt_does_it(forecast):
    host = NANOGPT.format(best="torch.save({'model': model.state_dict(), 'best': best}, 'ckpt.pt')")
    assert forecast(host).verdict.word == "fits"
    device = NANOGPT.format(best="kept = {k: v.clone() for k, v in model.state_dict().items()}")
    assert f"from {line_of(device, 'kept =')} on" in forecast(device).verdict.why


def test_a_function_is_tried_in_other_worlds_as_a_script_is(forecast, tmp_path):
    (tmp_path / "work.py").write_text(
        "import math, torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(64, 64).cuda()\n"
        "    def step():\n"
        "        loss = model(torch.ones(8, 64, device='cuda')).mean()\n"
        "        if math.exp(loss.item()) > 10: return torch.zeros(2**26, device='cuda')\n"
        "    return step\n"
    )
    assert "from work.py:6 on" in Forecast.of(Program("work.py:build"), GPU).verdict.why


def test_the_command_asks_other_worlds_in_processes_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    text = "import os; os.chdir('elsewhere'); " + training(
        "if np.mean([loss.item()]) > 3:\n    kept = torch.zeros(2**26, device='cuda')"
    )
    (tmp_path / "train.py").write_text(text)
    assert main(["trace", "--quick", "--gpu", "a4000", "--json", "train.py"]) == 3
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [(run["answers"], run["parts_at"]) for run in answer["worlds"]] == [
        *(("large", "train.py:21"), ("falling", None), ("mixed", None), ("negative", None))
    ]
    added = answer["worlds"][0]["peak_allocated"] - answer["peak_allocated"]  # in the third step, and still the second
    assert 2**29 - 2**20 < added <= 2**29
    assert err.splitlines()[-1].startswith(
        "everybyte: cannot say whether it fits: the values that no trace knows decide"
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "complex64",
        *("bool", "uint8", "int8", "int64", "uint64"),
    ],
)
def test_every_kind_of_tensor_gets_an_answer(world, dtype):
    dtype = getattr(torch, dtype)
    answers = Answers(WORLDS[world])
    for shape in ((), (0,), (1, 1), (2, 3)):
        filled = answers.fill(torch.zeros(shape, dtype=dtype))
        assert filled.to(torch.complex128 if dtype.is_complex else torch.float64).isfinite().all()
    transposed = torch.zeros(3, 2, dtype=dtype).t()
    assert answers.fill(transposed) is transposed
    assert answers.asked == 5


def test_answers_rise_fall_and_change():
    large, falling, mixed = (Answers(WORLDS[world]) for world in ("large", "falling", "mixed"))
    rising = [large.number() for _ in range(100)]
    assert rising == sorted(set(rising))
    assert [falling.number() for _ in range(3)] == [1 / 2, 1 / 3, 1 / 4]
    # t_n of Thue and Morse is 0 1 1 0 1 0 0 1 (OEIS A010060).
    assert [mixed.number() > 1 for _ in range(8)] == [True, False, False, True, False, True, True, False]
