"""HTML and SVG out of text that is never trusted: what is no `Markup` already is escaped, wherever it comes from."""

from __future__ import annotations

from html import escape
from typing import Final

from .names import printable

LONGEST: Final = 2_000  # characters of one text


class Markup(str):
    """Text that is HTML already: made by `tag`, or written in this library."""

    __slots__ = ()


def markup(part: object) -> Markup:
    """A part of a page: `Markup` as it is, anything else as a text in which nothing acts.

        >>> eb.markup.markup("<img src=x> \\x1b[31m")
        '&lt;img src=x&gt; \\\\x1b[31m'

    Control characters, and those that turn the direction of writing around, are shown as their escapes.
    """
    return part if isinstance(part, Markup) else Markup(escape(printable(str(part), LONGEST)))


def join(*parts: object, between: str = "") -> Markup:
    """Parts one after another."""
    return Markup(between.join(map(markup, parts)))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element: `tag("a", text, class_="x", stroke_width=2)`; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{markup(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(*inside)}</{name}>")
