"""The JSON of answers: its version, and what describes it for programs."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

VERSION: Final = 1
"""It grows when a key goes or changes its meaning, not when one is added."""


def read() -> dict[str, Any]:
    """The JSON Schema of what `everybyte trace --json` and `everybyte snapshot --json` print.

    >>> eb.schema.read()["title"]
    'What everybyte answers'
    """
    return json.loads(resources.files(__package__).joinpath("answer.schema.json").read_text(encoding="utf-8"))
