"""What the page `explain` is given: the library's tables of messages, its GPUs, and its constants.

`press.stage` writes `script()` beside the page's own `explain.js`, whenever pages are rendered.
"""

from __future__ import annotations

import json
import tomllib
from importlib import resources

from everybyte.explain import LONGEST, SHARE, UNKNOWN
from everybyte.gpus import CONTEXT, TABLE


def script() -> str:
    """The page's data, `MESSAGES`."""
    tables = tomllib.loads(resources.files("everybyte").joinpath("messages.toml").read_text(encoding="utf-8"))
    tables["gpus"] = [{"key": x.key, "name": x.name, "total": x.total, "precision": x.precision} for x in TABLE]
    tables |= {"share": SHARE, "unknown": UNKNOWN, "longest": LONGEST, "context": CONTEXT}
    return f"const MESSAGES = {json.dumps(tables)};\n"
