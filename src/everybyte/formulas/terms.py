"""What all formulas are made of: named terms in shared symbols, one source for the page, the code and a page's script.

    b batch        s sequence      h hidden         a heads         a_kv heads that keys and values have
    L layers       V vocabulary    d_ff MLP width   d_head width of a head
    p_max positions that have an embedding          P parameters
    e bytes of one element         m of one element of a dropout mask         r of one statistic of LayerNorm
    g bytes of the random state that a fused attention kernel keeps

A formula is a sympy expression in bytes, or a `Terms`: its summands, each with a name.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import sympy as sp
from sympy import Expr, Symbol
from sympy.printing.latex import LatexPrinter

b, s, h, a, a_kv, L, V, d_ff, d_head = sp.symbols("b s h a a_kv L V d_ff d_head", positive=True, integer=True)
p_max, P, e, m, r = sp.symbols("p_max P e m r", positive=True, integer=True)
g = sp.Symbol("g", nonnegative=True, integer=True)

Terms = dict[str, Expr]

HIDDEN: Final[Expr] = b * s * h
"""Elements of a tensor of hidden states, [b, s, h]."""

SCORES: Final[Expr] = b * a * s**2
"""Elements of all heads' attention scores, [b, a, s, s]."""

WIDTHS: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

LARGEST: Final = 2**63 - 1
"""The most bytes that PyTorch can count: it keeps sizes as signed 64-bit integers."""

_READING_ORDER: Final = (e, m, r, L, a, a_kv, s, b, h, d_ff, d_head, V)
"""As the field writes a product: 34 s b h, 5 a s² b. Other symbols follow in alphabetical order."""

_LARGE: Final = (s, h, V, d_ff, d_head, p_max, P)
"""The sizes that run to thousands, by whose powers a sum is sorted; batch, heads, layers and widths are small."""


def total(terms: Mapping[str, Any] | Expr) -> Expr:
    """Sum of all terms, however deep, multiplied out."""
    return sp.expand(sum(map(total, terms.values()), sp.S.Zero) if isinstance(terms, Mapping) else sp.sympify(terms))


def width(element: Any) -> int:
    """Bytes of one element.

    Args:
        element: The bytes themselves, or the name of a dtype as PyTorch spells it ("bfloat16"), or the dtype.

    Raises:
        ValueError: If there is no such dtype.
    """
    if isinstance(element, int):
        return whole("element", element)
    name = str(element).removeprefix("torch.")
    if name not in WIDTHS:
        raise ValueError(f"element={element!r}: give its bytes, or one of {', '.join(WIDTHS)}")
    return WIDTHS[name]


def whole(name: Any, size: Any, least: int = 1) -> int:
    """`size` as an exact integer.

    Raises:
        ValueError: If it is a bool, no integer, below `least`, or more than 64 bits can say.
    """
    try:
        number = operator.index(size)
    except TypeError:
        number = None
    if number is None or isinstance(size, bool) or not least <= number <= LARGEST:
        raise ValueError(f"{name}={size!r}: must be an integer from {least} to 2**63 - 1")
    return number


def expression(name: str, size: Any) -> Expr:
    """A size in a formula, which may stay a symbol or be made of some.

    Raises:
        ValueError: If it is a number, and no positive integer.
    """
    return size if isinstance(size, Expr) and size.free_symbols else sp.Integer(whole(name, size))


def choose(name: str, word: str, words: Iterable[str]) -> None:
    """Raises ValueError if the word is none of those."""
    if word not in (words := tuple(words)):
        raise ValueError(f"{name}={word!r}: choose one of {', '.join(map(repr, words))}")


def present(terms: Mapping[str, Any]) -> Terms:
    """Without what a switch turns off, which is what is 0."""
    return {name: term for name, term in terms.items() if term != 0}


