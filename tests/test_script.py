"""Programs that know nothing of tracing, run unedited: scripts of the plain kind, and under the frameworks people use.

Each run of a framework has a process of its own, as on the command line: frameworks remember the device they found.
It is forked from a server that has imported them and run nothing, not from this process, where other tests ran them.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everybyte import gpus
from everybyte.forecast import Forecast
from everybyte.script import Failed, Program

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SCRIPTS = Path(__file__).parent / "scripts"
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert")]
TRAINER = ["accelerate", "transformers.trainer", *MODELS]
CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(["everybyte.script", *TRAINER, "peft", "lightning", "pytorch_forecasting"])


# -- the same script, traced and really run ----------------------------------------------------------------------------


def _run(program, how, answers):
    ran = getattr(program, how)(**({"rules": "cpu"} if how == "trace" else {}))
    timeline, scratch = ran.run.timeline, ran.run.timeline.without("scratch")
    found = {
        "peak": scratch.peak_bytes,
        "above the start": scratch.peak_above_start,
        "sizes": dict(scratch.allocations(1)),
        "steps": timeline.info["steps"],
        "ended": ran.ended,
    }
    answers.put((found, getattr(ran.run, "conditional", []), sorted(getattr(ran.run, "not_covered", []))))


def in_a_process_of_its_own(program, *work, needs=()):
    """What `work[0]` puts into the queue that it is given last, of a script that needs these modules."""
    for package in {module.split(".")[0] for module in needs}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the script needs {package}: pip install {package.replace('_', '-')}")
    answers = CLEAN.Queue()
    child = CLEAN.Process(target=work[0], args=(program, *work[1:], answers))
    child.start()
    try:
        return answers.get(timeout=300)
    finally:
        child.kill()
        child.join()


def outcome(program, how, needs):
    found, conditional, not_covered = in_a_process_of_its_own(program, _run, how, needs=needs)
    assert not conditional and not not_covered
    return found


def assert_traced_as_measured(tmp_path, script, *arguments, steps=3, needs=()):
    if needs:
        arguments = (*arguments, "--out", str(tmp_path))
    program = Program(str(SCRIPTS / script), arguments, steps=steps)
    traced, measured = (outcome(program, how, needs) for how in ("trace", "measure"))
    assert traced == measured
    assert traced["steps"] == steps
    return traced


def test_a_plain_loop_allocates_what_it_really_does(tmp_path):
    assert_traced_as_measured(tmp_path, "plain.py")


@pytest.mark.parametrize(
    "options",
    [
        "--mask ones --bf16",
        "--mask padded --bf16 --checkpointing",
        "--mask ones --checkpointing --accumulate 2 --evaluate",
        "--model bert --mask padded --evaluate",
    ],
)
def test_hugging_face_s_trainer_allocates_what_it_really_does(tmp_path, options):
    assert_traced_as_measured(tmp_path, "with_trainer.py", *options.split(), needs=TRAINER)


@pytest.mark.parametrize("options", ["--mask padded --bf16", "--model bert --mask ones --checkpointing"])
def test_lora_by_peft_allocates_what_it_really_does(tmp_path, options):
    needs = [*TRAINER, "peft"]
    assert_traced_as_measured(tmp_path, "with_trainer.py", *options.split(), "--lora", needs=needs)


def test_a_loop_under_accelerate_allocates_what_it_really_does(tmp_path):
    assert_traced_as_measured(tmp_path, "with_accelerate.py", needs=["accelerate"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_s_trainer_allocates_what_it_really_does(tmp_path, precision):
    assert_traced_as_measured(tmp_path, "with_lightning.py", "--precision", precision, needs=["lightning"])


def test_pytorch_forecasting_allocates_what_it_really_does(tmp_path):
    assert_traced_as_measured(tmp_path, "with_forecasting.py", "--predict", needs=["pytorch_forecasting"])


MAIN = """
import sys, torch
from torch import nn

