"""From bars to 225 features: 5 static, 10 known in advance, 210 observed, each with its name, family and formula.

The TFT memory report gives the split 5 / 10 / 210 and the words "symbol metadata", "future time features" and "OHLCV +
technical + regime"; the features themselves are this book's choice. Three rules hold for all of them:

* no look-ahead: the value at bar t is made from bars up to t (a *known* one from the date of bar t alone, which the
  exchange publishes in advance, and the date before it);
* no scale: prices enter as ratios and logarithms, so that 1999 and 2018 can be compared;
* at most 60 bars before the first value, the 60 that the report subtracts.

Indicators come from TA-Lib where it has them; its names are kept. In formulas O, H, L, C, V are the bar's open, high,
low, close and volume, r = ln(C / C[-1]), x[-k] the value k bars ago, and mean, std, ... are over the last p bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from functools import cached_property, lru_cache
from types import ModuleType

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view

PRICES = ("open", "high", "low", "close")
COLUMNS = (*PRICES, "volume")

Array = np.ndarray
Compute = Callable[["Bars"], Array]


@dataclass(frozen=True)
class Instrument:
    """Symbol metadata, the five static features; within one symbol they are constant and teach nothing."""

    is_index: float
    is_future: float
    tick_size: float  # smallest price step, in the currency of the prices
    sessions_per_year: float
    session_hours: float


SP500 = Instrument(is_index=1, is_future=0, tick_size=0.01, sessions_per_year=252, session_hours=6.5)


@dataclass(frozen=True)
class Feature:
    """One column: what it is called, how it is made, and how many bars pass before its first value."""

    name: str
    group: str  # static | known | observed
    family: str
    formula: str
    warm_up: int
    compute: Compute


@dataclass(frozen=True)
class Features:
    """The feature table of one symbol, warm-up dropped.

    Attributes:
        frame: one row a bar, one column a feature, in the order of `feature_table`; float64, all finite.
        log_return: ln(C / C[-1]) of the same bars, what a forecast's target is cut from.
        dropped: bars lost to warm-up.
    """

    frame: pd.DataFrame
    log_return: pd.Series
    dropped: int


class Bars:
    """Columns as float64 arrays, and the series that several features share."""

    def __init__(self, frame: pd.DataFrame, instrument: Instrument, talib: ModuleType) -> None:
        self.open, self.high, self.low, self.close, self.volume = (
            frame[name].to_numpy(np.float64, copy=True) for name in COLUMNS
        )
        self.time, self.instrument, self.ta = frame.index, instrument, talib

    @cached_property
    def r(self) -> Array:
        """Log return of each bar; the first is unknown."""
        return difference(np.log(self.close), 1)

    @cached_property
    def range(self) -> Array:
        """ln(H / L)."""
        return np.log(self.high / self.low)

    @cached_property
    def hlc(self) -> tuple[Array, Array, Array]:
        return self.high, self.low, self.close

    def deviation(self, p: int) -> Array:
        """Standard deviation of the last p log returns."""
        return rolling(self.r, p, np.std)


def difference(x: Array, k: int) -> Array:
    """x - x[-k]; the first k are unknown."""
    return np.concatenate([np.full(k, np.nan), x[k:] - x[:-k]])[: len(x)]


def rolling(x: Array, p: int, reduce: Callable[..., Array]) -> Array:
    """``reduce`` over each p values up to and with the bar; the first p - 1 are unknown."""
    if len(x) < p:
        return np.full(len(x), np.nan)
    return np.concatenate([np.full(p - 1, np.nan), reduce(sliding_window_view(x, p), axis=-1)])


def ratio(a: Array, b: Array, where_zero: float = 0.0) -> Array:
    """a / b, and ``where_zero`` where b is nothing: a flat bar has no position within its range."""
    return np.divide(a, b, out=np.where(np.isnan(a + b), np.nan, where_zero), where=~(b == 0) & ~np.isnan(a + b))


def skew(x: Array, axis: int) -> Array:
    """Third standardised moment."""
    return _moment(x, axis, 3)


def kurtosis(x: Array, axis: int) -> Array:
    """Fourth standardised moment."""
    return _moment(x, axis, 4)


def _moment(x: Array, axis: int, order: int) -> Array:
    centred = x - x.mean(axis, keepdims=True)
    return ratio((centred**order).mean(axis), (centred**2).mean(axis) ** (order / 2))


def autocorrelation(x: Array, axis: int) -> Array:
    """Of neighbouring values."""
    centred = x - x.mean(axis, keepdims=True)
    return ratio((centred[..., 1:] * centred[..., :-1]).sum(axis), (centred**2).sum(axis))


def rank_of_last(x: Array, axis: int) -> Array:
    """Share of the window that lies below its last value."""
    return (x < x[..., -1:]).mean(axis)


def age_of_highest(x: Array, axis: int) -> Array:
    """How far back the window's highest value lies, as a share of the window."""
    return x[..., ::-1].argmax(axis) / x.shape[-1]