def integer(terms: Mapping[str, Any] | Expr, sizes: Mapping[Symbol, int]) -> int:
    """Exact bytes, once all symbols have numbers.

        >>> from everybyte.formulas import terms, transformer
        >>> layer = transformer.paper(transformer.layer())
        >>> terms.total(layer)  # an element has e bytes, 2 in bf16, and a mask m, 1
        2*a*b*e*s**2 + a*b*m*s**2 + 16*b*e*h*s + 2*b*h*m*s
        >>> terms.integer(layer, transformer.sizes(batch=4, sequence=2048, hidden=2048, heads=16))
        1912602624

    Args:
        terms: A formula; of several terms, their sum.
        sizes: A positive integer for each symbol; 0 too, for a symbol that says so. More symbols do no harm.

    Raises:
        ValueError: If a symbol has no number or not such a one, or the result is no count of bytes: a fraction,
            negative, or past 2**63 - 1.
    """
    for symbol in sizes:
        if not isinstance(symbol, Symbol):
            raise ValueError(f"{symbol!r}: sizes belong to symbols, as everybyte.formulas.terms defines them")
    numbers = {x: sp.Integer(whole(x, size, least=1 if x.is_positive else 0)) for x, size in sizes.items()}
    result = total(terms).xreplace(numbers)
    if result.free_symbols:
        raise ValueError(f"no size for {', '.join(sorted(map(str, result.free_symbols)))}: give one for each symbol")
    if not result.is_Integer:
        raise ValueError(f"{result} is no whole number of bytes: one of the sizes must divide another, as a divides h")
    if not 0 <= result <= LARGEST:
        raise ValueError(f"{result} is no number of bytes: it must lie from 0 to 2**63 - 1")
    return int(result)


def integers(terms: Mapping[str, Any], sizes: Mapping[Symbol, int]) -> dict[str, int]:
    """Exact bytes of each term, by name, as `integer` counts them."""
    return {name: integer(term, sizes) for name, term in terms.items()}


def most(moments: Mapping[str, Terms], sizes: Mapping[Symbol, int]) -> Terms:
    """The moment at which, with these sizes, most is live."""
    return max(moments.values(), key=lambda terms: integer(terms, sizes))


def latex(terms: Mapping[str, Any] | Expr) -> str:
    """For the page: one expression, or an aligned sum in which each row has its name and the last line is the total.

    Symbols stand in the field's order, 34 s b h and not 34 b h s, and so do summands: what grows fastest with the large
    sizes first, of those the lowest power of s, so 34 s b h + 5 a s² b + 16 s b.
    """
    if not isinstance(terms, Mapping):
        return _Latex().doprint(sp.sympify(terms))
    rows = [rf"&{_Latex().doprint(total(term))} && \text{{{_text(name)}}}" for name, term in terms.items()]
    summed = rf"={{}} &{_Latex().doprint(total(terms))} && \text{{in all}}"
    return "\n".join([r"\begin{aligned}", " \\\\\n+{} ".join(rows) + r" \\", summed, r"\end{aligned}"])


def javascript(terms: Mapping[str, Any] | Expr, name: str = "bytes") -> str:
    """For a page's own script: the source of a function from an object of sizes to exact bytes.

    All arithmetic is in BigInt, so no count is rounded; `Number(x)` is exact below 2**53, about 9 PB. Where `integer`
    raises, it throws a RangeError. A size may be a BigInt, or a Number below 2**53.

    Args:
        terms: A formula. Of several terms the function returns an object, by name; of one expression a BigInt.
        name: Of the function.

    Raises:
        ValueError: If `name` is no identifier, or the formula has a function that is not translated.
    """
    return "\n".join([f"function {_identifier(name)}(sizes) {{", _HELPERS, *_body(terms), "}"])


def javascripts(formulas: Mapping[str, Mapping[str, Any] | Expr], name: str) -> str:
    """The source of a constant: an object that has, under each key, a function as `javascript` makes it."""
    numbers: dict[str, int] = {}
    keys = {key: numbers.setdefault("\n".join(_body(terms)), len(numbers)) for key, terms in formulas.items()}
    functions = [f"const f{number} = (sizes) => {{\n{body}\n}};" for body, number in numbers.items()]
    names = ", ".join(f"{_string(key)}: f{number}" for key, number in keys.items())
    return "\n".join(
        [f"const {_identifier(name)} = (() => {{", _HELPERS, *functions, f"return {{ {names} }};", "})();"]
    )


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_$][\w$]*", name, re.ASCII):
        raise ValueError(f"name={name!r}: not an identifier of JavaScript")
    return name


