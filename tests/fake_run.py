"""`everybyte run` in a process whose GPU is a recording: `python fake_run.py RECORDING ARGS`.

To a script, `torch.zeros(..., device="cuda")` runs out of memory as the recording did; what PyTorch tells of that, it
tells to who asked for it. Used in tests' own process, too, by `RecordedGPU`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGPU

MESSAGE = "CUDA out of memory. Tried to allocate 30.00 MiB."


class RecordedGPU(FakeGPU):
    """A fake GPU whose history is a recording, and which tells observers of each request that fails."""

    def __init__(self, monkeypatch, recording, initialized=True):
        super().__init__(monkeypatch, recorded=pickle.loads(Path(recording).read_bytes()))
        self.initialized, self.observers, self.snapshots, self.waiting = initialized, [], 0, []
        zeros = torch.zeros

        def failing(*args, device=None, **more):
            if device != "cuda":
                return zeros(*args, device=device, **more)
            self.fail()
            raise torch.cuda.OutOfMemoryError(MESSAGE)

        monkeypatch.setattr(torch, "zeros", failing)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "_queued_calls", self.waiting)
        attach = self.observers.append
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)

    def initialize(self):
        """What PyTorch does when CUDA is first used."""
        self.initialized = True
        for call, _ in self.waiting:
            call()

    def fail(self, device=0):
        for observer in self.observers:
            observer(device, 30 * 2**20, 100 * 2**20, 2**20)

    def snapshot(self):
        self.snapshots += 1
        return super().snapshot()


if __name__ == "__main__":
    from everybyte import watch
    from everybyte.cli import main

    RecordedGPU(pytest.MonkeyPatch(), sys.argv[1])
    watch.unavailable = lambda: None
    sys.exit(main(["run", *sys.argv[2:]]))