def age_of_lowest(x: Array, axis: int) -> Array:
    """How far back the window's lowest value lies, as a share of the window."""
    return x[..., ::-1].argmin(axis) / x.shape[-1]


def downside(x: Array, axis: int) -> Array:
    """Root mean square of the falls."""
    return np.sqrt((np.minimum(x, 0) ** 2).mean(axis))


def cycle(x: Array, length: float) -> tuple[Array, Array]:
    """Sine and cosine of a place in a cycle, so that its end meets its start."""
    return np.sin(2 * np.pi * x / length), np.cos(2 * np.pi * x / length)


def _static() -> Iterator[Feature]:
    for field in fields(Instrument):
        name = field.name

        def constant(b: Bars, name: str = name) -> Array:
            return np.full(len(b.close), float(getattr(b.instrument, name)))

        yield Feature(name, "static", "symbol", "constant of the symbol", 0, constant)


def _known() -> Iterator[Feature]:
    def known(name: str, formula: str, compute: Compute, warm_up: int = 0) -> Feature:
        return Feature(name, "known", "calendar", formula, warm_up, lambda b: np.asarray(compute(b), np.float64))

    yield known("weekday_sin", "sin(2π weekday / 5)", lambda b: cycle(b.time.day_of_week, 5)[0])
    yield known("weekday_cos", "cos(2π weekday / 5)", lambda b: cycle(b.time.day_of_week, 5)[1])
    yield known("month_day_sin", "sin(2π day of month / 31)", lambda b: cycle(b.time.day, 31)[0])
    yield known("month_day_cos", "cos(2π day of month / 31)", lambda b: cycle(b.time.day, 31)[1])
    yield known("year_day_sin", "sin(2π day of year / 365.25)", lambda b: cycle(b.time.day_of_year, 365.25)[0])
    yield known("year_day_cos", "cos(2π day of year / 365.25)", lambda b: cycle(b.time.day_of_year, 365.25)[1])
    day = pd.offsets.BDay()
    yield known("month_end", "1 on the month's last weekday", lambda b: (b.time + day).month != b.time.month)
    yield known("month_start", "1 on the month's first weekday", lambda b: (b.time - day).month != b.time.month)
    yield known(
        "expiry",
        "1 on the month's third Friday",
        lambda b: (b.time.day_of_week == 4) & (b.time.day >= 15) & (b.time.day <= 21),
    )
    yield known(
        "closed_days",
        "days since the bar before",
        lambda b: difference(b.time.to_numpy().astype("datetime64[s]").astype(np.float64), 1) / 86_400,
        warm_up=1,
    )


class _Observed:
    """Collects observed features, one or one for each period ``p``, under the family named last."""

    def __init__(self) -> None:
        self.features: list[Feature] = []
        self.family = ""

    def one(self, name: str, formula: str, warm_up: int, compute: Compute) -> None:
        self.features.append(Feature(name, "observed", self.family, formula, warm_up, compute))

    def each(
        self,
        periods: tuple[int, ...],
        name: str,
        formula: str,
        warm_up: Callable[[int], int],
        compute: Callable[[Bars, int], Array],
    ) -> None:
        for p in periods:
            self.one(f"{name}_{p}", formula.replace("{p}", str(p)), warm_up(p), lambda b, p=p: compute(b, p))

    def average(self, function: str, periods: tuple[int, ...], warm_up: Callable[[int], int]) -> None:
        """Distance from one of TA-Lib's moving averages of the close."""
        self.each(
            periods,
            f"{function.lower()}_distance",
            f"ln(C / {function}(C, {{p}}))",
            warm_up,
            lambda b, p: np.log(b.close / getattr(b.ta, function)(b.close, p)),
        )

    def bounded(self, function: str, periods: tuple[int, ...], warm_up: Callable[[int], int], inputs: str) -> None:
        """One of TA-Lib's indicators that runs from 0 or -100 to 100, divided by 100."""
        self.each(
            periods,
            function.lower(),
            f"{function}({', '.join(c[0].upper() for c in inputs.split())}, {{p}}) / 100",
            warm_up,
            lambda b, p: getattr(b.ta, function)(*(getattr(b, c) for c in inputs.split()), p) / 100,
        )


