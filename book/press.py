"""The press: executes the notebooks, renders the pages, and stores fresh outputs.

    python book/press.py execute [--jobs 2]   every notebook, by papermill, into _build/run
    python book/press.py render [--executed] [--without-answers]
                                              _build/html from the stored outputs, or from _build/run
    python book/press.py refresh              execute from the .md sources and store the outputs

This is the book's own tool, called by the Makefile and by the tests; the library knows nothing of it. Only `refresh`
writes under `notebooks/`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jupytext
import nbformat
import papermill
import yaml
from jupytext.config import load_jupytext_config
from nbformat import NotebookNode

CHAPTER = "[0-9][0-9]_*"
"""How a chapter's pair of files is named: NN_slug.md, the source, and NN_slug.ipynb, the same with its outputs."""

VOLATILE_TAGS = frozenset({"timing", "nbval-ignore-output"})
"""Cells whose output may differ from run to run: nbval lets it through, and alone it is no reason to store anew."""


RUN = r"""

*Run this on your machine,* in the project's folder after `make setup` ({{doc}}`../book/how_to_run`):

```{{code-block}} console
$ .venv/bin/papermill --cwd notebooks {parameter}\
    notebooks/{name}.ipynb _build/{number}.ipynb
```"""
"""What a page says under its run time; its notebook, which may be run from anywhere, does not."""


class PressError(Exception):
    """Something the reader can mend; the message says how."""


@dataclass(frozen=True)
class Run:
    """One execution of one notebook: its name without the ending, and how long it took."""

    notebook: str
    seconds: float


@dataclass(frozen=True)
class Book:
    """The project's folder, and what can be done with it."""

    root: Path

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def run(self) -> Path:
        """Where `execute` leaves the executed notebooks."""
        return self.root / "_build" / "run"

    @property
    def html(self) -> Path:
        return self.root / "_build" / "html"

    @property
    def launch_from(self) -> str:
        """The repository of a fork whose chapters open on Colab and Kaggle: "owner/name@branch", or nothing."""
        config = yaml.safe_load((self.root / "_config.yml").read_text(encoding="utf-8"))
        return config["sphinx"]["config"]["launch_from"]

    def sources(self) -> list[Path]:
        """The chapters' sources, in the order of their numbers."""
        return sorted(self.notebooks.glob(f"{CHAPTER}.md"))

    def executed(self) -> list[Path]:
        """The chapters with their stored outputs, in the order of their numbers."""
        return sorted(self.notebooks.glob(f"{CHAPTER}.ipynb"))

    def execute(self, jobs: int = 1) -> list[Run]:
        """Run every notebook with its default parameters into `run`.

        Args:
            jobs: how many run at a time; the machine's cores are shared out among them.

        Returns:
            One `Run` a notebook; the same goes to `run/durations.json`.

        Raises:
            PressError: a cell failed; the message ends as its error does.
        """
        shutil.rmtree(self.run, ignore_errors=True)
        (self.run / "notebooks").mkdir(parents=True)
        begun, runs = time.perf_counter(), []
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=share_cores, initargs=(jobs,)) as pool:
            targets = [self.run / "notebooks" / notebook.name for notebook in self.executed()]
            done = pool.map(partial(execute, cwd=self.notebooks), self.executed(), targets)
            for (progress, notebook), run in zip(numbered(targets), done, strict=True):
                print(f"{progress} {notebook.name}: {run.seconds:.1f} s", flush=True)
                runs.append(run)
        (self.run / "durations.json").write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
        seconds = time.perf_counter() - begun
        print(f"Executed {len(runs)} notebooks in {seconds:.1f} s, into {self.shown(self.run)}", flush=True)
        return runs

    def render(self, *, executed: bool = False, answers: bool = True, html: Path | None = None) -> Path:
        """Render the pages, from scratch and with every warning an error.

        Args:
            executed: take the notebooks that `execute` left in `run`, not the stored ones.
            answers: with the answers to the exercises, or without them (`drop_answers`).
            html: the folder that becomes the site, `_build/html` by default; replaced only if the build succeeds.

        Returns:
            The front page.

        Raises:
            PressError: there was a warning, or nothing has been executed.
        """
        if executed and not (self.run / "durations.json").exists():
            raise PressError(f"{self.shown(self.run)} holds no finished run: `make book` makes one")
        html = html or self.html
        html.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        print(f"Rendering the {'executed' if executed else 'stored'} notebooks ...", flush=True)
        with tempfile.TemporaryDirectory(dir=html.parent, prefix=".render-") as scratch:
            source, output = Path(scratch) / "source", Path(scratch) / "output"
            stage(self, source, self.run / "notebooks" if executed else self.notebooks)
            if (source / "book" / "start_here.md").exists():
                import found  # imports torch, which the other commands do without

                found.draw(source)
            if not answers:
                drop_answers(source)
            jupyter_book = Path(sys.executable).with_name("jupyter-book")
            command = [jupyter_book, "build", source, "--path-output", output, "-W", "-n", "--keep-going", "-q"]
            ours = os.pathsep.join(filter(None, [str(self.root / "src"), os.environ.get("PYTHONPATH")]))  # as described
            environment = os.environ | {"PYTHONPATH": ours}
            done = subprocess.run(command, cwd=self.root, env=environment, check=False, capture_output=True, text=True)
            if done.returncode:
                raise PressError(f"{done.stdout}{done.stderr}\nThe build is not clean: mend the warnings above")
            shutil.rmtree(html, ignore_errors=True)
            shutil.move(output / "_build" / "html", html)
        front = html / "index.html"
        print(f"Rendered in {time.perf_counter() - start:.1f} s.")
        print(f"Open {self.shown(front)} in a browser, or run `make serve`", flush=True)
        return front

    def refresh(self) -> list[str]:
        """Execute every chapter from its .md source, and store of each pair what changed.

        A notebook whose fresh run differs only in the outputs of volatile cells stays as it is, to the byte. A chapter
        that fails leaves its stored notebook untouched.

        Returns:
            The names of the files that were written.

        Raises:
            PressError: a cell failed; the message ends as its error does.
        """
        written = []
        for progress, source in numbered(self.sources()):
            print(f"{progress} executing {source.name} ...", flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                unrun, ran = Path(scratch) / "unrun.ipynb", Path(scratch) / f"{source.stem}.ipynb"
                nbformat.write(launchable(read_source(source), self.launch_from), unrun)
                run = execute(unrun, ran, cwd=self.notebooks)
                fresh = lasting(nbformat.read(ran, as_version=4))
            changed = store(fresh, source)
            print(f"{progress} {source.name}: {run.seconds:.1f} s, {', '.join(changed) or 'unchanged'}", flush=True)
            written += changed
        return written

    def shown(self, path: Path) -> str:
        """A path as the reader would type it, from the project's folder."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


BOOK = Book(Path(__file__).resolve().parent.parent)
"""This book."""


LAUNCH = """\
# On Colab or Kaggle: fetch this book, and install what is missing there.
import importlib.util

if importlib.util.find_spec("everybyte") is None:
    !git clone --quiet --depth 1 --branch {branch} https://github.com/{repository}
    %pip install --quiet "./{name}[book]"
    %cd {name}/notebooks"""


def numbered(paths: Sequence[Path]) -> Iterable[tuple[str, Path]]:
    """Each path behind its place in the row: [2/5]."""
    return ((f"[{number}/{len(paths)}]", path) for number, path in enumerate(paths, 1))


def share_cores(jobs: int) -> None:
    """Let the kernels that this process starts take no more than their part of the machine's cores."""
    if jobs > 1:
        os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // jobs, 1))


def execute(source: Path, target: Path, *, cwd: Path, parameters: Mapping[str, object] | None = None) -> Run:
    """Run one notebook by papermill, with the kernel of this interpreter.

    Args:
        source: the notebook to run; it is not written to.
        target: where the executed copy goes.
        cwd: the folder it runs in.
        parameters: values for its `parameters` cell, in place of the defaults.

    Raises:
        PressError: a cell failed; `target` holds the notebook up to that cell.
    """
    start = time.perf_counter()
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters=dict(parameters or {}),
            kernel_name="python3",
            cwd=str(cwd),
            progress_bar=sys.stderr.isatty(),
            extra_arguments=["--log-level=50"],  # the kernel warns of its own transport at each start
        )
    except papermill.PapermillExecutionError as error:
        raise PressError(f"{target.stem} failed.{error}".rstrip()) from error
    return Run(target.stem, time.perf_counter() - start)


