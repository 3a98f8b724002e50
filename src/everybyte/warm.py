"""Imported by the process that trials are forked from: a trace of nothing, at which PyTorch imports much."""

from . import trials  # noqa: F401
from .trace import trace

with trace(rules="cuda"):
    pass
