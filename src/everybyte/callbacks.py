"""The watch of `everybyte run` as a callback of Hugging Face's `Trainer` and of Lightning's.

from everybyte.callbacks import EveryByte
trainer = Trainer(..., callbacks=[EveryByte()])
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from .watch import EVENTS, Watch

_CALLBACKS: Final = {
    "transformers": ("transformers.trainer_callback", "TrainerCallback"),
    "lightning": ("lightning.pytorch.callbacks", "Callback"),
    "pytorch_lightning": ("pytorch_lightning.callbacks", "Callback"),
}


class EveryByte:
    """Watches the GPU's memory from here until the training ends or fails, and reports to a folder.

    It is a callback of each framework that the program has imported by then. Make it before the model is on the GPU:
    what is there already has no stack.

    Args:
        out: The folder, as for `Watch`.
        events: Of the history as many are kept.

    Raises:
        ImportError: If neither framework has been imported.
        OSError: If the folder cannot be written to.
    """

    def __new__(cls, *args: Any, **options: Any) -> EveryByte:
        bases = []
        for package in _CALLBACKS.keys() & sys.modules.keys():
            module, name = _CALLBACKS[package]
            with suppress(ImportError):
                bases.append(getattr(import_module(module), name))
        if not bases:
            raise ImportError("EveryByte() is a callback of transformers or lightning: import one of them before it")
        return super().__new__(type(cls.__name__, (cls, *bases), {}))

    def __init__(self, out: str | Path = "everybyte-run", events: int = EVENTS) -> None:
        self.watch = Watch(out, events)
        self.watch.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:  # both frameworks'
        self.watch.tell()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:  # Lightning's
        self.watch.tell(exception)
