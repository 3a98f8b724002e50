"""Places in code: whose a line is, by the name of its file alone, and how it is called."""

from __future__ import annotations

import sys

import pytest

import everybyte as eb
from everybyte.places import LIBRARY, OWN, PYTORCH, called, lines_of, whose

SITE = "/opt/conda/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "filename, owner",
    [
        (f"{SITE}/transformers/trainer.py", LIBRARY),
        ("/usr/lib/python3/dist-packages/numpy/core.py", LIBRARY),
        ("C:\\Users\\me\\env\\Lib\\site-packages\\accelerate\\accelerator.py", LIBRARY),
        (f"{SITE}/torch/nn/functional.py", PYTORCH),
        (f"{SITE}/torchvision/models/resnet.py", LIBRARY),
        ("/src/pytorch/torch/_tensor.py", PYTORCH),
        ("torch/optim/adamw.py", PYTORCH),
        ("/home/me/torch/train.py", OWN),
        ("/home/me/project/src/package/model.py", OWN),
        ("/home/me/site-packages.py", OWN),
        ("/tmp/ipykernel_7/1234.py", OWN),
        ("<ipython-input-3-0a>", OWN),
        ("/root/.ipykernel/1808/command-2654-890", OWN),  # Databricks
        ("train.py", OWN),
        ("/opt/conda/lib/python3.11/contextlib.py", None),
        ("C:\\Program Files\\Python311\\Lib\\runpy.py", None),
        ("<frozen runpy>", None),
        ("/pytorch/aten/src/ATen/native/Linear.cpp", None),
        ("", None),
    ],
)
def test_a_file_is_pytorch_s_a_library_s_or_the_user_s_own(filename, owner):
    assert whose(filename) is owner


def test_a_file_is_called_the_same_on_every_machine(tmp_path, monkeypatch):
    for folder in ("work", "beside/pkg"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "beside"), *sys.path])
    assert called(f"{SITE}/transformers/trainer.py") == "transformers/trainer.py"
    assert called(f"{tmp_path}/work/.venv/lib/python3.11/site-packages/peft/tuners/lora.py") == "peft/tuners/lora.py"
    assert called(f"{tmp_path}/work/scripts/train.py") == "scripts/train.py"
    assert called(f"{tmp_path}/beside/pkg/model.py") == "pkg/model.py"
    assert called("scripts/train.py") == "scripts/train.py"
    assert called("/tmp/ipykernel_7/1234.py") == called("/root/.ipykernel/1808/command-2654-890") == "notebook"
    assert called(eb.models.gpt.__file__) == "everybyte/models/gpt.py"
    assert called("/elsewhere/train.py") == "/elsewhere/train.py"  # the name alone could be any train.py


def test_of_a_stack_both_lines_are_told_the_library_s_and_the_one_that_led_there():
    outer = [("/home/me/train.py", 31), ("/opt/conda/lib/python3.11/runpy.py", 88)]
    inner = [("", 0), (f"{SITE}/torch/nn/functional.py", 5), (f"{SITE}/torch/nn/modules/linear.py", 6)]
    library = [(f"{SITE}/transformers/models/gpt2/modeling_gpt2.py", 312), (f"{SITE}/transformers/trainer.py", 99)]
    assert lines_of([*inner, *library, *outer]) == (
        "transformers/models/gpt2/modeling_gpt2.py:312",
        "/home/me/train.py:31",
    )
    assert lines_of([*inner, *outer]) == ("/home/me/train.py:31", "/home/me/train.py:31")
    assert lines_of(inner + library) == ("transformers/models/gpt2/modeling_gpt2.py:312", "")
    assert lines_of(inner) == ("", "")
