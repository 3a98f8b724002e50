"""A document's claims, one a row: each is recomputed, and what it is worth follows from a rule.

A *ledger* is a TOML file that a person can write. Its head names the document, what is given, and, where expressions do
not say it all, a Python file beside it whose functions the rows may call:

    document = "A post about an MLP"
    units = [1000]                    # what its KB and MB may be powers of: 1000, or 1024, or either
    functions = "mlp_post.py"
    given = { b = 32, h = 1024 }

    [[claim]]
    id = "1.2"
    place = "The backward pass"       # where in the document
    claim = "the wide activation"     # what is said of it, in few words
    stated = "16.8 MB"                # the number as it stands there; "yes" for a sentence
    value = "4 * b * 4 * h * 32"      # what recomputes it
    verdict = "holds"
    reason = "four bytes for each of b · 4h · 32 numbers"

`value` is an expression over what is given, B KB MB GB (powers of 1000) and KiB MiB GiB (of 1024), and the functions;
bytes for a number of bytes, True or False for a sentence. Arithmetic is exact. A number in a reason need not be typed:
"{value / inputs:.1f} times as much" has an expression in braces and, after a colon, how Python formats it; `value` and
`inputs` are the row's own. What else a row may have:

    inputs    an expression in the document's own figures, from which it got its number
    against   ids of the rows that it disagrees with
    source    where to read what no code of ours can check
    proof     the place in the book that shows it, chapter#section

The rule, in this order. The recomputed value, in the stated unit and rounded to the stated digits, is the stated
number: *holds*. It is with another mixture of 1000 and 1024 in the unit: *unit mix*. On a difference, and on nothing
else, a ledger may judge, if the document's own `inputs` give what it states: *contradicts itself*, where what else it
says gives the value; *physically wrong*, where hardware and programs do. Otherwise, if `inputs` give the stated number
and the value in its two units lies to both sides of it, figures of both kinds were added: *unit mix* again. It is off
in the last stated digit: *rounding*. It differs: *arithmetic slip*. With a list of expressions for a value, readings
that differ among themselves, or with none, the claim *cannot be known*.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from . import units

MEANING: Final = {
    "holds": "the recomputed value, rounded to the stated digits, is the stated number; or the sentence is true",
    "rounding": "off in the last stated digit alone",
    "unit mix": "right if its unit is partly of 1000 and partly of 1024, or if figures of both kinds were added",
    "arithmetic slip": "the document's own inputs give another number",
    "contradicts itself": "what else the document says gives another number",
    "physically wrong": "what hardware and programs do gives another number",
    "cannot be known": "what it would take to tell is not in the document, or its words have readings that differ",
}
VERDICTS: Final = tuple(MEANING)
JUDGED: Final = VERDICTS[4:6]
"""What only a person can say of a difference."""

Value = Fraction | bool
_SIZES: Final = {"B": 1, **{name: getattr(units, name) for name in ("KB", "MB", "GB", "KiB", "MiB", "GiB")}}
TIMES: Final = {"B": 0, "KB": 1, "MB": 2, "GB": 3}
FIXED: Final = {"KiB": units.KiB, "MiB": units.MiB, "GiB": units.GiB, "K": 1_000, "M": 1_000_000, "%": Fraction(1, 100)}
_NUMBER: Final = r"\d[\d,]*(?:\.\d+)?(?:e\d+)?"
_STATED: Final = re.compile(rf"([<>]?)\s*({_NUMBER})(?:\s*-\s*({_NUMBER}))?\s*(×|{'|'.join([*TIMES, *FIXED])})?")

_PLACE: Final = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


class LedgerError(ValueError):
    """A ledger that cannot be used; the message says which row, and what to mend."""


@dataclass(frozen=True)
class Stated:
    """A number as it stands in a document: "8.4 MB", "16.78e6", "13-18 MB", "> 15 GB", "82 %", "127 ×"; or "yes".

    Raises:
        ValueError: If the text is neither.
    """

    text: str

    def __post_init__(self) -> None:
        if self.text not in ("yes", "no") and not _STATED.fullmatch(self.text):
            known = ", ".join([*TIMES, *FIXED, "×"])
            raise ValueError(f"stated = {self.text!r}: write a number and a unit ({known}) or none, or 'yes' or 'no'")

    @property
    def _parts(self) -> tuple[str, str, str | None, str]:
        relation, low, high, unit = _STATED.fullmatch(self.text).groups(default="")
        return relation, low.replace(",", ""), high.replace(",", "") or None, unit

    @property
    def is_sentence(self) -> bool:
        return self.text in ("yes", "no")

    @property
    def unit(self) -> str:
        return "" if self.is_sentence else self._parts[3]

    @property
    def in_bytes(self) -> bool:
        return self.unit in TIMES or self.unit.endswith("iB")

    @property
    def digit(self) -> Fraction:
        """One in the last digit, in the stated unit."""
        number, _, power = self._parts[1].partition("e")
        return Fraction(10) ** (int(power or 0) - len(number.partition(".")[2]))

    def sizes(self, powers: tuple[int, ...]) -> dict[str, Fraction]:
        """What the unit can mean, by name, if prefixes are powers of these."""
        unit = self.unit
        if unit not in TIMES:
            return {"": Fraction(FIXED.get(unit, 1))}
        return {self.basis([power] * TIMES[unit]): Fraction(power ** TIMES[unit]) for power in powers}

    def mixtures(self) -> dict[str, Fraction]:
        """What the unit means if its prefix is of 1000 and 1024 in turns."""
        times = TIMES.get(self.unit, 0)
        factors = ([1000] * i + [1024] * (times - i) for i in range(times + 1))
        return {self.basis(some): Fraction(math.prod(some)) for some in factors}

    def basis(self, factors: list[int]) -> str:
        """How the unit is made up: "MB = 1000 · 1024 B"."""
        return f"{self.unit} = {' · '.join(map(str, factors))} B" if factors else ""

    def agrees(self, value: Value, size: Fraction) -> bool:
        """Whether the value, in a unit of this size, is the number to its last digit."""
        if self.is_sentence or isinstance(value, bool):
            return self.is_sentence and value is (self.text == "yes")
        relation, low, high, _ = self._parts
        if relation:
            return (value > Fraction(low) * size) is (relation == ">") and value != Fraction(low) * size
        half = self.digit * size / 2
        return Fraction(low) * size - half <= value <= Fraction(high or low) * size + half

    def is_between(self, value: Value) -> bool:
        """Whether the number is one of bytes, between what the value is in powers of 1024 and of 1000."""
        if self.unit not in TIMES or self._parts[0]:
            return False
        times = TIMES[self.unit]
        return value / 1024**times < Fraction(self._parts[1]) < value / 1000**times

    def is_cut_short(self, value: Value, size: Fraction) -> bool:
        """Whether the value differs in the last digit alone: by less than 1 there, or by 2 and not by a hundredth.

        A count of things is exact, and never is.
        """
        if self.is_sentence or self._parts[0] or self._parts[2]:
            return False
        exact = not self.unit and self.digit == 1 and value.denominator == 1
        number = Fraction(self._parts[1])
        off = abs(value / size - number)
        return not exact and (off < self.digit or (off <= 2 * self.digit and 100 * off <= number))

    def show(self, value: Value) -> str:
        """A value as a person reads it."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.in_bytes:
            return f"{round(value):,} B"
        if self.unit == "%":
            return f"{float(value * 100):.2f} %"
        return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.4g}"


