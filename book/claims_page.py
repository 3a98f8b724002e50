"""Writes the page of claims, `book/claims.md`, from the ledgers: `python book/claims_page.py`, as `make refresh` does.

The tables are plain HTML that can be read without any script; `_static/claims.js` adds the filter above them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape as escape_html
from pathlib import Path

from found import TITLES

from everybyte.audit import MEANING, Finding, Ledger, packaged

escape = partial(escape_html, quote=False)  # nothing that is escaped stands in an attribute

PAGE = Path(__file__).with_name("claims.md")

HEAD = """\
<!-- Written by book/claims_page.py from the ledgers in src/everybyte/claims: change those, then `make refresh`. -->

# Every claim, audited

{{ref}}`Two analyses <the-two-analyses>`, {claims} claims, each recomputed. A row names the section that makes the
claim, and has the number as it stands there, [claimed]{{.evidence .evidence-claimed}}; then what it comes to,
[computed]{{.evidence .evidence-computed}} or by a [traced]{{.evidence .evidence-traced}} run, above the expression that
says so; then the verdict, its reason, and the place in the book that shows it. Which verdict follows is a rule, not an
opinion: only where the value differs, and the document's own inputs do give what it states, does a person say why.

{verdicts}

(In brackets: how many of *Activation Memory Math*, and of the TFT memory report.)

One wrong number makes others. A sum of wrong lines that is added up rightly *holds* as an addition, and has a second
row for what it says of the model. A claim that is repeated counts once, unless the document builds on it anew.

`everybyte audit` recomputes all rows of this page in some ten seconds, and fails if a verdict has changed. How to write
a ledger for another document is said {{ref}}`at the end <own-ledger>`.

```{{raw}} html
<script src="../_static/claims.js" defer></script>
```
"""

TAIL = """\
(own-ledger)=
## Your own ledger

A ledger is written by hand. This one is of a made-up post about an MLP: three claims, of which one needs a trace.

```{literalinclude} ledgers/mlp_post.toml
:language: toml
```

The third row calls a function of a Python file beside the ledger:

```{literalinclude} ledgers/mlp_post.py
:language: python
```

```{code-block} console
$ everybyte audit book/ledgers/mlp_post.toml
```

Copy both, put in another document, and give each row any of the seven words for a verdict: the command says which
have to change. What a row may hold, and the rule in full, are in the documentation of the module `everybyte.audit`.
Functions that a ledger names are run, so read a ledger that is not yours before you audit with it.
"""


def audited() -> list[tuple[Ledger, list[Finding]]]:
    """The two ledgers, recomputed."""
    return [(ledger := Ledger.read(path), list(ledger.audit())) for path in packaged()]


def page(documents: Sequence[tuple[Ledger, list[Finding]]]) -> str:
    """The whole page."""
    counts = ([sum(f.verdict == verdict for f in findings) for _, findings in documents] for verdict in MEANING)
    verdicts = [
        f"- [{verdict}]{{.verdict .verdict-{verdict.replace(' ', '-')}}} {meaning} ({one}, {other})"
        for (verdict, meaning), (one, other) in zip(MEANING.items(), counts, strict=True)
    ]
    claims = sum(len(findings) for _, findings in documents)
    tables = [line for ledger, findings in documents for line in _table(ledger, findings)]
    return "\n".join([HEAD.format(claims=claims, verdicts="\n".join(verdicts)), *tables, TAIL])


def _table(ledger: Ledger, findings: Iterable[Finding]) -> Iterator[str]:
    title = TITLES[ledger.path.stem]
    yield f"## {title}"
    yield ""
    if title != ledger.document:
        yield f"*{ledger.document}*"
        yield ""
    yield "```{raw} html"
    yield '<table class="table claims">'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("claim", "stated", "recomputed", "verdict"))
    yield f"<thead><tr>{head}</tr></thead>"
    yield "<tbody>"
    for finding in findings:
        yield _row(ledger.path.stem, finding)
    yield "</tbody>"
    yield "</table>"
    yield "```"
    yield ""


def _row(ledger: str, finding: Finding) -> str:
    claim, anchor = finding.claim, f"{ledger.partition('_')[0]}-{finding.claim.id}"
    basis = f" <small>{escape(finding.basis)}</small>" if finding.basis else ""
    recomputed = f"{escape(finding.text)}{basis}" if finding.values else "–"
    recomputed += "".join(f"<code>{escape(text)}</code>" for text in claim.value)
    why = escape(finding.reason)
    if claim.source:
        why += f" <small>Source: {escape(claim.source)}</small>"
    if claim.proof:
        why += f' <a href="../notebooks/{claim.proof.replace("#", ".html#")}">chapter {claim.proof[:2]}</a>'
    cells = {
        "stated": escape(claim.stated),
        "recomputed": recomputed,
        "verdict": f'<span class="verdict verdict-{finding.verdict.replace(" ", "-")}">{finding.verdict}</span> {why}',
    }
    place = f'<small><a href="#{anchor}">{claim.id}</a> {escape(claim.place.lstrip("0123456789. "))}</small> '
    first = f'<th scope="row">{place}{escape(claim.claim)}</th>'
    rest = "".join(f'<td data-name="{name}">{text}</td>' for name, text in cells.items())
    return f'<tr id="{anchor}" data-verdict="{finding.verdict}">{first}{rest}</tr>'


if __name__ == "__main__":
    PAGE.write_text(page(audited()), encoding="utf-8")
    print(f"Wrote {PAGE.name}")
