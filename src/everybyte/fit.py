"""Formula discovery: traces a model at several sizes and finds the polynomial that gives its bytes at all of them.

Tensors are products of sizes, so their bytes are a polynomial in the sizes until something rounds a size or branches on
one. Interpolation in exact arithmetic finds the polynomial; traces that it was not made from confirm or refute it.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Final

import sympy as sp

from .saved import saved
from .trace import Trace, active, trace

Sizes = tuple[int, ...]

QUANTITIES: Final = ("saved", "peak", "peak above start")
_ROUNDS: Final = 2  # combinations drawn by chance in which each value is tried


def fit_formula(
    build: Callable[..., Callable[[], Any]],
    quantity: str = "saved",
    rules: str = "cuda",
    degree: int | Mapping[str, int] = 2,
    **values: Iterable[int],
) -> sp.Expr:
    """Finds the exact polynomial of saved or peak bytes in the sizes of a model.

        >>> def build(b, h):
        ...     layer, x = torch.nn.Linear(h, h), torch.ones(b, h)
        ...     return lambda: layer(x)
        >>> eb.fit_formula(build, rules="cpu", b=[1, 2, 3], h=[4, 8, 12])
        4*b*h

    Each value is traced with all other sizes at their largest, and in two combinations drawn by chance (the same ones
    each time); so is the combination of all the smallest. The polynomial is made from the largest sizes, as few as the
    powers that show there need, and gives the traced bytes at all the others too. For sizes between and beyond them
    that is evidence and no proof: a branch that none of the values crosses, or a rounding that none of them needs
    (multiples of 64 where it goes by 64), stays unseen. Give odd values too, and the extremes that matter; 1 is often a
    branch of its own, where no copy is needed.

    Args:
        build: Called with one value for each size, inside a trace of its own. It makes model and data there and returns
            the step, a function of no arguments: for "saved" a forward pass that returns its output, as in
            `everybyte.saved`; for a peak whatever is to be run once, such as a whole training step. Every combination
            of the values must be possible.
        quantity: "saved": what autograd keeps, parameters left out. "peak": the most requested bytes that are live at
            once, model and data included (`Timeline.peak_bytes`). "peak above start": the same less what was live when
            the step began (`Timeline.peak_above_start`). An optimizer's state appears in its first step: to see a
            later one let `build` take the first. A peak is a polynomial only while it stays at one place in the step,
            and is without what kernels take that no rule derives (`Trace.left_out`).
        rules: Whose kernels' rules decide, as in `everybyte.trace`.
        degree: The highest power that any one size may have, or one for each size by name: `b*a*s**2` has
            `{"b": 1, "a": 1, "s": 2}`. By default 2. A size's values limit its power too: one of k values, which leave
            one to check with, has at most k - 2.
        **values: The sizes by name, with at least three values each (two where `degree` is 0).

    Returns:
        The polynomial, expanded, with rational coefficients. Its symbols bear the sizes' names and are positive
        integers, as those of `everybyte.formulas` are, so that fitted less computed simplifies to 0. For numbers name
        the symbols, `polynomial.subs({formulas.ops.b: 4})`: sympy takes the text "b" for another symbol.

    Raises:
        ValueError: If no polynomial of that degree fits (it says where it breaks), values do not suffice to find and
            check one, `build` or its step fails, or the bytes depend on something that the trace does not know.
        TypeError: If an argument is of the wrong kind.
    """
    if not callable(build):
        raise TypeError(f"build={build!r}: give a function of the sizes that returns a step")
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity={quantity!r}: choose one of {', '.join(map(repr, QUANTITIES))}")
    if active() is not None:
        raise ValueError("fit_formula makes traces of its own, which do not nest: call it outside the trace")
    trace(rules=rules)  # refuses unknown rules
    candidates = _candidates(values)
    limits = _limits(degree, candidates)

    traces = _Traces(build, quantity, rules, tuple(candidates))
    columns = list(candidates.values())
    limit = tuple(limits.values())
    seen = tuple(_power_alone(traces, columns, size, limit) for size in range(len(columns)))
    held_out = _held_out(columns)
    for powers in dict.fromkeys((seen, limit)):  # a leading coefficient may vanish just at the largest sizes
        polynomial = _through(traces, [column[: power + 1] for column, power in zip(columns, powers, strict=True)])
        broken = _first_break(traces, polynomial, [*traces.nbytes, *held_out])
        if broken is None:
            return polynomial.as_expr()
    raise _no_polynomial(traces, polynomial, broken, columns, limit)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _candidates(values: Mapping[str, Iterable[int]]) -> dict[str, Sizes]:
    """The values of each size, largest first."""
    if not values:
        raise ValueError("no sizes: give each one's values by its name, such as b=[1, 2, 3], s=[8, 16, 24, 40]")
    candidates = {}
    for name, column in values.items():
        if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
            raise TypeError(f"{name}={column!r}: give a list of sizes, such as {name}=[1, 2, 3]")
        sizes = [_whole(name, value) for value in column]
        if any(size < 1 for size in sizes):
            raise ValueError(f"{name}={sizes}: sizes are positive; leave {min(sizes)} out")
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"{name}={sizes}: a value is there twice; give each once")
        candidates[name] = tuple(sorted(sizes, reverse=True))
    return candidates


def _limits(degree: int | Mapping[str, int], candidates: Mapping[str, Sizes]) -> dict[str, int]:
    """The highest power of each size that is asked for and that its values can determine and check."""
    if isinstance(degree, Mapping):
        if set(degree) != set(candidates):
            raise ValueError(
                f"degree={dict(degree)}: give the highest power of each of {', '.join(candidates)}, and of nothing else"
            )
        asked = {name: _whole(f"degree of {name}", degree[name]) for name in candidates}
    else:
        asked = dict.fromkeys(candidates, _whole("degree", degree))
    for name, power in asked.items():
        if power < 0:
            raise ValueError(f"degree={degree!r}: a power is 0 or more")
        needed, given = 2 + min(power, 1), len(candidates[name])
        if given < needed:
            raise ValueError(
                f"{name}={sorted(candidates[name])}: give at least {needed} values, so that one is left to check the "
                "formula with; a size with one value belongs into build"
            )
    return {name: min(power, len(candidates[name]) - 2) for name, power in asked.items()}


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: {value!r} is no whole number")


# -- traces ------------------------------------------------------------------------------------------------------------


class _Traces:
    """The bytes at each combination of sizes, each traced once."""

    def __init__(self, build: Callable[..., Any], quantity: str, rules: str, names: tuple[str, ...]) -> None:
        self._build, self.quantity, self._rules, self._names = build, quantity, rules, names
        self.symbols = tuple(sp.Symbol(name, positive=True, integer=True) for name in names)
        self.nbytes: dict[Sizes, int] = {}

    def __call__(self, sizes: Sizes) -> int:
        if sizes not in self.nbytes:
            self.nbytes[sizes] = self._trace(sizes)
        return self.nbytes[sizes]

    def named(self, sizes: Sizes) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self._names, sizes, strict=True))

    def _trace(self, sizes: Sizes) -> int:
        run = trace(rules=self._rules)
        try:
            nbytes = self._run(run, dict(zip(self._names, sizes, strict=True)))
        except Exception as error:
            reason = str(error).partition("\n")[0]  # of PyTorch's own errors, without their C++ frames
            raise ValueError(f"at {self.named(sizes)}: {type(error).__name__}: {reason}") from error
        if run.conditional:
            raise ValueError(
                f"at {self.named(sizes)}: a value that a trace does not have decides a branch at "
                f"{', '.join(run.conditional)}, and may change the bytes; take the branch out of the step"
            )
        if run.not_covered:
            raise ValueError(
                f"at {self.named(sizes)}: the step uses what the rules {self._rules!r} do not cover, "
                f"{', '.join(sorted(run.not_covered))}, and a real run may take other bytes; leave it out"
            )
        return nbytes

    def _run(self, run: Trace, sizes: dict[str, int]) -> int:
        with run:
            step = self._build(**sizes)
            if not callable(step):
                raise TypeError(f"build returned {type(step).__name__}: return the step, a function of no arguments")
            if self.quantity == "saved":
                return saved(step).total_bytes
            for _ in run.steps(1):
                step()
        timeline = run.timeline
        return timeline.peak_bytes if self.quantity == "peak" else timeline.peak_above_start


# -- the polynomial ----------------------------------------------------------------------------------------------------


def _through(traces: _Traces, nodes: Sequence[Sizes]) -> sp.Poly:
    """The polynomial through every combination of `nodes`, of one power less in each size than it has nodes."""

    def interpolated(fixed: Sizes) -> sp.Expr:
        if len(fixed) == len(nodes):
            return sp.Integer(traces(fixed))
        size = len(fixed)
        below = [interpolated((*fixed, node)) for node in nodes[size]]
        return sp.expand(sp.interpolating_poly(len(below), traces.symbols[size], nodes[size], below))

    return sp.Poly(interpolated(()), *traces.symbols)


def _power_alone(traces: _Traces, columns: Sequence[Sizes], size: int, limit: Sizes) -> int:
    """The power of one size while all others are at their largest.

    Raises:
        ValueError: If no polynomial within the limit goes through its values: then none does in all sizes together.
    """
    largest = [column[:1] for column in columns]
    nodes = [*largest[:size], columns[size][: limit[size] + 1], *largest[size + 1 :]]
    polynomial = _through(traces, nodes)
    line = [tuple(column[0] for column in (*largest[:size], (value,), *largest[size + 1 :])) for value in columns[size]]
    broken = _first_break(traces, polynomial, line)
    if broken is not None:
        raise _no_polynomial(traces, polynomial, broken, columns, limit)
    return max(0, polynomial.degree(traces.symbols[size]))  # that of 0 is -oo


def _held_out(columns: Sequence[Sizes]) -> list[Sizes]:
    """The combination of all smallest sizes, and some in which each value is met, drawn by chance."""
    chance = random.Random(0)
    points = [tuple(column[-1] for column in columns)]
    for _ in range(_ROUNDS):
        shuffled = [cycle(chance.sample(column, len(column))) for column in columns]
        points += islice(zip(*shuffled, strict=True), max(map(len, columns)))
    return points


def _first_break(traces: _Traces, polynomial: sp.Poly, points: Iterable[Sizes]) -> Sizes | None:
    """The largest sizes at which the polynomial is not what was traced."""
    downwards = sorted(points, key=math.prod, reverse=True)
    return next((sizes for sizes in downwards if polynomial(*sizes) != traces(sizes)), None)


def _no_polynomial(
    traces: _Traces, polynomial: sp.Poly, broken: Sizes, columns: Sequence[Sizes], limit: Sizes
) -> ValueError:
    highest = [str(symbol**power) for symbol, power in zip(traces.symbols, limit, strict=True) if power]
    moves = "" if traces.quantity == "saved" else ", or the peak moves to another place in the step"
    return ValueError(
        f"no polynomial with powers up to {', '.join(highest) or 'none'} gives the traced bytes. It breaks at "
        f"{traces.named(broken)}: the one that fits larger sizes gives {polynomial(*broken)} B there, the trace "
        f"{traces(broken)} B. Either a size is rounded or decides a branch{moves}, or a power is higher: raise degree, "
        "or give the size more values (k of them allow k - 2)"
    )
