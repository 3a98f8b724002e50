"""Trace a PyTorch training step without running it, measure it, and explain every byte."""

from .measure import Measurement, measure
from .timeline import Timeline
from .trace import Trace, trace
from .units import format_bytes, parse_bytes
from .values import DataDependentShape

__all__ = [
    "DataDependentShape",
    "Measurement",
    "Timeline",
    "Trace",
    "format_bytes",
    "measure",
    "parse_bytes",
    "trace",
]
