"""`make refresh` is safe: a second run stores the same bytes, timings alone change nothing, failures spoil nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import screenshots
from bs4 import BeautifulSoup
from PIL import Image
from press import (
    BOOK,
    Book,
    PressError,
    by_section,
    comparable,
    drop_answers,
    glued,
    joined_streams,
    main,
    read_source,
    stage,
    with_command,
)

read = partial(nbformat.read, as_version=4)

SOURCE = """\
---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A chapter

```{code-cell}
print(2 * {width})
```

```{code-cell}
:tags: [timing, nbval-ignore-output]

import time

time.perf_counter_ns()
```
"""


@pytest.fixture
def small(tmp_path) -> Book:
    """A book of one chapter, with an output that never stays the same."""
    (tmp_path / "notebooks").mkdir()
    for name in ("jupytext.toml", "_config.yml"):
        shutil.copy(BOOK.root / name, tmp_path)
    book = Book(tmp_path)
    (book.notebooks / "01_small.md").write_text(SOURCE.replace("{width}", "8"))
    book.refresh()
    return book


def contents(book: Book) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in book.notebooks.iterdir() if path.is_file()}


def test_a_second_refresh_changes_no_byte_though_a_timing_differs(small):
    before = contents(small)
    assert set(before) == {"01_small.md", "01_small.ipynb"}
    assert small.refresh() == []
    assert contents(small) == before


def test_a_changed_source_is_stored_with_its_new_output(small):
    (small.notebooks / "01_small.md").write_text(SOURCE.replace("{width}", "9"))
    assert small.refresh() == ["01_small.ipynb", "01_small.md"]
    assert "18\n" in nbformat.read(small.executed()[0], as_version=4).cells[1].outputs[0].text


def test_the_stored_notebook_bears_no_trace_of_when_and_where_it_ran(small):
    text = small.executed()[0].read_text()
    assert "papermill" not in text
    assert "iopub" not in text
    assert str(small.root) not in text


def test_a_failing_chapter_leaves_the_stored_one_as_it_was(small):
    stored = small.executed()[0].read_bytes()
    (small.notebooks / "01_small.md").write_text(SOURCE.replace("{width}", "nothing_of_this_name"))
    with pytest.raises(PressError, match="nothing_of_this_name"):
        small.refresh()
    assert small.executed()[0].read_bytes() == stored


def test_cell_ids_follow_from_the_text_so_that_one_new_cell_moves_no_other(small):
    source = small.sources()[0]
    before = [cell.id for cell in read_source(source).cells]
    source.write_text(source.read_text().replace("# A chapter\n", "# A chapter\n\n+++\n\nNew.\n"))
    after = [cell.id for cell in read_source(source).cells]
    assert len(after) == len(before) + 1
    assert set(before) < set(after)


def test_pieces_of_one_stream_are_joined_and_two_streams_are_not():
    pieces = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    joined = joined_streams(nbformat.v4.new_output("stream", name=name, text=text) for name, text in pieces)
    assert [(output.name, output.text) for output in joined] == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]


def test_the_command_at_the_head_of_a_page_runs_as_it_stands(tmp_path):
    notebook = BOOK.notebooks / "24_one_step.ipynb"
    head = with_command(read(notebook), notebook).cells[0].source
    command = re.search(r"^\$ ([^`]+)$", head, flags=re.MULTILINE)[1].replace("\\\n", "")
    assert command.startswith(".venv/bin/papermill --cwd notebooks -p model decoder ")
    program, *arguments = command.replace("_build/", f"{tmp_path}/").split()
    program = Path(sys.executable).with_name(Path(program).name)
    done = subprocess.run([program, *arguments], cwd=BOOK.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(cell.execution_count for cell in read(tmp_path / "24.ipynb").cells if cell.cell_type == "code")


def test_rendering_a_run_that_never_happened_says_what_to_do(small, capsys):
    with pytest.raises(PressError, match="make book"):
        small.render(executed=True)


def test_one_switch_gives_a_fork_links_to_colab_and_kaggle_and_a_cell_that_installs_what_is_missing_there(small):
    source, stored = (file.read_bytes() for file in (small.sources()[0], small.executed()[0]))
    config, switch = small.root / "_config.yml", 'launch_from: ""'
    assert config.read_text().count(switch) == 1
    config.write_text(config.read_text().replace(switch, 'launch_from: "you/a-fork@dev"'))
    assert small.refresh() == ["01_small.ipynb", "01_small.md"]
    first = next(cell for cell in read(small.executed()[0]).cells if cell.cell_type == "code")
    assert first.metadata.tags == ["launch", "remove-cell"] and not first.outputs
    assert "git clone --quiet --depth 1 --branch dev https://github.com/you/a-fork\n" in first.source
    assert small.refresh() == []

    shutil.copytree(BOOK.root / "book", small.root / "book", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    (small.notebooks / "data").mkdir()
    (small.root / "_toc.yml").write_text("format: jb-book\nroot: notebooks/01_small\n")
    page = BeautifulSoup((small.render().parent / "notebooks/01_small.html").read_text(), "html.parser")
    links = {link.get_text(strip=True): link["href"] for link in page.select(".header-article-items a[href*=github]")}
    assert links == {
        "Colab": "https://colab.research.google.com/github/you/a-fork/blob/dev/notebooks/01_small.ipynb",
        "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/you/a-fork/blob/dev/notebooks/01_small.ipynb",
    }
    assert "git clone" not in page.select_one("article").get_text()

    config.write_text(config.read_text().replace("you/a-fork@dev", ""))
    assert small.refresh() == ["01_small.ipynb", "01_small.md"]
    assert small.sources()[0].read_bytes() == source
    assert comparable(read(small.executed()[0])) == comparable(nbformat.reads(stored, as_version=4))


def test_a_build_without_the_answers_lacks_them_and_nothing_else(tmp_path):
    pages = tmp_path / "pages"
    stage(BOOK, pages, BOOK.notebooks)
    before = {path.name: nbformat.read(path, as_version=4) for path in (pages / "notebooks").glob("*.ipynb")}
    drop_answers(pages)
    answers = 0
    for name, notebook in before.items():
        path = pages / "notebooks" / name
        after = nbformat.read(path, as_version=4)
        text, left = ("\n".join(c.source for c in n.cells if c.cell_type == "markdown") for n in (notebook, after))
        exercises = text.count("{admonition} Exercise")
        assert left.count("{admonition} Exercise") == exercises == text.count("{dropdown} Answer")
        assert "{dropdown}" not in left and left.count(":::") == text.count(":::") - 2 * text.count("::::{dropdown}")
        answers += exercises
        hidden = set(re.findall(r"\d\d-ex-[\w-]+(?=`)", text)) - set(re.findall(r"\d\d-ex-[\w-]+(?=`)", left))
        stored = path.read_text()
        assert hidden or not exercises
        assert not [key for key in hidden if f'"{key}"' in stored]
        named = set(re.findall(r'"name": "(\d\d-[\w-]+)"', stored))
        assert set(re.findall(r"\}`(\d\d-[\w-]+)`", left)) <= named
        cells = [cell for section, cell in by_section(after) if section == "Exercises" and cell.cell_type == "code"]
        assert all(cell.source.startswith("#") and all(map(glued, cell.outputs)) for cell in cells)
        body = text.partition("## Exercises")[0]
        assert left.startswith(body)
        assert set(left.splitlines()) <= set(text.splitlines()), "a line lost a part of itself"
        summary, same = (
            re.search(r"^## Summary\n.*?(?=^## |\Z)", prose, re.DOTALL | re.MULTILINE) for prose in (text, left)
        )
        assert (summary and summary[0]) == (same and same[0])
    assert answers > 60


def test_an_unknown_command_is_refused():
    with pytest.raises(SystemExit):
        main(["publish"])


def test_every_make_target_that_the_prose_names_exists():
    targets = set(re.findall(r"^([a-z]+):.*## ", (BOOK.root / "Makefile").read_text(), flags=re.MULTILINE))
    for page in [*BOOK.root.glob("*.md"), *(BOOK.root / "book").glob("*.md")]:
        named = set(re.findall(r"(?:`|\$ )(?:\w+=\S+ )*make ([a-z]+)", page.read_text(encoding="utf-8")))
        assert named <= targets, page.name
    assert {"book", "html", "test", "refresh", "serve", "train"} <= targets


def test_the_readme_shows_each_picture_that_make_screenshots_takes():
    readme = (BOOK.root / "README.md").read_text(encoding="utf-8")
    for name in screenshots.SHOTS:
        picture = screenshots.PICTURES / f"{name}.png"
        assert f"book/_static/screenshots/{name}.png" in readme
        assert Image.open(picture).size == tuple(screenshots.SIZE.values())
        assert picture.stat().st_size < 200_000
