"""A chapter is two files that say the same: the .md that people edit, and the .ipynb with the outputs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import yaml
from press import ANSWER, BOOK, PASTED, VOLATILE_TAGS, as_source, by_section, glued, launchable, read_source

SOURCES = BOOK.sources()

chapters = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)

# What is agreed for every chapter, and for which one not, and why. An exception that is none any more fails too.
CELLS, LINES, EXERCISES = range(8, 21), 12, range(2, 5)
_NO_CHAPTER = "a list of versions, no chapter"
EXCEPTIONS = {
    **{(rule, "99_versions"): _NO_CHAPTER for rule in ("cells", "goals", "exercises", "boxes")},
    ("exercises", "24_one_step"): "it is swept, and each number that it glues would be a column",
}


def agreed(rule: str, source: Path, kept: bool, fault: object) -> None:
    if (rule, source.stem) in EXCEPTIONS:
        assert not kept, f"take {rule!r} of {source.stem} out of EXCEPTIONS"
    else:
        assert kept, fault


def prose(source: Path) -> str:
    return "\n\n".join(cell.source for cell in read_source(source).cells if cell.cell_type == "markdown")


def cells(notebook: nbformat.NotebookNode) -> list[tuple[object, ...]]:
    """Of each cell, what the pair must agree on."""
    return [(c.cell_type, c.source, c.metadata.get("tags", []), c.metadata.get("mystnb", {})) for c in notebook.cells]


def stored(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert [path.stem for path in SOURCES] == [path.stem for path in BOOK.executed()]
    assert {f.stem for f in BOOK.notebooks.iterdir() if f.suffix in (".md", ".ipynb")} == {f.stem for f in SOURCES}


def test_every_chapter_and_prose_page_is_in_the_table_of_contents():
    toc = yaml.safe_load((BOOK.root / "_toc.yml").read_text())
    listed = {toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])}
    pages = {f"book/{path.stem}" for path in (BOOK.root / "book").glob("*.md")} - {"book/chapter-template"}
    assert listed == pages | {f"notebooks/{source.stem}" for source in SOURCES}


@chapters
def test_the_readme_names_a_chapter_by_its_title(source):
    title = re.search(r"^# (.+)$", prose(source), flags=re.MULTILINE)[1]
    readme = (BOOK.root / "README.md").read_text(encoding="utf-8")
    assert f"[{title}](notebooks/{source.name})" in readme


@chapters
def test_the_pair_holds_the_same_cells(source):
    assert cells(stored(source)) == cells(read_source(source)), "run `make refresh`: the .md is the source"


@chapters
def test_the_source_is_written_as_refresh_would_write_it(source):
    assert as_source(stored(source), source) == source.read_text(encoding="utf-8"), "run `make refresh`"


@chapters
def test_the_notebook_was_executed_from_top_to_bottom_without_an_error(source):
    code = [cell for cell in stored(source).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        errors = [output.evalue for output in cell.outputs if output.output_type == "error"]
        assert not errors or "raises-exception" in cell.metadata.get("tags", [])


@chapters
def test_outputs_that_are_compared_hold_no_stderr_and_no_output_holds_a_path_of_one_machine(source):
    for cell in stored(source).cells:
        for output in cell.get("outputs", []):
            text = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))
            assert not re.search(r"(?<![\w.])/(home|Users|root|tmp|opt|work|private)/\w", text), cell.source
            if not VOLATILE_TAGS & set(cell.metadata.get("tags", [])):
                assert output.get("name") != "stderr", f"a warning, or a progress bar: {output.text}"


@chapters
def test_no_cell_of_a_table_shows_the_word_that_pandas_has_for_nothing(source):
    for cell in stored(source).cells:
        for output in cell.get("outputs", []):
            table = output.get("data", {}).get("text/html", "")
            nothing = re.findall(r"<t[dh][^>]*>\s*(&lt;NA&gt;|NaN|nan|None|NaT)\s*</t[dh]>", table)
            assert not nothing, f"{nothing}: make it a `report.Table`: {cell.source}"


@chapters
def test_code_cells_are_few_enough_and_short_enough_to_be_read(source):
    cells = launchable(read_source(source), "").cells  # a fork's first cell is not the chapter's
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    long = [text for text in code if sum(bool(line.strip()) for line in text.splitlines()) > LINES]
    agreed("cells", source, len(code) in CELLS and not long, f"{len(code)} code cells; too long: {long}")


@chapters
def test_a_chapter_says_first_what_it_is_good_for_what_it_presupposes_and_how_long_it_takes(source):
    head = prose(source).partition("\n## ")[0]
    assert "*Run time:*" in head
    goals = re.search(r"\{admonition\} You will be able to\n:class: takeaway\n((?:[- ] .+\n)+)", head)
    three = goals is not None and len(re.findall("^- ", goals[1], re.MULTILINE)) == 3
    agreed("goals", source, three and "*Prerequisites:*" in head, head)


@chapters
def test_two_to_four_exercises_have_a_number_that_was_computed_in_their_folded_answers(source):
    exercises = re.findall(r"^(:{3,})\{admonition\} Exercise (\d)\n(.*?)\n\1$", prose(source), re.MULTILINE | re.DOTALL)
    numbers = [int(number) for _, number, _ in exercises]
    answers = [text.partition("{dropdown} Answer\n")[2] for _, _, text in exercises]
    complete = len(numbers) in EXERCISES and numbers == [*range(1, len(numbers) + 1)]
    agreed("exercises", source, complete and all("{glue:text}" in answer for answer in answers), answers)


@chapters
def test_what_only_a_folded_answer_shows_is_computed_under_the_exercises(source):
    text = prose(source)
    answers = set(PASTED.findall(text)) - set(PASTED.findall(ANSWER.sub("", text)))
    early = [
        (section, name)
        for section, cell in by_section(stored(source))
        for name in map(glued, cell.get("outputs", []))
        if name in answers and section != "Exercises"
    ]
    assert not early, "a build without the answers would keep the cell"


@chapters
def test_every_section_has_its_point_in_a_box(source):
    sections = re.split(r"^## ", prose(source), flags=re.MULTILINE)[1:]
    rest = [text for text in sections if text.splitlines()[0] not in ("Parameters", "Exercises", "Summary")]
    bare = [text.splitlines()[0] for text in rest if "{admonition} " not in text]
    agreed("boxes", source, not bare, f"no takeaway, and no claim that fails: {bare}")


@chapters
def test_a_chapter_ends_with_what_comes_next(source):
    agreed(
        "next", source, prose(source).strip().rpartition("\n\n")[2].startswith("**Next:**"), "no **Next:** at its end"
    )


@chapters
def test_nbval_leaves_every_volatile_output_alone(source):
    for cell in stored(source).cells:
        tags = set(cell.metadata.get("tags", []))
        assert "timing" not in tags or "nbval-ignore-output" in tags, f"tag it nbval-ignore-output too: {cell.source}"


@chapters
def test_every_figure_has_a_caption_and_a_text_for_those_who_cannot_see_it(source):
    for cell in stored(source).cells:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            about = cell.metadata.get("mystnb", {})
            assert about.get("figure", {}).get("caption"), f"no caption: {cell.source}"
            assert len(about.get("image", {}).get("alt", "")) > 20, f"no alt text worth reading: {cell.source}"
