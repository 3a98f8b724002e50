"""Trace a PyTorch training step without running it, measure it, and explain every byte.

What a name stands for is imported when it is first asked for: `explain`, `Snapshot` and their commands work
where torch is older than a trace needs, or not there at all.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from . import formulas, gpus, models, recordings, report, workspace
    from .allocator import Allocator
    from .audit import Ledger
    from .explain import Explanation, explain
    from .fit import fit_formula
    from .leaks import Leaks, leaks
    from .measure import Measurement, measure
    from .saved import Saved, saved
    from .script import Program
    from .snapshot import Snapshot
    from .timeline import Timeline
    from .trace import Trace, trace
    from .units import format_bytes, parse_bytes
    from .values import DataDependentShape

__all__ = [
    "Allocator",
    "DataDependentShape",
    "Explanation",
    "Leaks",
    "Ledger",
    "Measurement",
    "Program",
    "Saved",
    "Snapshot",
    "Timeline",
    "Trace",
    "explain",
    "fit_formula",
    "format_bytes",
    "formulas",
    "gpus",
    "leaks",
    "measure",
    "models",
    "parse_bytes",
    "recordings",
    "report",
    "saved",
    "trace",
    "workspace",
]

_HOME: Final = {
    "Allocator": "allocator",
    "DataDependentShape": "values",
    "Explanation": "explain",
    "Leaks": "leaks",
    "Ledger": "audit",
    "Measurement": "measure",
    "Program": "script",
    "Saved": "saved",
    "Snapshot": "snapshot",
    "Timeline": "timeline",
    "Trace": "trace",
    "explain": "explain",
    "fit_formula": "fit",
    "format_bytes": "units",
    "leaks": "leaks",
    "measure": "measure",
    "parse_bytes": "units",
    "saved": "saved",
    "trace": "trace",
}
"""The module of each name that is none itself."""


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        whole = f"{__name__}.{_HOME.get(name, name)}"
        try:
            module = importlib.import_module(whole)
        except ModuleNotFoundError as error:
            if error.name != whole:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = vars(self)[name] = getattr(module, name) if name in _HOME else module
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python puts a module that was imported into its package; `everybyte.trace` stays the function.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__})


sys.modules[__name__].__class__ = _Package