def main():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("end", ["main()", "main(); sys.exit(0)", textwrap.dedent(MAIN.partition("main():\n")[2])])
def test_what_a_script_gives_back_as_it_ends_is_no_step_s(tmp_path, end):
    (tmp_path / "train.py").write_text(MAIN + end)
    ran = Program(str(tmp_path / "train.py"), steps=9).trace("t4")
    rows = ran.run.timeline.growth_per_step()
    assert ran.ended == "the script's end"
    assert rows.index.tolist() == [0, 1, 2, 3]
    batch = 8 * 64 * 4  # the next one, which the last step does not bring
    assert rows["growth"][1:].tolist() == [0, 0, -batch]


def test_lightning_takes_the_model_off_the_gpu_after_the_last_step(tmp_path):
    program = Program(str(SCRIPTS / "with_lightning.py"), ("--out", str(tmp_path)), steps=20)
    rows = in_a_process_of_its_own(program, _growth, needs=["lightning"])
    weights = (48 * 64 + 64) + (64 * 3 + 3) + (3 * 64 + 64) + (64 * 48 + 48)
    assert len(rows) == 8 and rows[-1]["end"] >= 3 * 4 * weights  # with Adam's two moments


def _growth(program, answers):
    answers.put(program.trace("t4").run.timeline.growth_per_step().to_dict("records"))


def test_a_module_is_traced_as_python_s_own_m_runs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("size = 1000\n")
    (tmp_path / "pkg" / "train.py").write_text(
        "import sys, torch\nfrom . import size\n"
        "assert (__name__, sys.argv) == ('__main__', [__file__, '--wide']), (__name__, sys.argv)\n"
        "x = torch.ones(size, device='cuda')\n"
    )
    ran = Program("-m pkg.train", ("--wide",)).trace("t4")
    (made,) = ran.run.timeline.frame().query("action == 'alloc'").to_dict("records")
    assert (made["nbytes"], made["line"]) == (4000, "pkg/train.py:4")
    with pytest.raises(Failed, match="No module named not_there: run in the folder"):
        Program("-m not_there").trace("t4")


# -- whose line it is --------------------------------------------------------------------------------------------------


def _lines(program, answers):
    frame = program.trace("t4").run.timeline.frame().query("action == 'alloc' and step >= 0")
    rows = frame.astype({"phase": str, "line": str, "own": str})[["phase", "nbytes", "line", "own"]]
    answers.put(rows.groupby(["phase", "line", "own"])["nbytes"].max().reset_index().to_dict("records"))