@dataclass(frozen=True)
class Claim:
    """A row of a ledger; the module says what each field holds."""

    id: str
    place: str
    claim: str
    stated: str
    verdict: str
    reason: str
    value: tuple[str, ...] = ()
    inputs: str = ""
    against: tuple[str, ...] = ()
    source: str = ""
    proof: str = ""


@dataclass(frozen=True)
class Finding:
    """A row, recomputed.

    Attributes:
        claim: The row.
        values: What it recomputes to; of readings, all.
        basis: What the stated unit has to mean for the verdict, such as "KB = 1024 B"; empty if it does not matter.
        verdict: By the rule.
        reason: The row's, its numbers filled in.
    """

    claim: Claim
    values: tuple[Value, ...]
    basis: str
    verdict: str
    reason: str

    @property
    def changed(self) -> bool:
        """The ledger says something else."""
        return self.verdict != self.claim.verdict

    @property
    def text(self) -> str:
        """The values as a person reads them."""
        return " or ".join(map(Stated(self.claim.stated).show, self.values))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the row, its `values` as exact fractions, and both verdicts, by the rule and as `stored`."""
        values = [value if isinstance(value, bool) else str(value) for value in self.values]
        found = {"values": values, "text": self.text, "basis": self.basis, "verdict": self.verdict}
        found["reason"] = self.reason
        row = {**asdict(self.claim), "recompute": list(self.claim.value), "against": list(self.claim.against)}
        del row["value"]
        return {**row, **found, "stored": self.claim.verdict, "changed": self.changed}


@dataclass(frozen=True)
class Ledger:
    """A document and its claims.

        >>> ledger = eb.Ledger.read(eb.audit.packaged()[0])
        >>> next(ledger.audit()).verdict  # of its first claim, that a linear layer keeps its input
        'holds'

    Attributes:
        document: Its title.
        path: Of the ledger.
        powers: What KB and MB may be powers of where the document does not say.
        names: What expressions may name: numbers and functions.
        claims: The rows.
    """

    document: str
    path: Path
    powers: tuple[int, ...]
    names: Mapping[str, Any]
    claims: tuple[Claim, ...]

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Reads a ledger, and runs the Python file that it names.

        Raises:
            LedgerError: If something in it is missing, unknown or twice there.
            OSError: If there is no such file.
        """
        path = Path(path)
        try:
            head = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LedgerError(f"{path}: not TOML: {error}") from None
        rows = head.pop("claim", None)
        good = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
        if not good or not isinstance(head.get("document"), str):
            raise LedgerError(f"{path}: give it a line document = '...', and a [[claim]] for each claim")
        if unknown := set(head) - {"document", "units", "functions", "given"}:
            raise LedgerError(f"{path}: no such field: {', '.join(sorted(unknown))}; move it above the first [[claim]]")
        powers = head.get("units", [1000, 1024])
        if not isinstance(powers, list) or not powers or not set(powers) <= {1000, 1024}:
            raise LedgerError(f"{path}: units = {powers!r}: [1000], [1024], or both, the likelier first")
        names = {**_FUNCTIONS, **_SIZES}
        if functions := head.get("functions"):
            names |= _functions(path, path.parent / str(functions))
        for name, number in head.get("given", {}).items():
            names[name] = _number(f"{path}: given {name}", number)
        claims, seen = [], set()
        for place, row in enumerate(rows, 1):
            claim = _claim(f"{path}: claim {row.get('id', f'number {place}')}", row)
            if claim.id in seen:
                raise LedgerError(f"{path}: claim {claim.id} is there twice: give one another id")
            seen.add(claim.id)
            claims.append(claim)
        ledger = cls(head["document"], path, tuple(powers), names, tuple(claims))
        for claim in claims:
            if missing := [other for other in claim.against if other not in seen]:
                raise LedgerError(f"{path}: claim {claim.id}: against {missing[0]!r}, which is no claim's id")
        return ledger

    def audit(self) -> Iterator[Finding]:
        """Recomputes row by row.

        Raises:
            LedgerError: If a row cannot be, or its verdict rests on nothing.
        """
        rows = {claim.id: claim for claim in self.claims}
        for claim in self.claims:
            where = f"{self.path}: claim {claim.id}"
            stated = Stated(claim.stated)
            values = tuple(evaluate(where, text, self.names) for text in claim.value)
            inputs = evaluate(where, claim.inputs, self.names) if claim.inputs else None
            for value in (*values, *([] if inputs is None else [inputs])):
                if stated.is_sentence is not isinstance(value, bool):
                    kind = "is true or false" if isinstance(value, bool) else "is a number"
                    raise LedgerError(f"{where}: stated {claim.stated!r}, but its expression {kind}: mend one of them")
            for other in claim.against:
                if rows[other].stated == claim.stated and rows[other].claim == claim.claim:
                    raise LedgerError(f"{where}: claim {other} says the same: cite one that says something else")
            own = {"value": values[0]} if len(values) == 1 else {}
            own |= {} if inputs is None else {"inputs": inputs}
            reason = _filled(where, claim.reason, {**self.names, **own})
            yield Finding(claim, values, *self._judge(where, claim, stated, values, inputs), reason)

    def _judge(
        self, where: str, claim: Claim, stated: Stated, values: tuple[Value, ...], inputs: Value | None
    ) -> tuple[str, str]:
        if len(values) > 1:
            if len(set(values)) == 1:
                raise LedgerError(f"{where}: its readings all give {stated.show(values[0])}: one is enough")
            return "", "cannot be known"
        if not values:
            founded = {"cannot be known": True, JUDGED[0]: claim.against, JUDGED[1]: claim.source}
            if not founded.get(claim.verdict):
                raise LedgerError(f"{where}: {claim.verdict!r} needs a value, or else 'against' or 'source'")
            return "", claim.verdict
        (value,) = values
        sizes = stated.sizes(self.powers)
        for basis, size in sizes.items():
            if stated.agrees(value, size):
                matters = not all(stated.agrees(value, other) for other in stated.sizes((1000, 1024)).values())
                return basis if matters else "", "holds"
        for basis, size in stated.mixtures().items():
            if stated.agrees(value, size):
                return basis, "unit mix"
        followed = inputs is not None and any(stated.agrees(inputs, size) for size in sizes.values())
        if claim.verdict in JUDGED and (inputs is None or followed):
            return "", claim.verdict
        if followed and stated.is_between(value):
            return f"{stated.unit} of both kinds", "unit mix"
        if any(stated.is_cut_short(value, size) for size in sizes.values()):
            return "", "rounding"
        return "", JUDGED[0] if followed else "arithmetic slip"


