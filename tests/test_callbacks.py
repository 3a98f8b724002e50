"""The callbacks in the real trainers, on the host: what PyTorch says of a GPU is faked at its boundary."""

from __future__ import annotations

import atexit
import json
import sys

import pytest
import torch
from fake_run import MESSAGE, RecordedGPU
from streams import timeline
from torch import nn

from everybyte.allocator import Allocator
from everybyte.callbacks import EveryByte
from everybyte.units import MiB


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"x": torch.ones(2)}


class Net(nn.Module):
    """A network that runs out of memory in its first step, if it is to."""

    def __init__(self, gpu=None):
        super().__init__()
        self.layer, self.gpu = nn.Linear(2, 1), gpu

    def forward(self, x):
        if self.gpu is not None:
            self.gpu.fail()
            raise torch.cuda.OutOfMemoryError(MESSAGE)
        return {"loss": self.layer(x).mean()}


def train_with_hugging_face(net, callback, folder):
    transformers = sys.modules["transformers"]
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    transformers.Trainer(net, args, train_dataset=Rows(), callbacks=[callback]).train()


def train_with_lightning(net, callback, folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, i):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", callbacks=[callback], default_root_dir=folder, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=2))


TRAININGS = {"transformers": train_with_hugging_face, "lightning": train_with_lightning}


@pytest.fixture(params=TRAININGS)
def train(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    if request.param == "transformers":
        pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")
        assert sys.modules["transformers"].Trainer  # imported only now, and before there is a fake GPU
    return TRAININGS[request.param]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    path = tmp_path / "recording.pickle"
    timeline(30 * MiB, 60 * MiB, 30 * MiB).to_snapshot(path, Allocator(total=100 * MiB))
    return RecordedGPU(monkeypatch, path)


def test_a_training_that_ends_leaves_a_report_of_its_end(train, gpu, tmp_path, capfd):
    callback = EveryByte(tmp_path / "reports", events=500)
    train(Net(), callback, tmp_path)
    answer = json.loads((tmp_path / "reports" / "end.json").read_text())
    assert (answer["run"]["ended"], answer["run"]["most_events"]) == ("without an error", 500)
    assert f": {tmp_path / 'reports' / 'end.html'}\n" in capfd.readouterr().err
    assert not (tmp_path / "reports" / "out-of-memory.html").exists()


def test_a_training_that_runs_out_of_memory_fails_as_ever_and_leaves_a_report_of_it(train, gpu, tmp_path):
    callback = EveryByte(tmp_path / "reports")
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        train(Net(gpu), callback, tmp_path)
    callback.watch.tell(error.value)  # as the process's end does where the framework tells callbacks nothing
    answer = json.loads((tmp_path / "reports" / "out-of-memory.json").read_text())
    assert answer["out_of_memory"][0]["requested"] == 30 * MiB
    assert not (tmp_path / "reports" / "end.html").exists()


def test_a_callback_of_no_framework_says_what_to_import(monkeypatch):
    for package in ("transformers", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(ImportError, match="import one of them before it"):
        EveryByte()


def test_a_callback_is_one_of_each_framework_that_is_imported(train, gpu, tmp_path):
    callback = EveryByte(tmp_path / "reports")
    atexit.unregister(callback.watch._at_exit)
    assert isinstance(callback, EveryByte)
    bases = {base.__name__ for base in type(callback).__mro__}
    assert bases & {"TrainerCallback", "Callback"}