def stage(book: Book, target: Path, notebooks: Path) -> None:
    """Copy what Sphinx reads (configuration, prose, the notebooks of a folder, with `RUN`) into a new `target`."""
    target.mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(book.root / name, target)
    tools = ("__pycache__", "press.py", "*_page.py", "found.py", "screenshots*", "calculator.py", "messages.py")
    shutil.copytree(book.root / "book", target / "book", ignore=shutil.ignore_patterns(*tools))
    import calculator  # imports all of the library, which the other targets do without
    import messages

    for name, tool in (("calculator-formulas.js", calculator), ("explain-messages.js", messages)):
        (target / "book" / "_static" / name).write_text(tool.script(), encoding="utf-8")
    (target / "notebooks").mkdir()
    for notebook in book.executed():
        page = with_command(nbformat.read(notebooks / notebook.name, as_version=4), notebook)
        nbformat.write(page, target / "notebooks" / notebook.name)
    shutil.copytree(book.notebooks / "data", target / "notebooks" / "data")  # what pages offer for download


def with_command(notebook: NotebookNode, path: Path) -> NotebookNode:
    """Say in a chapter, in place, how it is run: with its first parameter, as an example of one, if it has any."""
    defaults = [(name, ast.literal_eval(known["default"])) for name, known in papermill.inspect_notebook(path).items()]
    parameter = "".join(f"-p {name} {value} " for name, value in defaults[:1])
    said = RUN.format(parameter=parameter, name=path.stem, number=path.stem[:2])
    head = notebook.cells[0]
    head.source = re.sub(r"\*Run time:\*.*(\n.+)*", lambda found: found[0] + said, head.source, count=1)
    return notebook