PACKAGED: Final = ("activation_memory_math", "tft_memory_analysis")


def packaged() -> list[Path]:
    """The ledgers of the two analyses that the book takes apart."""
    folder = Path(str(resources.files(__package__))) / "claims"
    return [folder / f"{name}.toml" for name in PACKAGED]


def _claim(where: str, row: Mapping[str, Any]) -> Claim:
    known = [field.name for field in fields(Claim)]
    if unknown := [name for name in row if name not in known]:
        raise LedgerError(f"{where}: no such field: {unknown[0]}; there are {', '.join(known)}")
    if missing := [name for name in known[:6] if name not in row]:
        raise LedgerError(f"{where}: {missing[0]} is missing: write {missing[0]} = '...'")
    entries = dict(row)
    for name, entry in row.items():
        texts = entry if isinstance(entry, list) and name in ("value", "against") else [entry]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise LedgerError(f"{where}: {name} = {entry!r}: write it as text in quotation marks")
        if name in ("value", "against"):
            entries[name] = tuple(texts)
    if row["verdict"] not in VERDICTS:
        raise LedgerError(f"{where}: verdict = {row['verdict']!r}: one of {', '.join(VERDICTS)}")
    try:
        Stated(row["stated"])
    except ValueError as error:
        raise LedgerError(f"{where}: {error}") from None
    return Claim(**entries)


