"""Terms in numbers, in LaTeX and in JavaScript: exact, or a clear error."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from everybyte.formulas import terms as terms_module
from everybyte.formulas import transformer
from everybyte.formulas.terms import (
    P,
    V,
    a,
    a_kv,
    b,
    d_head,
    e,
    g,
    h,
    integer,
    integers,
    javascript,
    latex,
    m,
    r,
    s,
    total,
    width,
)

SIZES = {b: 4, s: 2048, h: 2048, a: 16}
PUBLISHED = {"linear": 34 * s * b * h, "quadratic": 5 * a * s**2 * b}


def test_an_integer_is_exact_where_a_float_would_round():
    assert integer(b * s + 1, {b: 2**31, s: 2**31}) == 2**62 + 1
    assert integer(PUBLISHED, SIZES) == 1_912_602_624
    assert integer({"deep": PUBLISHED, "flat": sp.Integer(1)}, SIZES) == 1_912_602_625
    assert type(integer(P, {P: sp.Integer(7)})) is int
    assert integers(PUBLISHED, SIZES) == {"linear": 570_425_344, "quadratic": 1_342_177_280}


@pytest.mark.parametrize(
    ("formula", "sizes", "message"),
    [
        (b * s, {b: 1}, "no size for s"),
        (b * s, {b: 0, s: 1}, "b=0: must be an integer from 1"),
        (b * s, {b: -3, s: 1}, "b=-3: must be an integer from 1"),
        (b * s, {b: 1.5, s: 1}, "b=1.5: must be"),
        (b * s, {b: 2.0, s: 1}, "b=2.0: must be"),
        (b * s, {b: True, s: 1}, "b=True: must be"),
        (b * s, {b: "2", s: 1}, "b='2': must be"),
        (b * s, {b: 2**63, s: 1}, "must be an integer from 1 to"),
        (b * s, {"b": 1, s: 1}, "'b': sizes belong to symbols"),
        (g, {g: -1}, "g=-1: must be an integer from 0"),
        (h / a, {h: 10, a: 3}, "10/3 is no whole number of bytes"),
        (sp.Float(2.0) * b, {b: 1}, "no whole number of bytes"),
        (b - s, {b: 1, s: 2}, "-1 is no number of bytes"),
        (b * s, {b: 2**32, s: 2**31}, "9223372036854775808 is no number of bytes"),
    ],
)
def test_what_is_no_count_of_bytes_is_refused_in_one_line(formula, sizes, message):
    with pytest.raises(ValueError, match=message) as error:
        integer(formula, sizes)
    assert "\n" not in str(error.value)


def test_the_largest_count_and_a_state_of_no_bytes_are_still_right():
    assert integer(b * s - 1, {b: 2**32, s: 2**31}) == 2**63 - 1
    assert integer(b + g, {b: 1, g: 0}) == 1


def test_widths_are_known_by_dtype_and_unknown_dtypes_are_refused():
    torch = pytest.importorskip("torch")
    names = {name for name in terms_module.WIDTHS if hasattr(torch, name)}
    assert {"bfloat16", "float32", "bool"} <= names
    assert all(width(name) == width(getattr(torch, name)) == getattr(torch, name).itemsize for name in names)
    assert width(3) == 3
    for wrong in ("bf17", 0, True, None, 2.0):
        with pytest.raises(ValueError, match="element="):
            width(wrong)


def test_latex_writes_the_published_sum_as_it_was_published():
    assert latex(PUBLISHED["quadratic"] + PUBLISHED["linear"]) == "34 s b h + 5 a s^{2} b"
    assert latex(e * b * s * h / a) == r"\frac{e s b h}{a}"


def test_latex_puts_first_what_grows_fastest_with_the_large_sizes():
    assert latex(16 * s * b + 5 * a * s**2 * b + 34 * s * b * h) == "34 s b h + 5 a s^{2} b + 16 s b"
    assert latex(8 * s * b + 4 * s * b * V + 2 * s * b * h + 4) == "2 s b h + 4 s b V + 8 s b + 4"
    assert latex(sp.Rational(16, 5) / a + sp.Rational(34, 5) * d_head) == r"\frac{34 d_{head}}{5} + \frac{16}{5 a}"
    assert latex(h / a + sp.ceiling(s / 32)) == r"\frac{h}{a} + \left\lceil{\frac{s}{32}}\right\rceil"


def test_latex_gives_each_term_a_row_and_a_name_and_ends_with_their_sum():
    assert latex({"scores & masks": 5 * a * s**2 * b, "the rest": 34 * s * b * h}).splitlines() == [
        r"\begin{aligned}",
        r"&5 a s^{2} b && \text{scores \& masks} \\",
        r"+{} &34 s b h && \text{the rest} \\",
        r"={} &34 s b h + 5 a s^{2} b && \text{in all}",
        r"\end{aligned}",
    ]


NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def run_javascript(source: str, tmp_path: Path) -> str:
    """What a script's last expression is, as text, by whatever can run one here."""
    if NODE:
        script = f"{source.rstrip()}"
        body, _, last = script.rpartition("\n")
        command = [NODE, "-e", f"{body}\nconsole.log({last})"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if CHROMIUM:
        body, _, last = source.rstrip().rpartition("\n")
        page = tmp_path / "page.html"
        page.write_text(f"<pre></pre><script>{body}\ndocument.querySelector('pre').textContent = {last};</script>")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return dom.split("<pre>")[1].split("</pre>")[0].strip()
    pytest.skip("neither node nor chromium is here to run JavaScript")


def in_javascript(formula, cases: list[dict], tmp_path: Path) -> list:
    """The function's result for each case as text; null where it throws a RangeError."""
    calls = ", ".join("{" + ", ".join(f"{x}: {size}n" for x, size in case.items()) + "}" for case in cases)
    refused = "if (error instanceof RangeError) return null; throw error;"
    attempt = f"(x) => {{ try {{ return show(f(x)); }} catch (error) {{ {refused} }} }}"
    show = 'const show = (x) => JSON.parse(JSON.stringify(x, (_, y) => typeof y === "bigint" ? y.toString() : y));'
    source = f"{javascript(formula, 'f')}\n{show}\nJSON.stringify([{calls}].map({attempt}))"
    return json.loads(run_javascript(source, tmp_path))


FORMULAS = {
    "published": PUBLISHED["linear"] + PUBLISHED["quadratic"],
    "named": PUBLISHED,
    "a fraction whose sum is whole": b * (b + 1) / 2 + (h - b) ** 2 / a + (s + a) * h / a,
    "blocks, rounded up": 4 * sp.ceiling(P / 64) + sp.ceiling(P * b / (2 * a)) * (e - m),
    "the larger of two": sp.Max(b * s, h * a) - sp.Min(1, 0) - b,
    "a decoder's layer, row by row": transformer.layer(attention="flash", kv_heads=a_kv),
    "a chunked loss head": transformer.head_moments("chunked")["backward of the product"],
    "a constant": sp.Integer(2) ** 62 + g,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_javascript_really_run_gives_the_same_integers_and_the_same_refusals(name, tmp_path):
    symbols = [b, s, h, a, a_kv, V, e, m, r, P, g]
    cases: list[dict] = []

    @settings(max_examples=50)
    @given(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 2**40)), min_size=11, max_size=11))
    def collect(numbers):
        cases.append(dict(zip(symbols, numbers, strict=True)))

    collect()

    def expected(formula, case):
        try:
            return str(integer(formula, case))
        except ValueError:
            return None

    formula = FORMULAS[name]
    if isinstance(formula, dict):
        here = [{key: expected(term, case) for key, term in formula.items()} for case in cases]
        here = [None if None in case.values() else case for case in here]
    else:
        here = [expected(formula, case) for case in cases]
    assert any(case is not None for case in here)
    assert in_javascript(formula, cases, tmp_path) == here