def _body(terms: Mapping[str, Any] | Expr) -> list[str]:
    """A function's body: sizes checked and made BigInt, and the result."""
    parts = {key: total(term) for key, term in terms.items()} if isinstance(terms, Mapping) else {"": total(terms)}
    symbols = sorted(set().union(*(part.free_symbols for part in parts.values())), key=_reading)
    sizes = [f'  const {x} = size(sizes, "{x}", {1 if x.is_positive else 0});' for x in symbols]
    if not isinstance(terms, Mapping):
        return [*sizes, f"  return count({_script(parts[''])});"]
    lines = [f"    {_string(key)}: count({_script(part)})," for key, part in parts.items()]
    return [*sizes, "  return {", *lines, "  };"]


_HELPERS: Final = """\
  const size = (sizes, name, least) => {
    const x = sizes[name];
    const exact = typeof x === "bigint" || Number.isSafeInteger(x);
    if (!exact || x < least) throw new RangeError(`${name}=${x}: must be an integer from ${least}`);
    return BigInt(x);
  };
  const divide = (x, y) => {
    if (x % y) throw new RangeError(`${x} / ${y} is no whole number of bytes`);
    return x / y;
  };
  const ceil = (x, y) => (x > 0n ? (x - 1n) / y + 1n : x / y);
  const max = (...all) => all.reduce((x, y) => (x > y ? x : y));
  const count = (x) => {
    if (x < 0n || x >= 2n ** 63n) throw new RangeError(`${x} is no number of bytes`);
    return x;
  };"""


def _script(x: Expr) -> str:
    """An expression in BigInt. Fractions are brought together first, since only their sum need be whole."""
    numerator, denominator = sp.fraction(sp.together(x))
    if denominator != 1:
        return f"divide({_script(numerator)}, {_script(denominator)})"
    if x.is_Integer:
        return f"{x}n"
    if x.is_Symbol:
        return str(x)
    if x.is_Add:
        return f"({' + '.join(map(_script, x.args))})"
    if x.is_Mul:
        return " * ".join(f"({_script(factor)})" if factor.is_negative else _script(factor) for factor in x.args)
    if x.is_Pow and x.exp.is_Integer:
        return f"({_script(x.base)}) ** {x.exp}n"
    if isinstance(x, sp.Max):
        return f"max({', '.join(map(_script, x.args))})"
    if isinstance(x, sp.ceiling):
        return f"ceil({', '.join(map(_script, sp.fraction(sp.together(x.args[0]))))})"
    raise ValueError(f"{x} is not translated to JavaScript: use +, *, /, whole powers, ceiling and Max")


class _Latex(LatexPrinter):
    """Prints factors and summands in the field's order."""

    def __init__(self) -> None:
        super().__init__({"order": "none"})

    def _print_Mul(self, expr: Expr) -> str:
        numerator, denominator = sp.fraction(expr)
        if denominator != 1:
            return rf"\frac{{{self._print(numerator)}}}{{{self._print(denominator)}}}"
        return super()._print_Mul(sp.Mul(*sorted(expr.args, key=_reading), evaluate=False))

    def _print_Add(self, expr: Expr, order: Any = None) -> str:
        return super()._print_Add(sp.Add(*sorted(expr.args, key=_weight), evaluate=False), order)


def _weight(summand: Expr) -> tuple[int, int, str]:
    powers = summand.as_powers_dict()
    return -sum(powers.get(size, 0) for size in _LARGE), powers.get(s, 0), str(summand)


def _reading(factor: Expr) -> tuple[bool, int, str]:
    base = factor.base if factor.is_Pow else factor
    known = _READING_ORDER.index(base) if base in _READING_ORDER else len(_READING_ORDER)
    return not base.is_number, known, str(base)


def _text(name: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", name)


def _string(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