def _observed() -> list[Feature]:
    f = _Observed()

    f.family = "price and volume"
    f.one("gap", "ln(O / C[-1])", 1, lambda b: np.log(b.open) - np.log(b.close) + b.r)
    f.one("body", "ln(C / O)", 0, lambda b: np.log(b.close / b.open))
    f.one("range", "ln(H / L)", 0, lambda b: b.range)
    f.one("upper_wick", "ln(H / max(O, C))", 0, lambda b: np.log(b.high / np.maximum(b.open, b.close)))
    f.one("lower_wick", "ln(min(O, C) / L)", 0, lambda b: np.log(np.minimum(b.open, b.close) / b.low))
    f.one("close_place", "(C - L) / (H - L)", 0, lambda b: ratio(b.close - b.low, b.high - b.low, 0.5))
    f.one("true_range", "TRANGE / C", 1, lambda b: b.ta.TRANGE(*b.hlc) / b.close)
    f.one("volume_change", "ln((1 + V) / (1 + V[-1]))", 1, lambda b: difference(np.log1p(b.volume), 1))
    f.one("abs_return", "|r|", 1, lambda b: np.abs(b.r))
    f.one(
        "signed_volume",
        "sign(r) V / mean(V, 20)",
        19,
        lambda b: _relative(np.sign(np.nan_to_num(b.r)) * b.volume, b, 20),
    )

    f.family = "return"
    lags = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 50, 60)
    f.each(lags, "return", "ln(C / C[-{p}])", lambda p: p, lambda b, p: difference(np.log(b.close), p))

    f.family = "moving average"
    f.average("SMA", (5, 10, 20, 30, 40, 50, 60), lambda p: p - 1)
    f.average("EMA", (5, 10, 20, 30, 40, 50, 60), lambda p: p - 1)
    f.average("DEMA", (5, 10, 20), lambda p: 2 * (p - 1))
    f.average("TEMA", (5, 10, 20), lambda p: 3 * (p - 1))
    f.average("TRIMA", (10, 20, 50), lambda p: p - 1)
    f.average("KAMA", (10, 20, 30), lambda p: p)
    f.average("T3", (5, 8), lambda p: 6 * (p - 1))
    f.average("MIDPOINT", (20, 50), lambda p: p - 1)
    f.one(
        "sma_cross_5_20",
        "ln(SMA(C, 5) / SMA(C, 20))",
        19,
        lambda b: np.log(b.ta.SMA(b.close, 5) / b.ta.SMA(b.close, 20)),
    )
    f.one(
        "sma_cross_10_50",
        "ln(SMA(C, 10) / SMA(C, 50))",
        49,
        lambda b: np.log(b.ta.SMA(b.close, 10) / b.ta.SMA(b.close, 50)),
    )

    f.family = "momentum"
    f.bounded("RSI", (5, 9, 14, 21, 28, 50), lambda p: p, "close")
    f.bounded("CMO", (9, 14, 28), lambda p: p, "close")
    f.bounded("WILLR", (5, 10, 14, 20, 28, 50), lambda p: p - 1, "high low close")
    f.bounded("CCI", (5, 10, 14, 20, 30, 50), lambda p: p - 1, "high low close")
    f.bounded("MFI", (7, 14, 28, 50), lambda p: p, "high low close volume")
    f.bounded("AROONOSC", (10, 14, 25, 50), lambda p: p, "high low")
    f.bounded("ADX", (7, 14, 28), lambda p: 2 * p - 1, "high low close")
    f.bounded("ADXR", (7, 14), lambda p: 3 * p - 2, "high low close")
    f.bounded("PLUS_DI", (7, 14, 28), lambda p: p, "high low close")
    f.bounded("MINUS_DI", (7, 14, 28), lambda p: p, "high low close")
    f.each((5, 10, 15), "trix", "TRIX(C, {p})", lambda p: 3 * (p - 1) + 1, lambda b, p: b.ta.TRIX(b.close, p))
    for fast, slow in ((5, 20), (12, 26), (20, 50)):
        f.one(
            f"ppo_{fast}_{slow}",
            f"PPO(C, {fast}, {slow}), simple averages",
            slow - 1,
            lambda b, fast=fast, slow=slow: b.ta.PPO(b.close, fast, slow, 0),
        )
    for place, name in enumerate(("macd", "macd_signal", "macd_histogram")):
        f.one(
            name, f"MACD(C, 12, 26, 9)[{place}] / C", 33, lambda b, i=place: b.ta.MACD(b.close, 12, 26, 9)[i] / b.close
        )
    for k in (5, 14):
        for place, line in enumerate("kd"):
            f.one(
                f"stoch_{line}_{k}",
                f"STOCH(H, L, C, {k}, 3, 3)[{place}] / 100",
                k + 3,
                lambda b, k=k, i=place: b.ta.STOCH(*b.hlc, k, 3, 0, 3, 0)[i] / 100,
            )
    f.one("ultosc", "ULTOSC(H, L, C, 7, 14, 28) / 100", 28, lambda b: b.ta.ULTOSC(*b.hlc, 7, 14, 28) / 100)
    f.one("bop", "BOP(O, H, L, C)", 0, lambda b: b.ta.BOP(b.open, *b.hlc))
    f.one("bop_mean_20", "mean(BOP, 20)", 19, lambda b: rolling(b.ta.BOP(b.open, *b.hlc), 20, np.mean))

    f.family = "volatility"
    f.each((5, 7, 14, 21, 28, 50), "natr", "NATR(H, L, C, {p})", lambda p: p, lambda b, p: b.ta.NATR(*b.hlc, p))
    f.each((5, 10, 20, 30, 40, 50, 60), "deviation", "std(r, {p})", lambda p: p, Bars.deviation)
    f.each((5, 10, 20, 50), "parkinson", "sqrt(mean(ln(H / L)², {p}) / (4 ln 2))", lambda p: p - 1, _parkinson)
    f.each(
        (5, 10, 20, 50),
        "garman_klass",
        "sqrt(mean(ln(H / L)² / 2 - (2 ln 2 - 1) ln(C / O)², {p}))",
        lambda p: p - 1,
        _garman_klass,
    )
    f.each((10, 20, 50), "downside", "sqrt(mean(min(r, 0)², {p}))", lambda p: p, lambda b, p: rolling(b.r, p, downside))
    f.each((10, 20, 50), "largest_move", "max(|r|, {p})", lambda p: p, lambda b, p: rolling(np.abs(b.r), p, np.max))
    f.each(
        (10, 20, 50),
        "bollinger_width",
        "(upper - lower) / middle of BBANDS(C, {p}, 2)",
        lambda p: p - 1,
        _bollinger_width,
    )
    f.each(
        (10, 20, 50),
        "bollinger_place",
        "(C - lower) / (upper - lower) of BBANDS(C, {p}, 2)",
        lambda p: p - 1,
        _bollinger_place,
    )
    f.each(
        (10, 30),
        "deviation_of_deviation",
        "std(std(r, 10), {p})",
        lambda p: p + 9,
        lambda b, p: rolling(b.deviation(10), p, np.std),
    )

    f.family = "volume"
    f.each((5, 10, 20, 50), "volume_ratio", "V / mean(V, {p})", lambda p: p - 1, lambda b, p: _relative(b.volume, b, p))
    f.each(
        (5, 10, 20, 50),
        "obv_change",
        "(OBV - OBV[-{p}]) / ({p} mean(V, {p}))",
        lambda p: p,
        lambda b, p: _relative(difference(b.ta.OBV(b.close, b.volume), p) / p, b, p),
    )
    f.each(
        (5, 20, 50),
        "ad_change",
        "(AD - AD[-{p}]) / ({p} mean(V, {p}))",
        lambda p: p,
        lambda b, p: _relative(difference(b.ta.AD(*b.hlc, b.volume), p) / p, b, p),
    )
    f.one(
        "adosc",
        "ADOSC(H, L, C, V, 3, 10) / mean(V, 20)",
        19,
        lambda b: _relative(b.ta.ADOSC(*b.hlc, b.volume, 3, 10), b, 20),
    )
    f.each((10, 20, 50), "vwap_distance", "ln(C sum(V, {p}) / sum(C V, {p}))", lambda p: p - 1, _vwap_distance)
    f.each(
        (10, 30),
        "volume_deviation",
        "std(ln((1 + V) / (1 + V[-1])), {p})",
        lambda p: p,
        lambda b, p: rolling(difference(np.log1p(b.volume), 1), p, np.std),
    )

    f.family = "distribution"
    f.each((20, 40, 60), "skew", "skew(r, {p})", lambda p: p, lambda b, p: rolling(b.r, p, skew))
    f.each((20, 40, 60), "kurtosis", "kurtosis(r, {p})", lambda p: p, lambda b, p: rolling(b.r, p, kurtosis))
    f.each(
        (20, 50), "autocorrelation", "corr(r, r[-1]; {p})", lambda p: p, lambda b, p: rolling(b.r, p, autocorrelation)
    )
    f.each((20, 50), "up_share", "share of r > 0 in {p}", lambda p: p, lambda b, p: rolling(b.r, p, _share_positive))
    f.each(
        (10, 20, 50),
        "slope",
        "LINEARREG_SLOPE(ln C, {p})",
        lambda p: p - 1,
        lambda b, p: b.ta.LINEARREG_SLOPE(np.log(b.close), p),
    )
    f.each((10, 20, 50), "z_score", "(C - mean(C, {p})) / std(C, {p})", lambda p: p - 1, _z_score)
    f.each(
        (10, 20, 50),
        "price_volume_correlation",
        "corr(C, V; {p})",
        lambda p: p - 1,
        lambda b, p: b.ta.CORREL(b.close, b.volume, p),
    )

    f.family = "candle"
    for pattern in ("DOJI", "ENGULFING", "HAMMER", "HARAMI", "LONGLINE", "SHORTLINE", "SPINNINGTOP", "BELTHOLD"):
        f.one(
            f"cdl_{pattern.lower()}",
            f"sum(CDL{pattern}(O, H, L, C), 10) / 100, from bar 20 on",
            29,
            lambda b, pattern=pattern: _pattern(b, pattern),
        )

    f.family = "regime"
    f.each((10, 20, 50), "efficiency", "|C - C[-{p}]| / sum(|C - C[-1]|, {p})", lambda p: p, _efficiency)
    f.each(
        (20, 50), "drawdown", "ln(C / max(H, {p}))", lambda p: p - 1, lambda b, p: np.log(b.close / b.ta.MAX(b.high, p))
    )
    f.each(
        (20, 50), "recovery", "ln(C / min(L, {p}))", lambda p: p - 1, lambda b, p: np.log(b.close / b.ta.MIN(b.low, p))
    )
    f.each(
        (20, 50),
        "age_of_high",
        "bars since max(H, {p}) / {p}",
        lambda p: p - 1,
        lambda b, p: rolling(b.high, p, age_of_highest),
    )
    f.each(
        (20, 50),
        "age_of_low",
        "bars since min(L, {p}) / {p}",
        lambda p: p - 1,
        lambda b, p: rolling(b.low, p, age_of_lowest),
    )
    f.one("deviation_5_20", "ln(std(r, 5) / std(r, 20))", 20, lambda b: _log_ratio(b.deviation(5), b.deviation(20)))
    f.one("deviation_10_50", "ln(std(r, 10) / std(r, 50))", 50, lambda b: _log_ratio(b.deviation(10), b.deviation(50)))
    f.one("deviation_rank", "share of std(r, 10) in 50 bars below today's", 59, _deviation_rank)
    f.one("calm", "1 where deviation_rank < 1/3", 59, lambda b: _where(_deviation_rank(b), lambda x: x < 1 / 3))
    f.one("turbulent", "1 where deviation_rank ≥ 2/3", 59, lambda b: _where(_deviation_rank(b), lambda x: x >= 2 / 3))
    f.one("trending", "1 where ADX(H, L, C, 14) > 25", 27, lambda b: _where(b.ta.ADX(*b.hlc, 14), lambda x: x > 25))
    f.one(
        "rising",
        "1 where SMA(C, 20) > SMA(C, 50)",
        49,
        lambda b: _where(b.ta.SMA(b.close, 20) - b.ta.SMA(b.close, 50), lambda x: x > 0),
    )
    return f.features


