"""A sweep's folder: what it holds, who may write in it, and what in it can be trusted.

    OUT/results/NAME.json     one combination's result, with a checksum: the truth
    OUT/notebooks/NAME.ipynb  the notebook as it was executed
    OUT/results.parquet       a row a combination: derived, and made anew by each run
    OUT/sweep.json            what is swept, and every combination asked for so far
    OUT/notebook.ipynb        the notebook as it was when the sweep began
    OUT/running/              while there is work: locks, and the notebooks that are being executed

The system lets go of a lock when the process that holds it dies, however it dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from .glued import column
from .grid import Parameter, SweepError, Value, shown

SCHEMA: Final = 1  # of sweep.json
DONE, FAILED = "done", "failed"
_DTYPES: Final = {"int": ("int64", "Int64"), "float": ("float64", "Float64"), "bool": ("bool", "boolean")}
_LOCK: Final = ".lock"


@dataclass(frozen=True)
class Folder:
    """The folder of one sweep."""

    path: Path

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the folder if need be, and holds it against any other sweep; takes it away again if nothing began.

        Raises:
            SweepError: If it is not empty and holds no sweep, or is in use.
            OSError: If it cannot be made or written to, or its file system has no locks.
        """
        if self.path.exists() and not self.path.is_dir():
            raise SweepError(f"{self.path} is a file: name a folder")
        if self.path.is_dir() and set(os.listdir(self.path)) - {_LOCK} and not (self.path / "sweep.json").exists():
            raise SweepError(f"{self.path} is not empty and holds no sweep: choose another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / _LOCK, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SweepError(f"{self.path} is in use by a sweep that runs now: wait for it, or stop it") from None
            try:
                yield
            finally:
                if not any((self.path / begun).exists() for begun in ("running", "results")):
                    for name in ("sweep.json", "notebook.ipynb", _LOCK):
                        (self.path / name).unlink(missing_ok=True)
                    with suppress(OSError):
                        self.path.rmdir()

    def admit(
        self,
        notebook: Any,
        name: str,
        known: Mapping[str, Parameter],
        asked: Sequence[Mapping[str, Value]],
        append: bool,
    ) -> dict[str, dict[str, Value]]:
        """Enters the combinations asked for in sweep.json, and returns them by name, every parameter with its value.

        Raises:
            SweepError: If they are not of the sweep that the folder holds, or are new to it and `append` is not given.
        """
        import nbformat

        code = json.dumps([cell.source for cell in notebook.cells if cell.cell_type == "code"])
        typed = {key: parameter.type.__name__ for key, parameter in known.items() if parameter.type}
        defaults = {key: parameter.default for key, parameter in known.items() if parameter.default is not None}
        whole = [{**defaults, **combination} for combination in asked]
        names = {name_of(values): values for values in whole}
        before: dict[str, Any] = {}
        if (self.path / "sweep.json").exists():
            sweep = self.sweep()
            if (sweep["notebook"], sweep["code"]) != (name, digest(code.encode())):
                which = "the notebook's code as it was before" if sweep["notebook"] == name else sweep["notebook"]
                raise SweepError(f"{self.path} holds a sweep of {which}: choose another folder")
            before = sweep["combinations"]
            new = [shown(values) for key, values in zip(names, asked, strict=True) if key not in before]
            if not new:
                return names
            if not append:
                held = f"{self.path} holds another sweep, of {len(before):,} combinations without {new[0]}"
                raise SweepError(f"{held}: choose another folder, or append to it (--append)")
        self.write("notebook.ipynb", nbformat.writes(notebook).encode())
        self.write(
            "sweep.json",
            as_json({
                "schema": SCHEMA,
                "notebook": name,
                "code": digest(code.encode()),
                "parameters": typed,
                "combinations": {**before, **names},
            }),
        )  # fmt: skip
        return names

    def sweep(self) -> dict[str, Any]:
        """What sweep.json holds.

        Raises:
            SweepError: If there is none, or it is damaged.
        """
        try:
            sweep = json.loads((self.path / "sweep.json").read_bytes())
            if sweep["schema"] == SCHEMA and isinstance(sweep["combinations"], dict):
                return sweep
        except (FileNotFoundError, NotADirectoryError):
            raise SweepError(f"{self.path} holds no sweep") from None
        except (ValueError, KeyError, TypeError):
            pass
        raise SweepError(f"{self.path / 'sweep.json'} is damaged, or of another version: choose another folder")

    def result(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """A combination's result if it is there and sound, else what is wrong with it; nothing, if it was never run."""
        path = f"results/{name}.json"
        try:
            stored = json.loads((self.path / path).read_bytes())
            result = stored["result"]
            if stored["checksum"] != digest(as_json(result)):
                return None, f"{path} is damaged"
        except FileNotFoundError:
            return None, ""
        except (ValueError, KeyError, TypeError):
            return None, f"{path} is damaged"
        if result["notebook"]:
            try:
                if digest((self.path / result["notebook"]).read_bytes()) != result["notebook_sha256"]:
                    return None, f"{result['notebook']} is damaged"
            except FileNotFoundError:
                return None, f"{result['notebook']} is missing"
        return result, ""

    def store(self, name: str, result: Mapping[str, Any]) -> None:
        """Puts a combination's result in place."""
        self.write(f"results/{name}.json", as_json({"checksum": digest(as_json(result)), "result": result}))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file whole or not at all."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with open(unfinished, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    @contextmanager
    def lock(self, name: str) -> Iterator[Path]:
        """Waits until no other process works on a combination; yields where its notebook is executed."""
        running = self.path / "running"
        running.mkdir(exist_ok=True)
        with open(running / f"{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield running / f"{name}.ipynb"

    def table(self) -> pd.DataFrame:
        """The results, a row a combination; see `everybyte.sweep.collect`."""
        sweep = self.sweep()
        rows = [result for result in (self.result(name)[0] for name in sweep["combinations"]) if result]
        columns = {}
        for name, kind in sweep["parameters"].items():
            values = [row["parameters"].get(name) for row in rows]
            columns[name] = pd.array(values, dtype=_DTYPES.get(kind, ("string", "string"))[None in values])
        for key, dtype in (("status", "string"), ("error", "string"), ("seconds", "Float64"), ("notebook", "string")):
            columns[f"run.{key}"] = pd.array([row[key] for row in rows], dtype=dtype)
        for name in dict.fromkeys(name for row in rows for name in row["glued"]):
            title = name
            while title in columns:
                title += " (glued)"
            columns[title] = column([row["glued"].get(name) for row in rows])
        return pd.DataFrame(columns)

    def write_table(self) -> None:
        """Makes results.parquet anew."""
        content = io.BytesIO()
        self.table().to_parquet(content, index=False)
        self.write("results.parquet", content.getvalue())


def name_of(values: Mapping[str, Value]) -> str:
    """A file's name for a combination: readable, and by its digest unlike any other's."""
    text = ",".join(f"{name}={value}" for name, value in values.items())
    key = digest(as_json(dict(sorted(values.items()))))[:10]
    return f"{re.sub(r'[^A-Za-z0-9_.,=+-]', '_', text)[:120]}-{key}"


def as_json(value: Any) -> bytes:
    """A value as it is stored."""
    return json.dumps(value, indent=1).encode()


def digest(content: bytes) -> str:
    """What tells contents apart."""
    return hashlib.sha256(content).hexdigest()
