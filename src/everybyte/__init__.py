"""Trace a PyTorch training step without running it, measure it, and explain every byte."""

from . import formulas, gpus, models, recordings, report, workspace
from .allocator import Allocator
from .audit import Ledger
from .fit import fit_formula
from .leaks import Leaks, leaks
from .measure import Measurement, measure
from .saved import Saved, saved
from .snapshot import Snapshot
from .timeline import Timeline
from .trace import Trace, trace
from .units import format_bytes, parse_bytes
from .values import DataDependentShape

__all__ = [
    "Allocator",
    "DataDependentShape",
    "Leaks",
    "Ledger",
    "Measurement",
    "Saved",
    "Snapshot",
    "Timeline",
    "Trace",
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