def _relative(x: Array, b: Bars, p: int) -> Array:
    return ratio(x, rolling(b.volume, p, np.mean))


def _where(x: Array, test: Callable[[Array], Array]) -> Array:
    return np.where(np.isnan(x), np.nan, test(x))


def _log_ratio(a: Array, b: Array) -> Array:
    return np.log(ratio(a, b, 1.0) + 1e-6)  # five equal closes have no deviation, and that no logarithm


def _share_positive(x: Array, axis: int) -> Array:
    return np.where(np.isnan(x).any(axis), np.nan, (x > 0).mean(axis))


def _parkinson(b: Bars, p: int) -> Array:
    return np.sqrt(rolling(b.range**2, p, np.mean) / (4 * np.log(2)))


def _garman_klass(b: Bars, p: int) -> Array:
    variance = b.range**2 / 2 - (2 * np.log(2) - 1) * np.log(b.close / b.open) ** 2
    return np.sqrt(np.maximum(rolling(variance, p, np.mean), 0))


def _bollinger_width(b: Bars, p: int) -> Array:
    upper, middle, lower = b.ta.BBANDS(b.close, p, 2, 2, 0)
    return (upper - lower) / middle


def _bollinger_place(b: Bars, p: int) -> Array:
    upper, _, lower = b.ta.BBANDS(b.close, p, 2, 2, 0)
    return ratio(b.close - lower, upper - lower, 0.5)