ANSWER = re.compile(
    r"^(:{3,})\{dropdown\} Answer.*?^\1$\n*|^The numbers in the answers come from [^\n]*\n*", re.DOTALL | re.MULTILINE
)
"""A folded answer, and the sentence that says which cell computes it."""

PASTED = re.compile(r"\{glue:[^}]*\}`(?:[^`:]*::)?([^`:]+)")


def drop_answers(pages: Path) -> None:
    """Takes the answers to the exercises out of staged pages.

    The folded boxes go, every cell under the heading *Exercises*, and each glued number that no page shows any more.
    The chapters glue no such number above that heading; a test holds them to it.
    """
    notebooks = {path: nbformat.read(path, as_version=4) for path in sorted((pages / "notebooks").glob("*.ipynb"))}
    prose = [path.read_text(encoding="utf-8") for path in (pages / "book").glob("*.md")]
    for _, cell in (pair for notebook in notebooks.values() for pair in by_section(notebook)):
        if cell.cell_type == "markdown":
            cell.source = ANSWER.sub("", cell.source)
            prose.append(cell.source)
    shown = set(PASTED.findall("\n".join(prose)))
    for path, notebook in notebooks.items():
        for section, cell in by_section(notebook):
            if cell.cell_type == "code":
                answers = section == "Exercises"
                kept = shown if answers else {None, *shown}
                cell.outputs = [output for output in cell.outputs if glued(output) in kept]
                if answers:
                    cell.source = "# Here the answers are computed. They are left out of this build."
                    cell.metadata.tags = [*cell.metadata.get("tags", []), "remove-cell"]
        nbformat.write(notebook, path)


def by_section(notebook: NotebookNode) -> Iterable[tuple[str, NotebookNode]]:
    """Each cell behind the heading of its section; a cell that has headings is in the last of them."""
    section = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            section = (re.findall(r"^## (.+)$", cell.source, flags=re.MULTILINE) or [section])[-1]
        yield section, cell


def glued(output: NotebookNode) -> str | None:
    """The name under which an output is glued; None if it is another output."""
    return output.get("metadata", {}).get("scrapbook", {}).get("name")


def store(fresh: NotebookNode, source: Path) -> list[str]:
    """Write a freshly executed chapter over its pair, where the two differ in more than volatile outputs.

    Returns:
        The names of the files that were written.
    """
    stored = source.with_suffix(".ipynb")
    written = []
    if not stored.exists() or comparable(fresh) != comparable(nbformat.read(stored, as_version=4)):
        nbformat.write(fresh, stored)
        written.append(stored.name)
    text = as_source(fresh, source)
    if text != source.read_text(encoding="utf-8"):
        source.write_text(text, encoding="utf-8")
        written.append(source.name)
    return written


def read_source(path: Path) -> NotebookNode:
    """Read a chapter's MyST source as a notebook without outputs, its cell ids a function of its text."""
    notebook = jupytext.read(path, config=load_jupytext_config(str(path)))
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return notebook


def as_source(notebook: NotebookNode, path: Path) -> str:
    """The MyST text of a notebook, as its source at `path` should read."""
    return jupytext.writes(notebook, fmt="md:myst", config=load_jupytext_config(str(path)))


def launchable(notebook: NotebookNode, launch_from: str) -> NotebookNode:
    """With a first code cell, in place, that gets a hosted notebook what it lacks; without one if there is no fork."""
    notebook.cells = [cell for cell in notebook.cells if "launch" not in cell.metadata.get("tags", [])]
    if launch_from:
        repository, _, branch = launch_from.partition("@")
        source = LAUNCH.format(repository=repository, name=repository.rpartition("/")[2], branch=branch or "main")
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["launch", "remove-cell"]}, id="launch")
        first = next(n for n, other in enumerate(notebook.cells) if other.cell_type == "code")
        notebook.cells.insert(first, cell)
    return notebook


def lasting(notebook: NotebookNode) -> NotebookNode:
    """Strip, in place, what differs between two runs of the same notebook on the same versions."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = joined_streams(cell.outputs)
    return notebook


def joined_streams(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of one stream: where the kernel cuts it is a matter of timing."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def comparable(notebook: NotebookNode) -> str:
    """What two runs must agree on: everything but the outputs of volatile cells."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if VOLATILE_TAGS & set(cell.metadata.get("tags", ())):
            cell.outputs = []
    return nbformat.writes(copy)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    executing = commands.add_parser("execute", help="run every notebook into _build/run")
    executing.add_argument("--jobs", type=int, default=1, help="so many at a time")
    rendering = commands.add_parser("render", help="render _build/html")
    rendering.add_argument("--executed", action="store_true", help="from _build/run, not from the stored outputs")
    rendering.add_argument("--without-answers", action="store_true", help="to the exercises, as for a class")
    commands.add_parser("refresh", help="run every chapter and store its outputs")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "execute":
            BOOK.execute(asked.jobs)
        elif asked.command == "render":
            BOOK.render(executed=asked.executed, answers=not asked.without_answers)
        else:
            BOOK.refresh()
    except PressError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