@pytest.mark.parametrize(
    "script, options, needs, made_at, led_by",
    [
        ("plain.py", "", [], "plain.py:", "self.layers(x)"),
        ("with_trainer.py", "--mask ones", TRAINER, "transformers/", "trainer.train()"),
        ("with_trainer.py", "--mask ones --checkpointing", TRAINER, "transformers/", "trainer.train()"),
        ("with_accelerate.py", "", ["accelerate"], "with_accelerate.py:", "model(x)"),
        ("with_lightning.py", "", ["lightning"], "with_lightning.py:", "self.encoder(x)"),
        ("with_forecasting.py", "", ["pytorch_forecasting"], "pytorch_forecasting/", "trainer.fit("),
    ],
)
def test_what_a_backward_pass_makes_is_told_by_the_model_s_line_and_the_user_s(
    tmp_path, script, options, needs, made_at, led_by
):
    arguments = (*options.split(), *(["--out", str(tmp_path)] if needs else []))
    rows = in_a_process_of_its_own(Program(str(SCRIPTS / script), arguments), _lines, needs=needs)
    source = (SCRIPTS / script).read_text().splitlines()
    backward = [row for row in rows if row["phase"] == "backward"]
    most = max(row["nbytes"] for row in backward)
    for row in (row for row in backward if row["nbytes"] > most // 4):
        assert made_at in row["line"]
        assert led_by in source[int(row["own"].rpartition(":")[2]) - 1]
    assert all(row["own"].rpartition(":")[0].endswith(script) for row in rows)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_a_script_takes_the_gpu_s_way_and_workers_change_nothing():
    alone = Program(str(SCRIPTS / "plain.py")).trace("t4").run
    helped = Program(str(SCRIPTS / "plain.py"), ("--workers", "2")).trace("t4").run
    assert alone.timeline.table.equals(helped.timeline.table)
    frame = alone.timeline.frame()
    assert set(frame["device"]) == {"cuda:0"} and "float16" in set(frame["dtype"])
    # Weights, their gradients and two moments in fp32, and nothing of what the script keeps on the host.
    hidden = 96
    parameters = (32 + 1) * hidden + 2 * hidden + (hidden + 1) * hidden + (hidden + 1) * 2
    live = alone.timeline.by("category")["nbytes"]
    assert live["parameter"] == live["gradient"] == 4 * parameters
    assert live["optimizer state"] == 2 * 4 * parameters


# -- how a script runs, and where it ends ------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(text, *arguments, **options):
        (tmp_path / "train.py").write_text(text)
        return Program("train.py", arguments, **options)

    return written


LOOP = """
import sys, torch
from torch import nn
model = nn.Linear(100, 100, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(100):
    optimizer.zero_grad()
    model(torch.ones(2, 100).cuda()).sum().backward()
    optimizer.step()
    kept = torch.zeros(1000 * (step + 1), dtype=torch.uint8, device="cuda")
"""


def test_a_script_is_main_and_sees_its_arguments_and_what_lies_beside_it(script, tmp_path):
    (tmp_path / "beside.py").write_text("nbytes = 12")
    ran = script(
        "import sys, torch, beside\n"
        "class Here: pass\n"
        "assert __name__ == '__main__' and __file__ == sys.argv[0] == 'train.py'\n"
        "assert sys.modules['__main__'].Here is Here\n"
        "x = torch.zeros(int(sys.argv[1]) + beside.nbytes, dtype=torch.uint8, device='cuda')\n"
        "sys.exit()\n",
        "30",
    ).trace()
    assert (ran.ended, ran.run.timeline.peak_bytes, ran.run.timeline.info["steps"]) == ("the script's end", 42, 0)
    assert sys.argv[0] != "train.py" and sys.modules["__main__"].__name__ == "__main__"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_script_ends_after_its_steps_with_what_the_loop_does_between_them(script, steps):
    ran = script(LOOP, steps=steps).trace()
    assert ran.ended == f"{steps} step{'s' * (steps > 1)}"
    frame = ran.run.timeline.frame()
    kept = frame[(frame["dtype"] == "uint8") & (frame["action"] == "alloc")]
    assert kept["nbytes"].tolist() == [1000 * (step + 1) for step in range(steps)]
    assert kept["step"].tolist() == list(range(steps))
    assert ran.run.timeline.info["steps"] == steps
    assert sorted(ran.run.marks) == list(range(steps + 1))
    # Where step 0 begins there are the weights and the first batch.
    assert ran.run.timeline.start_bytes == 4 * 100 * 100 + 4 * 200
    # What is given back as the script unwinds is no part of its last step; there `kept` has grown by 1000.
    assert steps == 1 or ran.run.timeline.growth_per_step()["growth"].iloc[-1] == 1000


def test_a_script_shorter_than_that_ends_itself(script):
    ran = script(LOOP.replace("range(100)", "range(2)"), steps=5).trace()
    assert (ran.ended, ran.run.timeline.info["steps"]) == ("the script's end", 2)


@pytest.mark.parametrize("caught", ["except Exception:", "except:", "except BaseException as error:"])
def test_whatever_handles_errors_does_not_stop_a_script_from_ending(caught, script):
    before = sys.gettrace()
    ran = script(
        LOOP.replace("range(100)", "range(10**9)")
        .replace("    model(", "    try:\n        loss = model(")
        .replace("sum().backward()", f"sum()\n    {caught}\n        continue\n    loss.backward()")
    ).trace()
    assert ran.ended == "3 steps"
    assert sys.gettrace() is before


def test_steps_are_those_of_the_optimizer_that_steps_most_often(script):
    ran = script(
        "import torch\nfrom torch import nn\n"
        "nets = [nn.Linear(4, 4, device='cuda') for _ in range(2)]\n"
        "optimizers = [torch.optim.Adam(net.parameters()) for net in nets]\n"
        "seen = 0\n"
        "while True:\n"
        "    for net, optimizer in zip(nets, optimizers):\n"
        "        optimizer.zero_grad()\n"
        "        net(torch.ones(4, device='cuda')).sum().backward()\n"
        "        optimizer.step()\n"
    ).trace()
    assert (ran.ended, ran.run.timeline.info["steps"]) == ("3 steps", 3)
    frame = ran.run.timeline.frame()
    products = frame[(frame["action"] == "alloc") & (frame["phase"] == "forward") & (frame["op"] == "addmm")]
    assert products["step"].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_model_that_is_no_module_is_counted_by_its_optimizer_alone(script):
    ran = script(
        "import torch\n"
        "w = torch.zeros(8, device='cuda', requires_grad=True)\n"
        "adam = torch.optim.Adam([w])\n"
        "while True:\n    (w * w).sum().backward()\n    adam.step()\n    adam.zero_grad()\n"
    ).trace()
    assert (ran.ended, ran.run.timeline.info["steps"]) == ("3 steps", 3)


def test_an_optimizer_that_calls_the_model_itself_steps_once(script):
    ran = script(
        "import torch\n"
        "model = torch.nn.Linear(8, 1, device='cuda')\n"
        "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n    loss = model(torch.ones(2, 8, device='cuda')).sum()\n    loss.backward()\n"
        "    return loss\n"
        "while True: optimizer.step(closure)\n",
        steps=2,
    ).trace()
    assert (ran.ended, ran.run.timeline.info["steps"]) == ("2 steps", 2)


@pytest.mark.parametrize(
    ("text", "why", "cannot_say"),
    [
        ("import torch\nx = 1 / 0\n", "train.py:2: ZeroDivisionError: division by zero", False),
        ("import not_there\n", "train.py:1: ModuleNotFoundError: No module named 'not_there'", False),
        (
            "import argparse\nargparse.ArgumentParser().error('x')\n",
            "exit code 2; that is how a wrong use ends: give",
            False,
        ),
        ("def f(:\n", "train.py:1: SyntaxError", False),
        ("import torch\nmodel = torch.compile(torch.nn.Linear(1, 1))\n", "torch.compile is not covered", True),
        ("import torch\ntorch.distributed.init_process_group('gloo')\n", "init_process_group is not covered", True),
        ("import torch\nx = torch.randn(9, device='cuda').nonzero()\n", "depends on values", True),
        ("import torch\nx = torch.randn(9, device='cuda')\ny = [] if x.sum() > 0 else [].pop()\n", "a branch", True),
    ],
)
def test_what_ends_a_script_before_its_time_is_one_line(script, text, why, cannot_say):
    with pytest.raises(Failed, match=why) as failed:
        script(text).trace()
    assert failed.value.cannot_say == cannot_say


def test_changes_are_made_inside_the_trace_round_the_program(script):
    seen = []

    @contextmanager
    def change():
        seen.append(torch.cuda.is_available())
        yield
        seen.append("after")

    script("import torch\nx = torch.zeros(3, device='cuda')\n").trace(changes=[change()])
    assert seen == [True, "after"]


@pytest.mark.parametrize(
    ("target", "arguments", "steps", "why"),
    [
        ("train", (), 3, "names no program: write script.py ARGS"),
        (":build", (), 3, "names no program"),
        ("pkg:build", ("--lr", "1"), 3, "a function, which gets no arguments: --lr 1"),
        ("train.py", (), 0, "the number of steps is a positive integer"),
    ],
)
def test_what_is_no_program_is_said(target, arguments, steps, why):
    with pytest.raises(ValueError, match=why):
        Program(target, arguments, steps)


def test_a_function_is_measured_as_it_is_traced(script, tmp_path):
    (tmp_path / "work.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    adam = torch.optim.Adam(model.parameters())\n"
        "    def step():\n"
        "        model(torch.ones(4, 64)).sum().backward()\n        adam.step()\n        adam.zero_grad()\n"
        "    return step\n"
    )
    program = Program("work.py:build", steps=2)
    traced, measured = program.trace(rules="cpu").run.timeline, program.measure().run.timeline
    assert traced.without("scratch").peak_bytes == measured.without("scratch").peak_bytes > 4 * 4 * 64 * 65
    assert program.trace(rules="cpu").ended == "2 steps"


# -- kernels of others -------------------------------------------------------------------------------------------------

CUSTOM = """
import torch
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
@twice.register_fake
def _(x): return torch.empty_like(x)
y = twice(torch.ones(8, device="cuda"))
"""


def test_a_kernel_that_no_rule_knows_is_named(script):
    assert script(CUSTOM).trace().run.not_covered == {"mine::twice, a kernel of its own"}


@pytest.mark.parametrize(
    ("package", "code", "use", "why"),
    [
        (
            "flash_attn/flash_attn_interface",
            "def flash_attn_func(q, k, v): ...",
            "flash_attn_func(1, 2, 3)",
            "flash_attn's",
        ),
        ("xformers/ops/fmha", "def memory_efficient_attention(q): ...", "memory_efficient_attention(1)", "xformers's"),
        (
            "triton/runtime/jit",
            "class JITFunction:\n    def run(self): ...",
            "JITFunction().run()",
            "triton's JITFunction",
        ),
        (
            "bitsandbytes/nn/modules",
            "class Linear4bit:\n    def __init__(self): ...",
            "Linear4bit()",
            "bitsandbytes's Lin",
        ),
    ],
)
def test_a_package_s_kernel_is_refused_where_it_is_used_not_where_it_is_imported(
    script, tmp_path, monkeypatch, request, package, code, use, why
):
    """The packages are stand-ins, of the real ones' names: those need a GPU to be installed at all."""

    def imported():
        return [name for name in sys.modules if name.split(".")[0] == package.split("/")[0]]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)

    importlib.import_module("torch._inductor.compile_fx")  # PyTorch looks for the real ones before
    request.addfinalizer(lambda: [sys.modules.pop(name) for name in imported()])
    path = tmp_path / f"{package}.py"
    path.parent.mkdir(parents=True)
    for folder in path.relative_to(tmp_path).parents[:-1]:
        (tmp_path / folder / "__init__.py").write_text("")
    path.write_text(code)
    text = f"from {package.replace('/', '.')} import *\nimport torch\nx = torch.zeros(3, device='cuda')\n"
    assert script(text).trace().run.timeline.peak_bytes == 12
    with pytest.raises(Failed, match=f"train.py:4: {why}.* has kernels of its own") as failed:
        script(f"{text}{use}\n").trace()
    assert failed.value.cannot_say
    for name in [name for name in sys.modules if name.split(".")[0] == package.split("/")[0]]:
        monkeypatch.delitem(sys.modules, name)