def _z_score(b: Bars, p: int) -> Array:
    return ratio(b.close - rolling(b.close, p, np.mean), rolling(b.close, p, np.std))


def _vwap_distance(b: Bars, p: int) -> Array:
    traded = rolling(b.close * b.volume, p, np.sum)
    return np.log(ratio(b.close * rolling(b.volume, p, np.sum), traded, 1.0))


def _efficiency(b: Bars, p: int) -> Array:
    return ratio(np.abs(difference(b.close, p)), rolling(np.abs(difference(b.close, 1)), p, np.sum))


def _deviation_rank(b: Bars) -> Array:
    deviation = b.deviation(10)
    return _where_known(rolling(deviation, 50, rank_of_last), rolling(deviation, 50, np.sum))


def _where_known(x: Array, witness: Array) -> Array:
    return np.where(np.isnan(witness), np.nan, x)


def _pattern(b: Bars, name: str) -> Array:
    found = getattr(b.ta, f"CDL{name}")(b.open, *b.hlc).astype(np.float64) / 100
    found[:20] = np.nan  # TA-Lib answers 0, not unknown, while its own averages of bodies and wicks fill up
    return rolling(found, 10, np.sum)


@lru_cache(maxsize=1)
def catalogue() -> tuple[Feature, ...]:
    """All 225 features, in the order of the columns: static, known, observed."""
    return (*_static(), *_known(), *_observed())


