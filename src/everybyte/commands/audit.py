"""`everybyte audit [LEDGER ...]`: each claim of a ledger recomputed, and whether it is worth what the ledger says."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import audit as ledgers
from ..lines import LONGEST_LINE
from ..names import printable
from . import BAD_INPUT, NO, SCHEMA, Answer, Stop, on_stderr


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte audit`."""
    parser = commands.add_parser(
        "audit",
        help="recompute a document's claims and judge them",
        description="Recomputes each claim of a ledger and says what it is worth. A ledger may name a Python file, "
        "which is run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", metavar="LEDGER", nargs="*", help="a TOML file; those of the two analyses of the book unless given"
    )
    parser.set_defaults(command=_answer)
    return parser


def _answer(args: argparse.Namespace) -> Answer:
    documents, changed = [], []
    for file in args.files or ledgers.packaged():
        try:
            with on_stderr():
                ledger = ledgers.Ledger.read(file)
                findings = list(ledger.audit())
        except ledgers.LedgerError as error:
            raise Stop(BAD_INPUT, str(error)) from None
        except OSError as error:
            raise Stop(BAD_INPUT, f"{file}: {error.strerror or error}") from None
        documents.append({
            "ledger": os.fsencode(file).decode("utf-8", "replace"),
            "document": ledger.document,
            "claims": [finding.as_dict() for finding in findings],
            "counts": {verdict: sum(f.verdict == verdict for f in findings) for verdict in ledgers.VERDICTS},
        })  # fmt: skip
        changed += [finding for finding in findings if finding.changed]
    answer = {"schema": SCHEMA, "documents": documents, "changed": len(changed)}
    if not changed:
        return answer, _lines(documents), None
    what = "; ".join(f"claim {f.claim.id} is now {f.verdict!r}, not {f.claim.verdict!r}" for f in changed)
    return answer, _lines(documents), Stop(NO, f"{what}: mend the ledger, or what it calls")


def _lines(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for document in documents:
        yield f"{printable(document['document'])}, {len(document['claims'])} claims"
        yield ""
        for row in document["claims"]:
            value = f"{row['stated']} -> {row['text'] or 'nothing to recompute'}"
            basis = f" ({row['basis']})" if row["basis"] else ""
            was = f" (the ledger says {row['stored']})" if row["changed"] else ""
            yield printable(f"{row['id']:>6}  {row['verdict']:17}{was}  {value}{basis}  {row['claim']}", LONGEST_LINE)
        yield ""
        yield ", ".join(f"{count} {verdict}" for verdict, count in document["counts"].items() if count)
        yield ""