# -- evaluation and prediction -----------------------------------------------------------------------------------------

EVALUATING = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
training = DataLoader(TensorDataset(torch.ones(100, 8)), batch_size=2)
validation = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4)
model = torch.nn.Linear(8, 1000).cuda()
optimizer = torch.optim.Adam(model.parameters())
def evaluate(keep):
    kept = []
    with torch.no_grad():
        for x, in validation:
            out = model(x.cuda())
            kept += [out] if keep else []
    return torch.cat(kept) if keep else None
for epoch in range(2):
    for x, in training:
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if "validate" in sys.argv: evaluate("keep" in sys.argv)
evaluate("keep" in sys.argv)
"""


def products(ran):
    frame = ran.run.timeline.frame()
    return frame[(frame["action"] == "alloc") & (frame["op"] == "addmm")]


def test_evaluation_comes_after_a_little_training_and_ends_where_training_goes_on(script):
    ran = script(EVALUATING, "validate", phase="eval", steps=3).trace()
    assert ran.ended == "3 batches"
    assert products(ran)["nbytes"].tolist() == [4 * 2 * 1000] * 3 + [4 * 4 * 1000] * 3
    assert products(ran)["step"].tolist() == [-1, -1, -1, 0, 1, 2]


def test_prediction_goes_on_to_the_script_s_end(script):
    ran = script(EVALUATING, "validate", phase="predict", steps=3).trace()
    assert ran.ended == "the script's end"
    assert products(ran)["nbytes"].tolist() == [4 * 2 * 1000, *[4 * 4 * 1000] * 3] * 2 + [4 * 4 * 1000] * 3


@pytest.mark.parametrize("phase", ["eval", "predict"])
def test_predictions_that_are_kept_are_followed_to_the_last(script, phase):
    ran = script(EVALUATING, "keep", phase=phase, steps=3).trace()
    batches, all_of_them = 64 // 4, 4 * 64 * 1000
    assert (products(ran)["nbytes"] == 4 * 4 * 1000).sum() == batches == ran.run.timeline.info["steps"]
    # Weights and two moments, the predictions and what they are joined to.
    assert ran.run.timeline.peak_bytes == 3 * 4 * 9 * 1000 + 2 * all_of_them


def test_a_framework_s_evaluation_and_prediction_are_reached(tmp_path):
    pytest.importorskip("lightning", reason="the script needs lightning: pip install lightning")
    program = Program(str(SCRIPTS / "with_lightning.py"), ("--predict", "--out", str(tmp_path)), phase="predict")
    ran = program.trace("t4")
    encoder = (48 + 1) * 64 + (64 + 1) * 3
    assert ran.ended == "the script's end" and not ran.run.conditional
    assert any("not written" in remark for remark in ran.remarks)
    live = ran.run.timeline.by("category")["nbytes"]
    assert live["parameter"] == 4 * (encoder + (3 + 1) * 64 + (64 + 1) * 48)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".ckpt"] == []


# -- what a script saves -----------------------------------------------------------------------------------------------

SAVING = """
import io, sys, torch
model = torch.nn.Linear(8, 8).cuda()
torch.save(model.state_dict(), sys.argv[1])
torch.save({"epoch": 3}, "epoch.pt")
assert torch.load("epoch.pt") == {"epoch": 3}
"""


def test_what_a_script_saves_is_not_written_and_it_goes_on(script, tmp_path):
    (tmp_path / "earlier.pt").write_bytes(b"weeks of work")
    for name in ("earlier.pt", "new.pt"):
        ran = script(SAVING, name).trace()
        assert ran.remarks == ("train.py:4: what the code saves is not written: a trace has no values",)
    assert (tmp_path / "earlier.pt").read_bytes() == b"weeks of work" and not (tmp_path / "new.pt").exists()
    with pytest.raises(
        Failed, match=r"No such file or directory: new\.pt; what the code saves is not written"
    ) as failed:
        script(SAVING + "open(sys.argv[1], 'rb')\n", "new.pt").trace()
    assert failed.value.cannot_say
    script(SAVING + "assert torch.load(sys.argv[1])['weight'].shape == (8, 8)\n", "new.pt").trace()


def _cpu_before(program, answers):
    state = importlib.import_module("accelerate.state")
    state.PartialState(cpu=True)
    before = dict(state.PartialState._shared_state)
    traced = program.trace("t4")
    answers.put((traced.run.timeline.peak_bytes, state.PartialState._shared_state == before))


def test_what_accelerate_remembers_of_the_process_is_neither_the_program_s_nor_changed_by_it(script):
    text = "import torch\nfrom accelerate import PartialState\ntorch.ones(8, device=PartialState().device)\n"
    program = script(text)
    assert in_a_process_of_its_own(program, _cpu_before, needs=["accelerate"]) == (32, True)


@pytest.mark.parametrize(
    ("text", "why", "cannot_say"),
    [
        ("import torch\ntorch.ones(8)\n", "does it ask for device='cpu'", False),
        (
            "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '-1'\nimport torch\n"
            "torch.ones(8, device='cuda' if torch.cuda.is_available() else 'cpu')\n",
            r"train\.py:4: the code hides every GPU",
            False,
        ),
        (
            "import os, torch\npid = os.fork()\nif not pid:\n    torch.ones(8, device='cuda')\n    os._exit(0)\n"
            "os.waitpid(pid, 0)\n",
            r"what the process that is started at train\.py:2 does on the GPU",
            True,
        ),
    ],
)
def test_a_program_that_puts_nothing_on_the_gpu_never_fits(script, text, why, cannot_say, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(Failed, match=f"put nothing on the GPU: .*{why}") as failed:
        Forecast.of(script(text), gpus.find("t4"))
    assert failed.value.cannot_say == cannot_say