def names(group: str) -> list[str]:
    """Names of the features of one group, ``"static"``, ``"known"`` or ``"observed"``, in the order of the columns."""
    return [feature.name for feature in catalogue() if feature.group == group]


def warm_up() -> int:
    """Bars dropped from the start of every series: what the slowest feature needs."""
    return max(feature.warm_up for feature in catalogue())


def feature_table() -> pd.DataFrame:
    """One row a feature: name, group, family, formula, warm_up (bars before its first value)."""
    rows = [astuple(feature)[:-1] for feature in catalogue()]
    return pd.DataFrame(rows, columns=[field.name for field in fields(Feature)][:-1])


def build(bars: pd.DataFrame, instrument: Instrument = SP500) -> Features:
    """Computes all features of a symbol.

    Args:
        bars: open, high, low, close and volume, indexed by rising timestamps; what `everybyte.data.load_bars` returns.
        instrument: the symbol's static features.

    Returns:
        The table without its first rows, as many as the slowest feature needs.

    Raises:
        ImportError: TA-Lib is not there.
        ValueError: a feature is not finite after its warm-up, or too few bars for one row.
    """
    try:
        import talib
    except ImportError as error:
        raise ImportError('features are computed with TA-Lib: pip install "everybyte[book]"') from error
    source = Bars(bars, instrument, talib)
    dropped = warm_up()
    if len(bars) <= dropped:
        raise ValueError(
            f"{len(bars)} bars are fewer than the {dropped + 1} that one row of features needs: give more bars"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {feature.name: feature.compute(source) for feature in catalogue()}
    frame = pd.DataFrame(columns, index=bars.index).iloc[dropped:]
    for name in frame.columns[~np.isfinite(frame.to_numpy()).all(axis=0)]:
        row = frame.index[~np.isfinite(frame[name].to_numpy())][0]
        raise ValueError(f"feature {name} is not finite at {row}: look at the bars before it")
    return Features(frame, pd.Series(source.r[dropped:], frame.index, name="log_return"), dropped)