def _functions(ledger: Path, path: Path) -> dict[str, Callable[..., Any]]:
    if not path.is_file():
        raise LedgerError(f"{ledger}: there is no {path}: functions = 'file.py' names a file beside the ledger")
    spec = spec_from_file_location(f"everybyte_ledger_{path.stem}", path)
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise LedgerError(f"{ledger}: {path.name} does not run: {type(error).__name__}: {error}") from None
    return {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}


def _filled(where: str, reason: str, names: Mapping[str, Any]) -> str:
    """A reason, each `{expression:format}` in it replaced by its value."""

    def number(found: re.Match[str]) -> str:
        value = evaluate(where, found[1], names)
        if isinstance(value, bool):
            raise LedgerError(f"{where}: {found[0]!r} in its reason is true or false, and no number")
        try:
            return format(int(value) if value.denominator == 1 else float(value), found[2] or "")
        except ValueError as error:
            raise LedgerError(f"{where}: {found[0]!r} in its reason: {error}") from None

    if "{" in (rest := _PLACE.sub("", reason)) or "}" in rest:
        raise LedgerError(f"{where}: reason = {reason!r}: braces hold an expression and, after a colon, its format")
    return _PLACE.sub(number, reason)


# -- expressions -------------------------------------------------------------------------------------------------------

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max}
_OPERATORS: Final[Mapping[type, Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
LARGEST_POWER: Final = 64
LARGEST: Final = 10**100


def evaluate(where: str, text: str, names: Mapping[str, Any]) -> Value:
    """The exact value of an expression: arithmetic, comparisons, names and calls of functions that are given.

    Raises:
        LedgerError: If it is none, or has no value.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # 2or 3
            tree = ast.parse(text.strip(), mode="eval")
        return _number(where, _value(tree.body, names))
    except LedgerError:
        raise
    except SyntaxError as error:
        raise LedgerError(f"{where}: {text!r} is no expression: {error.msg}") from None
    except (Exception, SystemExit) as error:  # whatever the ledger's functions raise
        raise LedgerError(f"{where}: {text!r}: {error or type(error).__name__}") from None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=str() | bool() as constant):
            return constant
        case ast.Constant(value=int() | float() as constant):
            return Fraction(str(constant))
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"no name {name!r}: put it under given, or define it in the file of functions")
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            x, y = Fraction(_value(left, names)), Fraction(_value(right, names))
            if isinstance(op, ast.Pow):
                if y.denominator != 1 or abs(y) > LARGEST_POWER:
                    raise ValueError(f"a power is a whole number up to {LARGEST_POWER}, not {y}")
                y = int(y)
            result = _OPERATORS[type(op)](x, y)
            if max(abs(result.numerator), result.denominator) > LARGEST:
                raise ValueError("a number too large for any document")
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _OPERATORS for op in ops):
            sides = [_value(side, names) for side in (left, *rights)]
            return all(_OPERATORS[type(op)](x, y) for op, x, y in zip(ops, sides, sides[1:], strict=False))
        case ast.BoolOp(op=op, values=sides):
            return (all if isinstance(op, ast.And) else any)(_value(side, names) for side in sides)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            function = _value(ast.Name(name), names)
            if not callable(function):
                raise ValueError(f"{name} is a number, not a function")
            plain = [_plain(_value(arg, names)) for arg in args]
            return function(*plain, **{key.arg: _plain(_value(key.value, names)) for key in keywords})
    raise ValueError("only numbers, names, + - * / // % **, comparisons, and, or, and calls are understood")


def _plain(value: Any) -> Any:
    """A whole number as an int, which functions of sizes want."""
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else value


def _number(where: str, value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if inspect.isroutine(value) or not isinstance(value, int | float | Fraction) or not math.isfinite(value):
        raise LedgerError(f"{where}: {value!r} is no number")
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)
