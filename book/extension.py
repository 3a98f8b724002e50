"""What Sphinx does to this book beyond Jupyter Book: links to the glossary, names in docstrings, tables that are made.

- The first mention of each glossary term in a page's running text becomes a link, so that no chapter has to say so; a
  `{term}` written by hand counts as a mention.
- A name in single backticks in a docstring is a link if the library's pages describe it, and code if not.
- `{made} NAME` is the Markdown that the function NAME of `made.py` returns.
"""

from __future__ import annotations

import re
from typing import Any

import made
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

EVIDENCE = {"claimed", "computed", "traced", "measured", "recorded"}
"""Terms that stand as labels beside a number; the first such label of a page is linked."""

EVERYDAY = EVIDENCE | {
    *("input", "block", "live", "view", "rule", "mask", "pool", "kernel", "statistics", "requested", "rounded"),
    *("forward", "backward", "decode", "history", "horizon", "mb, gb", "mib, gib"),
}
"""Terms that are everyday words, too: a page links them by hand, where it means the term."""

NOT_PROSE = (
    *(nodes.reference, nodes.literal, nodes.emphasis, nodes.title, nodes.thead, nodes.caption, nodes.math, nodes.raw),
    nodes.citation,
    *(addnodes.pending_xref, addnodes.desc_signature, addnodes.glossary),
)


class FirstMentions(SphinxPostTransform):
    """Links the first mention of a glossary term on each page."""

    default_priority = 5  # before references are resolved

    def run(self, **_: Any) -> None:
        terms = {name.lower(): name for kind, name in self.env.get_domain("std").objects if kind == "term"}
        labels = {text: terms[text] for text in EVIDENCE if text in terms}
        words = {text: term for text, term in terms.items() if text not in EVERYDAY}
        words |= {text + "s": term for text, term in words.items()}
        either = "|".join(re.escape(text).replace(r"\ ", r"\s+") for text in sorted(words, key=len, reverse=True))
        mention = re.compile(rf"(?<![\w-])(?:{either})(?![\w-])", re.IGNORECASE)
        for node in list(self.document.findall()):
            if isinstance(node, addnodes.pending_xref):
                met(node["reftarget"], words, labels)
            elif is_label(node):
                self.link(node, re.compile(".+"), labels)
            elif is_prose(node):
                self.link(node, mention, words)

    def link(self, text: nodes.Text, mention: re.Pattern[str], words: dict[str, str]) -> None:
        """Cuts a text at the terms that are met there for the first time, which leave `words`, and links them."""
        pieces: list[nodes.Node] = []
        done = 0
        for match in mention.finditer(text):
            term = words.get(" ".join(match[0].lower().split()))
            if term is None:
                continue
            met(term, words)
            xref = {"refdomain": "std", "reftype": "term", "reftarget": term, "refexplicit": True, "refwarn": True}
            shown = nodes.inline("", match[0], classes=["xref", "std", "std-term"])
            pieces += [nodes.Text(text[done : match.start()])]
            pieces += [addnodes.pending_xref("", shown, refdoc=self.env.docname, **xref)]
            done = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[done:])])


def met(term: str, *words: dict[str, str]) -> None:
    """Takes a term, in all its forms, out of the words that are still to be met."""
    for forms in words:
        for form in [form for form, named in forms.items() if named.lower() == term.lower()]:
            del forms[form]


def is_label(node: nodes.Node) -> bool:
    """Whether this is the text of a label of evidence, in a page's own words."""
    return isinstance(node, nodes.Text) and "evidence" in node.parent.get("classes", ())


def is_prose(node: nodes.Node) -> bool:
    """Whether this is a text that runs in a paragraph: no code, link, heading, output or number that was pasted."""
    if not isinstance(node, nodes.Text):
        return False
    above = []
    while (node := node.parent) is not None:
        above.append(node)
    classes = {name for node in above if isinstance(node, nodes.Element) for name in node["classes"]}
    return (
        any(isinstance(node, nodes.paragraph) for node in above)
        and not any(isinstance(node, NOT_PROSE) for node in above)
        and not classes & {"cell", "pasted-text", "pasted-inline", "evidence", "verdict"}
    )


SECTIONS = {"Args:", "Attributes:", "Returns:", "Raises:", "Yields:"}


def as_rest(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring, in which single backticks hold any code, and code stands indented."""
    text: list[str] = []
    section = code = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line[:1].strip():
            section, code = line in SECTIONS, False
        elif line and not (before or section or code):
            code = True
            kind = "pycon" if ">>>" in line else "text" if re.search(r"\S {3,}\S", line) else "python"
            text += [f".. code-block:: {kind}", ""]
        prose = re.sub(r"(?<![`:])`([^`]+)`(?!`)", role, line)
        text.append(line if code else made.threads(prose, "`{text} <{address}>`__"))
    # Before the text of an attribute an empty comment, else napoleon takes what stands before a colon for its type.
    lines[:] = ["..", "", *text] if what in ("attribute", "data", "property") else text


def role(match: re.Match[str]) -> str:
    """A name as a reference, which is code if it leads nowhere; other code as code."""
    return f":py:obj:`{match[1]}`" if re.fullmatch(r"[A-Za-z_][\w.]*", match[1]) else f"``{match[1]}``"


def find(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """Where a name of Python's leads that is not described under just this name: to the only one that ends so.

    Names in docstrings and types in signatures that lead nowhere are code; one that a page refers to must be described.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    described = env.get_domain("py").objects.items()
    found = {entry.node_id: entry for name, entry in described if name.endswith(f".{target}")}
    if len(found) == 1 and (target[0].isupper() or "." in target):
        (entry,) = found.values()
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown, target)
    return shown if node["reftype"] in ("class", "obj", "exc", "data") else None


class Made(SphinxDirective):
    """The Markdown that a function of `made.py` returns, in its place."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(getattr(made, self.arguments[0])())


def lists(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Takes from the bibliography the role of a list, whose items docutils then does not mark as such."""
    if 'class="citation-list"' in context.get("body", ""):
        context["body"] = context["body"].replace('role="list" class="citation-list"', 'class="citation-list"')


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(FirstMentions)
    app.add_directive("made", Made)
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("missing-reference", find)
    app.connect("html-page-context", lists)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
