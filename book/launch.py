"""A Sphinx extension: each chapter's links to Colab and Kaggle, in a fork that says where it is.

The switch is `launch_from` in `_config.yml`: "you/every-byte", or "you/every-byte@branch".
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ConfigError

SERVICES = {
    "Colab": "https://colab.research.google.com/github/{path}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{path}",
}


def add_links(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    if not app.config.launch_from or not pagename.startswith("notebooks/"):
        return
    where = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", app.config.launch_from)
    if where is None:
        raise ConfigError(
            f"launch_from: {app.config.launch_from!r} is no repository: write OWNER/NAME or OWNER/NAME@BRANCH"
        )
    path = f"{where[1]}/blob/{where[2] or 'main'}/{pagename}.ipynb"
    links = [
        {"type": "link", "text": name, "tooltip": f"Run this chapter on {name}", "url": url.format(path=path)}
        for name, url in SERVICES.items()
    ]
    group = {"type": "group", "tooltip": "Run this chapter elsewhere", "icon": "fas fa-rocket", "label": "launch"}
    context["header_buttons"].append({**group, "buttons": links})


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("launch_from", "", "html")
    app.connect("html-page-context", add_links, priority=501)  # behind the theme's own, which makes the list
    return {"parallel_read_safe": True}
