"""The press: executes the notebooks, renders the pages, and stores fresh outputs.

    python book/press.py execute              every notebook, by papermill, into _build/run
    python book/press.py render [--executed]  _build/html from the stored outputs, or from _build/run
    python book/press.py refresh              execute from the .md sources and store the outputs

This is the book's own tool, called by the Makefile and by the tests; the library knows nothing of it. Only `refresh`
writes under `notebooks/`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jupytext
import nbformat
import papermill
from jupytext.config import load_jupytext_config
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "_build"
RUN = BUILD / "run"
HTML = BUILD / "html"

# Cells whose output may differ from run to run: nbval does not compare it, and refresh does not store it anew alone.
VOLATILE_TAGS = frozenset({"timing", "nbval-ignore-output"})


class PressError(Exception):
    """Something the reader can mend; the message says how."""


@dataclass(frozen=True)
class Run:
    """One execution of one notebook."""

    notebook: str
    seconds: float


# ---------------------------------------------------------------------------------------------------------- executing


def notebooks() -> list[Path]:
    """The book's executed notebooks, in the order of their numbers."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def execute_one(source: Path, target: Path, parameters: dict[str, object] | None = None) -> Run:
    """Run a notebook by papermill, in the folder `notebooks/`, with the kernel of this interpreter.

    Args:
        source: the .ipynb to run; it is not written to.
        target: where the executed copy goes.
        parameters: values for its `parameters` cell.

    Raises:
        papermill.PapermillExecutionError: a cell failed; `target` holds the notebook up to that cell.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    papermill.execute_notebook(
        str(source),
        str(target),
        parameters=parameters or {},
        kernel_name="python3",
        cwd=str(NOTEBOOKS),
        progress_bar=sys.stderr.isatty(),
        extra_arguments=["--log-level=40"],  # errors only: the kernel warns of its own transport at each start
    )
    return Run(source.stem, time.perf_counter() - start)


def execute(target: Path = RUN) -> list[Run]:
    """Run every notebook with its default parameters into `target`, a complete copy of the book's sources.

    Returns:
        One `Run` a notebook; the same goes to `target/durations.json`.
    """
    sources = notebooks()
    stage(target)
    runs = []
    for number, source in enumerate(sources, 1):
        print(f"[{number}/{len(sources)}] executing {source.name} ...", flush=True)
        try:
            run = execute_one(source, target / "notebooks" / source.name)
        except papermill.PapermillExecutionError as error:
            raise PressError(f"{source.name} failed in cell {error.cell_index}\n{error}") from error
        print(f"[{number}/{len(sources)}] {source.name}: {run.seconds:.1f} s", flush=True)
        runs.append(run)
    (target / "durations.json").write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    print(f"Executed {len(runs)} notebooks in {sum(run.seconds for run in runs):.1f} s, into {shown(target)}")
    return runs


# ---------------------------------------------------------------------------------------------------------- rendering


def stage(target: Path) -> None:
    """Copy what Sphinx reads (configuration, prose, notebooks without their .md twins) into an empty `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "book", target / "book", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (target / "notebooks").mkdir()
    for notebook in notebooks():
        shutil.copy(notebook, target / "notebooks")


def render(executed: bool = False, html: Path = HTML) -> Path:
    """Render the pages, from scratch and with every warning an error.

    Args:
        executed: take the notebooks that `execute` left in `_build/run`, not the stored ones.
        html: the folder that becomes the site; replaced only if the build succeeds.

    Returns:
        The front page.
    """
    if executed and not (RUN / "durations.json").exists():
        raise PressError(f"{shown(RUN)} holds no executed notebooks: run `make book`, or `make html` for the stored ones")
    start = time.perf_counter()
    html.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=html.parent, prefix=".render-") as scratch:
        source = RUN
        if not executed:
            source = Path(scratch) / "source"
            stage(source)
        print(f"Rendering {'the executed' if executed else 'the stored'} notebooks ...", flush=True)
        output = Path(scratch) / "output"
        jupyter_book = str(Path(sys.executable).with_name("jupyter-book"))
        command = [jupyter_book, "build", str(source), "--path-output", str(output), "-W", "-n", "--keep-going", "-q"]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode:
            raise PressError(f"{done.stdout}{done.stderr}\nThe build is not clean: mend the warnings above")
        shutil.rmtree(html, ignore_errors=True)
        shutil.move(output / "_build" / "html", html)
    front = html / "index.html"
    print(f"Rendered in {time.perf_counter() - start:.1f} s. Open {shown(front)} in a browser, or run `make serve`", flush=True)
    return front


# ------------------------------------------------------------------------------------------------------------ storing


def read_source(path: Path) -> NotebookNode:
    """Read a chapter's MyST source as a notebook without outputs, its cell ids a function of its text."""
    notebook = jupytext.read(path, config=load_jupytext_config(str(path)))
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, -1) + 1
        cell["id"] = f"{digest}-{seen[digest]}" if seen[digest] else digest
    return notebook


def as_source(notebook: NotebookNode, path: Path) -> str:
    """The MyST text of a notebook, as its .md twin should read."""
    return jupytext.writes(notebook, fmt="md:myst", config=load_jupytext_config(str(path)))


def clean(notebook: NotebookNode) -> NotebookNode:
    """Strip what differs between two runs of the same notebook on the same versions."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.pop("jupytext", None)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = list(joined_streams(cell.outputs))
    return notebook


def joined_streams(outputs: Iterable[NotebookNode]) -> Iterable[NotebookNode]:
    """Join neighbouring pieces of one stream: where the kernel cuts it is a matter of timing."""
    last = None
    for output in outputs:
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = output
    if last is not None:
        yield last


def lasting(notebook: NotebookNode) -> str:
    """What two runs must agree on: everything but the outputs of volatile cells."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if VOLATILE_TAGS & set(cell.metadata.get("tags", ())):
            cell.outputs = []
    return nbformat.writes(copy)


def refresh() -> list[str]:
    """Execute every chapter from its .md source and store pair by pair what changed.

    A notebook whose fresh run differs only in the outputs of volatile cells stays as it is, to the byte. A chapter that
    fails leaves its stored notebook untouched.

    Returns:
        The names of the files that were written.
    """
    sources = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.md"))
    written = []
    for number, source in enumerate(sources, 1):
        print(f"[{number}/{len(sources)}] executing {source.name} ...", flush=True)
        stored = source.with_suffix(".ipynb")
        with tempfile.TemporaryDirectory() as scratch:
            unrun, ran = Path(scratch) / "unrun.ipynb", Path(scratch) / "ran.ipynb"
            nbformat.write(read_source(source), unrun)
            try:
                run = execute_one(unrun, ran)
            except papermill.PapermillExecutionError as error:
                raise PressError(f"{source.name} failed in cell {error.cell_index}; nothing stored\n{error}") from error
            fresh = clean(nbformat.read(ran, as_version=4))
        changed = []
        if not stored.exists() or lasting(fresh) != lasting(nbformat.read(stored, as_version=4)):
            nbformat.write(fresh, stored)
            changed.append(stored.name)
        text = as_source(fresh, source)
        if text != source.read_text(encoding="utf-8"):
            source.write_text(text, encoding="utf-8")
            changed.append(source.name)
        print(f"[{number}/{len(sources)}] {source.name}: {run.seconds:.1f} s, {', '.join(changed) or 'unchanged'}")
        written += changed
    return written


# ------------------------------------------------------------------------------------------------------- command line


def shown(path: Path) -> str:
    """A path as the reader would type it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("execute", help="run every notebook into _build/run")
    rendering = commands.add_parser("render", help="render _build/html")
    rendering.add_argument("--executed", action="store_true", help="from _build/run, not from the stored outputs")
    commands.add_parser("refresh", help="run every chapter and store its outputs")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "execute":
            execute()
        elif asked.command == "render":
            render(asked.executed)
        else:
            refresh()
    except PressError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
