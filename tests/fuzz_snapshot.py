"""Feeds damaged and hostile files to `everybyte snapshot`, led by coverage, until more than a line comes out.

    pip install atheris
    python tests/fuzz_snapshot.py -max_total_time=600 -max_len=20000 -timeout=20 -rss_limit_mb=2048 CORPUS

Half of the inputs are mutated as bytes, half as what they hold: an entry is dropped, doubled, moved or made something
else, and the whole pickled again. Every input must end in an answer or in one line and exit code 2, and run nothing.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["everybyte"]):
    from everybyte import cli, plain_pickle, snapshot_file
    from everybyte.allocator import Allocator
    from everybyte.timeline import Recorder

FORBIDDEN = ("pickle.find_class", "os.system", "os.mkdir", "os.remove", "subprocess.Popen", "socket.connect")
ACTIONS = sorted(snapshot_file.ACTIONS)
NUMBERS = (0, 1, -1, 511, 512, 2**20, 2**21, 2**47, 2**48, 2**63, 2**70, 10**400, 0.5, float("nan"))
OTHERS = (True, None, "", "\x1b[2J\n", "\ud800", "x" * 999, b"", [], {}, ())


def seeds() -> list[bytes]:
    """Small recordings of every kind of event."""
    found = []
    for allocator in (Allocator(), Allocator(total="60 MiB"), Allocator(expandable_segments=True)):
        recorder, live = Recorder(), []
        for i, mib in enumerate((1, 3, 12, 19, 0, 30, 2, 8)):
            live.append(recorder.alloc((mib << 20) + 300, op="mul", line="net.py:3", device=f"cuda:{i % 5 // 4}"))
            if i % 3 == 2:
                recorder.free(live.pop(0))
        path = FOLDER / "seed"
        recorder.finish({}).to_snapshot(path, allocator)
        found.append(path.read_bytes())
    return found


def places(data: object) -> list[tuple]:
    """Every place in nested dicts and lists, as the container and the key; a list may hold itself."""
    todo, found, seen = [data], [], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            todo.append(one[key])
    return found


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """libFuzzer's own mutation of the bytes, or an edit of what they hold."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return atheris.Mutate(data, most)
    try:
        FILE.write_bytes(data)
        tree = copy.deepcopy(plain_pickle.load(FILE)[0])
    except (ValueError, RecursionError):
        tree = plain_pickle.load(chance.choice(SEED_FILES))[0]
    for _ in range(chance.randint(1, 4)):
        options = places(tree)
        if not options:
            break
        (container, key), (other, there) = chance.choice(options), chance.choice(options)
        match chance.randrange(7):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(chance.randint(0, len(container)), copy.deepcopy(container[key]))
            case 2 if isinstance(container, list):
                container[key:] = [container[key]] * chance.randint(0, 30)
            case 3 if isinstance(container[key], int):
                container[key] += chance.choice((-512, -1, 1, 512, 2**20, 2**21))
            case 4:
                container[key] = chance.choice(ACTIONS)
            case 5:
                container[key] = copy.deepcopy(other[there])
            case _:
                container[key] = chance.choice(NUMBERS + OTHERS)
    try:
        return pickle.dumps(tree, chance.randint(2, 5))[:most]
    except RecursionError:
        return atheris.Mutate(data, most)


def forbid(event: str, arguments: tuple) -> None:
    is_text = event == "exec" and arguments[0].co_filename.startswith("<")  # else it is a module, imported late
    if WATCHED and (is_text or event in FORBIDDEN):
        raise AssertionError(f"the file made the process do {event} {arguments!r}")


def check(data: bytes) -> None:
    FILE.write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    WATCHED.append(True)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(["snapshot", str(FILE), *(["--json"] if len(data) % 2 else [])])
    finally:
        WATCHED.clear()
    if code == 0:
        assert not err.getvalue(), err.getvalue()
        if len(data) % 2:
            json.loads(out.getvalue())
        assert all(c.isprintable() for line in out.getvalue().split("\n") for c in line)
    else:
        assert code == 2
        assert not out.getvalue()
        assert err.getvalue().startswith("everybyte: ")
        assert err.getvalue().count("\n") == 1


if __name__ == "__main__":
    WATCHED: list[bool] = []
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        FOLDER, FILE = Path(folder), Path(folder, "snapshot.pickle")
        SEED_FILES = []
        for i, seed in enumerate(seeds()):
            SEED_FILES.append(Path(folder, f"seed{i}"))
            SEED_FILES[-1].write_bytes(seed)
            check(seed)  # what is imported late is imported now
        sys.addaudithook(forbid)
        atheris.Setup(sys.argv, check, custom_mutator=mutated)
        atheris.Fuzz()