@pytest.mark.parametrize("size", ["0", "-1n", "1.5", "true", '"4"', "2 ** 53", "undefined", "NaN"])
def test_javascript_throws_on_a_size_that_is_none(size, tmp_path):
    attempt = f"(() => {{ try {{ return f({{b: {size}}}); }} catch (error) {{ return error.name; }} }})()"
    assert run_javascript(f"{javascript(b, 'f')}\n{attempt}", tmp_path) == "RangeError"
    assert run_javascript(f"{javascript(b, 'f')}\nf({{b: 2 ** 53 - 1}}).toString()", tmp_path) == str(2**53 - 1)


def test_javascript_refuses_what_it_cannot_say():
    with pytest.raises(ValueError, match="name='1 x'"):
        javascript(b, "1 x")
    for formula in (sp.sqrt(b), sp.Function("f")(b), sp.Float(0.5) * b, sp.floor(b / 2)):
        with pytest.raises(ValueError, match="not translated to JavaScript"):
            javascript(formula)


def test_total_is_the_sum_however_deep_and_of_nothing_zero():
    assert total({"x": {"y": b, "z": {"w": s}}, "v": d_head}) == b + s + d_head
    assert total({}) == 0 and total(7) == 7


@pytest.mark.parametrize("path", sorted(Path(terms_module.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_formulas_import_neither_torch_nor_anything_of_ours_but_each_other(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            imported |= set() if node.level else {node.module.split(".")[0]}
    assert imported <= {"__future__", "collections", "dataclasses", "operator", "re", "typing", "sympy"}
