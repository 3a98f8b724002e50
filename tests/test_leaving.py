"""A program is left, whatever it catches; and a loop that asks again and again is counted."""

import runpy
import subprocess
import sys
import textwrap

import pytest
import torch

from everybyte.leaving import Leaving
from everybyte.rounds import Rounds

CATCHING = {
    "nothing": "while True: stop()",
    "a loop": """
        while True:
            try: stop()
            except: continue
        """,
    "loops in loops": """
        while True:
            try:
                while True:
                    try:
                        while True:
                            try: stop()
                            except: pass
                    except BaseException as error:
                        last = error
            except:
                pass
        """,
    "functions": """
        def safe(work):
            try: return work()
            except: return None
        def often(work):
            for _ in range(10**9): safe(work)
        while True: safe(lambda: often(lambda: often(stop)))
        """,
    "another error": """
        while True:
            try:
                try: stop()
                except BaseException as error: raise RuntimeError('wrapped') from error
            except Exception: print(end='')
        """,
    "finally": """
        while True:
            try: stop()
            finally: continue
        """,
    "suppressed": """
        import contextlib
        while True:
            with contextlib.suppress(BaseException):
                while True:
                    with contextlib.suppress(BaseException): stop()
        """,
    "a generator": """
        def batches():
            while True:
                try: yield stop()
                except: pass
        while True:
            try: list(batches())
            except: pass
        """,
    "what dies": """
        import weakref
        class Thing: pass
        def held():
            things = [Thing() for _ in range(3)]
            kept.extend(weakref.ref(thing, lambda _: print(end='')) for thing in things)
            stop()
        kept = []
        while True:
            try:
                while True:
                    try: held()
                    except: pass
            except: pass
        """,
    "without gradients": """
        import torch
        while True:
            try:
                while True:
                    try:
                        with torch.no_grad(), torch.device('meta'): stop()
                    except: pass
            except: pass
        """,
}


class Enough(BaseException):
    pass


@pytest.mark.parametrize("how", CATCHING)
def test_a_program_is_left_whatever_catches_that(how, tmp_path):
    leaving, times, before = Leaving(), [], (sys.unraisablehook, sys.gettrace())

    def stop():
        times.append(0)
        assert len(times) < 50
        leaving.now(Enough, "three steps")

    main, script = sys.modules["__main__"], tmp_path / "train.py"
    script.write_text(textwrap.dedent(CATCHING[how]))
    with pytest.raises(Enough, match="three steps"):
        leaving.of(lambda: runpy.run_path(str(script), {"stop": stop}, "__main__"))
    assert sys.modules["__main__"] is main
    assert len(times) <= 2
    assert (sys.unraisablehook, sys.gettrace()) == before
    assert torch.is_grad_enabled() and not torch.zeros(1).is_meta
    assert sum(range(1000)) == 499500  # nothing is raised any more


def test_rounds_are_those_of_the_innermost_loop_under_way():
    rounds, counted = Rounds(), []

    def asks(lap):
        counted.append(rounds.count(sys._getframe(), lap))

    def generates(tokens, lap=0):
        for _ in range(tokens):
            asks(lap)

    for _ in range(2):
        generates(3)
    assert counted == [0, 1, 2, 0, 1, 2]
    counted.clear()
    for lap in (0, 0, 1):
        counted.append(rounds.count(sys._getframe(), lap))
    assert counted == [0, 1, 0]  # a place of its own, and anew with each lap


def test_a_program_that_was_left_leaves_a_profiler_its_way(tmp_path):
    """Python 3.11 stays at one instruction where an exception is announced that never comes."""
    loop = "for i in range(9):\n    try: torch.ones(8, device='cuda').sum().item()\n    except: pass\n"
    (tmp_path / "train.py").write_text(f"import torch\n{loop}")
    code = (
        "import cProfile, faulthandler; faulthandler.dump_traceback_later(60, exit=True)\n"
        "from everybyte.script import Program; Program('train.py').trace('t4')\n"
        "cProfile.Profile().runcall(lambda: sum(len(str(i)) for i in range(99)))\nprint('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr
