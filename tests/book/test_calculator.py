"""The calculator in a real Chromium: its integers are the library's, its address holds its state, keys are enough."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from urllib.parse import urlencode

import pytest
from calculator import DECODERS, DTYPES, TFT, tft_moments

from everybyte.formulas import budget, tft, transformer
from everybyte.formulas.model_state import N
from everybyte.formulas.terms import P, integer, integers, total
from everybyte.gpus import TABLE, find
from everybyte.models import TFTConfig
from everybyte.workspace import cublas_bytes

# As the models' cards and checkpoints have it.
PUBLISHED = {
    "Activation Memory Math, 1.3B": 1_278_332_928,
    "GPT-2": 124_439_808,
    "GPT-2 XL": 1_557_611_200,
    "SmolLM2 135M": 134_515_008,
    "SmolLM2 1.7B": 1_711_376_384,
    "TinyLlama 1.1B": 1_100_048_384,
    "Llama 2 7B": 6_738_415_616,
    "Llama 2 13B": 13_015_864_320,
    "Llama 2 70B": 68_976_648_192,
    "Llama 3 8B": 8_030_261_248,
    "Llama 3 70B": 70_553_706_496,
    "Llama 3.2 1B": 1_235_814_400,
    "Mistral 7B v0.1": 7_241_732_096,
    "Qwen2.5 0.5B": 494_032_768,
    "Qwen2.5 7B": 7_615_616_512,
}

# What the page shows, read from its text: whether there is a result, each moment's total, each row, each fact.
SHOWN = """async (addresses) => {
  const text = (root, selector) => [...root.querySelectorAll(selector)].map((e) => e.textContent);
  const all = [];
  for (const address of addresses) {
    const arrived = new Promise((resolve) => addEventListener("hashchange", resolve, { once: true }));
    if (location.hash !== address) { location.hash = address; await arrived; }
    all.push({
      verdict: document.querySelector(".calculator-verdict").textContent,
      moments: Object.fromEntries([...document.querySelectorAll("[data-moment]")]
        .map((e) => [e.dataset.moment, e.querySelector(".calculator-head").textContent])),
      peak: document.querySelector(".calculator-head strong")?.closest("[data-moment]").dataset.moment,
      rows: [...document.querySelectorAll("#calculator tbody tr")].map((row) => text(row, "th, td")),
      facts: Object.fromEntries(
        [...document.querySelectorAll("[data-fact]")].map((e) => [e.dataset.fact, e.textContent])),
    });
  }
  return all;
}"""


RING = """() => {
  const { outlineStyle, boxShadow } = getComputedStyle(document.activeElement);
  return outlineStyle !== "none" || boxShadow !== "none";
}"""


def number(text: str) -> int:
    """The first count in a text, whose thousands are set apart."""
    return int(re.search(r"\d[\d,]*", text)[0].replace(",", ""))


def decoder_setting(rng: random.Random) -> dict[str, str | int]:
    """A decoder's step that can be had, of a preset or of odd sizes."""
    while True:
        heads = rng.choice([1, 3, 8, 25, 64])
        sizes = {
            "layers": rng.randint(1, 130), "hidden": heads * rng.randint(1, 300), "heads": heads,
            "kv_heads": rng.choice([d for d in range(1, heads + 1) if heads % d == 0]),
            "inner": rng.randint(1, 70_000), "vocabulary": rng.randint(1, 300_000), "rows": 2048,
        }  # fmt: skip
        chosen = {name: rng.choice(words) for name, words in budget.SWITCHES.items()}
        if rng.random() < 0.5:
            sizes = {"rows": 2048} | rng.choice(list(DECODERS.values()))
        setting = chosen | sizes | {
            "batch": rng.choice([1, rng.randint(1, 64), rng.randint(1, 10_000)]),
            "sequence": rng.choice([rng.randint(1, 4096), rng.randint(1, 2_000_000)]),
            "dtype": rng.choice(DTYPES), "gpus": rng.randint(1, 5000), "rank": rng.randint(1, 300),
            "gpu": rng.choice(TABLE).key, "network": "decoder",
        }  # fmt: skip
        if setting["positions"] == "learned":
            setting["sequence"] = min(setting["sequence"], setting["rows"])
        few = setting["loss"] == "chunked" and setting["batch"] * setting["sequence"] < budget.TOKENS
        flash = setting["attention"] == "flash" and find(setting["gpu"]).capability < (8, 0)
        if not few and not flash and not budget.mismatch(setting, setting["dtype"]):
            return setting


def tft_setting(rng: random.Random) -> dict[str, str | int]:
    heads = rng.choice([1, 4, 7])
    setting = {name: rng.randint(1, 500) for name in TFT} | {
        "tft_heads": heads,
        "tft_hidden": heads * rng.randint(1, 99),
    }
    table = setting["history"] + setting["horizon"] + rng.randint(0, 400)
    return setting | {"table": table, "network": "tft", "gpu": rng.choice(TABLE).key}


def decoder_counts(x: dict) -> tuple[dict[str, dict[str, dict[str, int]]], dict]:
    """By the library, the terms of each moment, and the sizes."""
    sizes = transformer.sizes(
        x["batch"], x["sequence"], x["hidden"], x["heads"], x["layers"], x["vocabulary"], inner=x["inner"],
        kv_heads=x["kv_heads"], positions=x["rows"], element=x["dtype"], device="cuda",
    )  # fmt: skip
    gpus = 1 if x["sharding"] == "one GPU" else x["gpus"]
    sizes = budget.counts(x, sizes | {budget.rank: x["rank"], N: gpus})
    live = budget.moments(x)
    return {m: {name: integers(terms, sizes) for name, terms in live[m].items()} for m in live}, sizes


def tft_counts(x: dict) -> tuple[dict[str, dict[str, dict[str, int]]], dict]:
    symbols = {str(symbol): symbol for symbol in tft.sizes(TFTConfig.seed())}
    sizes = {symbols[symbol]: x[field] for field, symbol in TFT.items()}
    sizes |= {symbols["e"]: 4, symbols["m"]: 1, symbols["c"]: 0, symbols["g"]: 0}
    live = tft_moments(TFTConfig.seed())
    return {m: {name: integers(terms, sizes) for name, terms in live[m]} for m in live}, sizes


def summed(parts: dict[str, dict[str, int]]) -> int:
    return sum(sum(terms.values()) for terms in parts.values())


@pytest.fixture(scope="module")
def calculator(page, address):
    page.goto(f"{address}/book/calculator.html")
    page.wait_for_selector(".calculator-verdict")
    return page


def test_200_random_settings_give_the_librarys_integers(calculator):
    rng = random.Random(7)
    settings = [tft_setting(rng) if i % 5 == 0 else decoder_setting(rng) for i in range(200)]
    calculator.said.clear()
    shown = calculator.evaluate(SHOWN, [f"#{urlencode(setting)}" for setting in settings])
    compared = 0
    for setting, page in zip(settings, shown, strict=True):
        try:
            live, sizes = (tft_counts if setting["network"] == "tft" else decoder_counts)(setting)
        except ValueError as error:
            assert "2**63" in str(error) and "more bytes than PyTorch can count" in page["verdict"], setting
            continue
        totals = {moment: summed(parts) for moment, parts in live.items()}
        assert totals[page["peak"]] == max(totals.values()), setting
        for moment, text in page["moments"].items():
            assert f" {totals[moment]:,} B (" in text, setting
        wanted = [(name, n) for terms in live[page["peak"]].values() for name, n in terms.items()]
        workspaces = 2 * cublas_bytes(find(setting["gpu"]))
        *rows, beside, needed = [(row[0], number(row[2])) for row in page["rows"]]
        assert rows == wanted and beside[1] == workspaces, setting
        assert needed[1] == totals[page["peak"]] + workspaces, setting
        check_verdict(page["verdict"], needed[1], find(setting["gpu"]).usable)
        if setting["network"] == "tft":
            assert number(page["facts"]["learned"]) == integer(total(tft.parameters(TFTConfig.seed())), sizes)
            assert number(page["facts"]["kept"]) == integer(tft.saved(TFTConfig.seed()), sizes)
        else:
            assert number(page["facts"]["learned"]) == sizes[P], setting
            check_crossover(page["facts"]["crossover"], setting, sizes)
        compared += 1
    assert compared > 150 and calculator.said == []


def check_verdict(verdict: str, needed: int, usable: tuple[int, int]) -> None:
    least, most = usable
    word, rest = ("Fits", least - needed) if needed <= least else ("Does not fit", needed - most)
    if least < needed <= most:
        word, rest = "May fit", most
    assert verdict.startswith(word) and f" {needed:,} B (" in verdict and f" {rest:,} B (" in verdict


def check_crossover(shown: str, setting: dict, sizes: dict) -> None:
    parts = integers(budget.PARTS.at(setting), sizes)
    if not parts["with s squared"]:
        assert shown.startswith("none")
        return
    exact = Fraction(parts["with s"], parts["with s squared"])
    assert abs(Fraction(shown.split(" tokens")[0].replace(",", "")) - exact) <= Fraction(1, 20)


def test_what_is_said_to_fit_fits_and_one_more_does_not(calculator):
    rng = random.Random(11)
    settings = [setting for _ in range(30) if (setting := decoder_setting(rng))["positions"] == "rotary"]
    for setting, page in zip(settings, calculator.evaluate(SHOWN, [f"#{urlencode(x)}" for x in settings]), strict=True):
        room = find(setting["gpu"]).usable[0] - 2 * cublas_bytes(find(setting["gpu"]))
        for field in ("sequence", "batch") if page["facts"] and page["peak"] else ():
            largest = number(page["facts"][field])
            for value, fits in ((largest, True), (largest + 1, False)):
                x = setting | {field: value}
                if value and not (x["loss"] == "chunked" and x["batch"] * x["sequence"] < budget.TOKENS):
                    assert (max(map(summed, decoder_counts(x)[0].values())) <= room) == fits, (x, field)


@pytest.mark.parametrize("name", DECODERS)
def test_a_named_model_has_its_published_number_of_parameters(name, calculator):
    calculator.evaluate(SHOWN, ["#batch=2", "#"])
    calculator.get_by_label("Model", exact=True).select_option(name)
    assert number(calculator.locator("[data-fact=learned]").text_content()) == PUBLISHED[name]


def test_an_address_that_was_passed_on_shows_the_same_setting(calculator, address):
    def as_it_is() -> list[dict]:
        return calculator.evaluate(SHOWN, [calculator.evaluate("location.hash")])

    rng = random.Random(3)
    for setting in [decoder_setting(rng), tft_setting(rng)]:
        first = calculator.evaluate(SHOWN, [f"#{urlencode(setting)}"])
        calculator.get_by_label("Batch b").filter(visible=True).fill("3")
        passed, here = calculator.evaluate("location.href"), as_it_is()
        assert here != first
        calculator.goto("about:blank")
        calculator.goto(passed)
        calculator.wait_for_selector(".calculator-verdict")
        assert as_it_is() == here and calculator.evaluate("location.href") == passed


@pytest.mark.parametrize(
    ("asked", "field", "says"),
    [
        ("#batch=0", "Batch b", "must be a whole number from 1"),
        ("#batch=1.5", "Batch b", "must be a whole number from 1"),
        ("#sequence=", "Sequence s", "must be a whole number from 1"),
        ("#layers=-3", "Layers L", "must be a whole number from 1"),
        ("#hidden=1e3", "Hidden h", "must be a whole number from 1"),
        ("#vocabulary=99999999999999", "Vocabulary V", "must be a whole number from 1"),
        ("#heads=7", "Heads a", "must divide the hidden size, 2048"),
        ("#kv_heads=3", "K and V heads", "must divide the heads, 16"),
        ("#sequence=2049", "Sequence s", "is longer than the position table, 2048 rows"),
        ("#batch=1&sequence=49&loss=chunked", "Loss head", "cuts at least 50 tokens into chunks"),
        ("#dtype=float32", "Recipe", "weights in float32 need an fp32 recipe"),
        ("#attention=flash&dtype=float32&recipe=fp32", "Attention", "the flash kernel computes in 16 bits"),
        ("#attention=flash&gpu=t4", "Attention", "has no flash kernel on Tesla T4"),
        ("#recipe=QLoRA&sharding=zero-3", "Sharding", "is not written down for QLoRA"),
        ("#attention=linear", "Attention", 'has no "linear"'),
        ("#network=tft&tft_heads=3", "Heads a", "must divide the hidden size, 256"),
        ("#network=tft&table=10", "Position rows", "must be at least history and horizon"),
        ("#layers=900000000000&hidden=900000000000&heads=1&kv_heads=1", "Network", "more bytes than PyTorch can count"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_once_at_its_field_and_nothing_is_calculated(asked, field, says, calculator):
    calculator.evaluate(SHOWN, ["#network=decoder", asked])
    faults = [text for text in calculator.locator(".calculator-fault").all_text_contents() if text]
    assert len(faults) == 1 and says in faults[0]
    wrong = calculator.get_by_label(field, exact=True).filter(visible=True)
    assert wrong.get_attribute("aria-invalid") == "true"
    assert calculator.locator("#calculator table").is_hidden()
    assert "NaN" not in calculator.locator("#calculator").inner_text()
    assert calculator.locator(".calculator-verdict").text_content().startswith(f"No result: {field} ")


def test_keys_are_enough_and_the_focus_goes_through_all_fields_in_order(calculator):
    calculator.evaluate(SHOWN, ["#batch=2", "#"])
    calculator.get_by_label("Network", exact=True).focus()
    visible = calculator.locator("#calculator :is(input, select, button)").filter(visible=True)
    order = visible.evaluate_all("(all) => all.map((e) => e.name || e.textContent)")
    reached = []
    while order[-1] not in reached:
        assert len(reached) <= len(order), "the focus does not come to the last field"
        reached.append(calculator.evaluate("document.activeElement.name || document.activeElement.textContent"))
        assert calculator.evaluate(RING), f"where the focus is cannot be seen: {reached[-1]}"
        calculator.keyboard.press("Tab")
    scrolling = [name for name in reached if name.startswith("Live at the peak")]  # the table, on a phone
    assert [name for name in reached if name not in scrolling] == order and len(order) > 20
    calculator.get_by_label("Network", exact=True).focus()
    for _ in range(order.index("batch")):
        calculator.keyboard.press("Tab")
    calculator.keyboard.press("Control+a")
    calculator.keyboard.type("1")
    for _ in range(order.index("attention") - order.index("batch")):
        calculator.keyboard.press("Tab")
    calculator.keyboard.press("ArrowDown")
    assert calculator.evaluate("location.hash") == "#batch=1&attention=flash"
    assert calculator.locator("[data-fact=crossover]").text_content().startswith("none")
