"""A forecast of a program: would it fit on a GPU, whose is the memory at its peak, and what would help?

The program runs in a trace. Its timeline, with the workspaces of cuBLAS added, then goes through the allocator twice:
beside the smallest and beside the largest CUDA context. Only where both agree is the answer yes or no.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

from . import answers, otherwise, schema, workspace
from .caching import MIN_BLOCK
from .changes import Loaders
from .gpus import GPU
from .lines import LONGEST_LINE, LONGEST_TABLE, peaks, table
from .names import alike, printable
from .otherwise import Found, Seen, compared
from .places import led_there
from .script import Failed, Program, Ran
from .timeline import Timeline
from .trials import Advice, Trial, Trials
from .units import format_bytes
from .verdict import FITS, Verdict, doubts, judge, steps_until
from .worlds import ZEROS, same_draws

_UNASKED: Final = Advice({}, ())
UNSEEN: Final = (
    "the program goes on after the steps that were traced: a longer batch, an evaluation or a layer that begins to "
    "learn there is not in these figures; --steps traces more of them, --phase eval the evaluation"
)

PATIENCE: Final = 60
"""So many seconds, beside ten times what the first trace took, are given to each other one."""


@dataclass(frozen=True)
class Forecast:
    """What a trace of a program says.

    Attributes:
        program: The program.
        gpu: The GPU that it was traced for.
        assumed: Whether nobody named that GPU.
        ran: The trace; it is over.
        whole: What the allocator gets to see: the run's timeline with workspaces.
        verdict: Whether it fits.
        plain: The same as trials are compared with.
        worlds: Whether what it allocates hangs on values that no trace knows.
        advice: What would help; empty until `advised`.
        remarks: What is worth knowing beside what the trace remarks.
    """

    program: Program
    gpu: GPU
    assumed: bool
    ran: Ran
    whole: Timeline
    verdict: Verdict
    plain: Trial
    worlds: Found
    advice: Advice = _UNASKED
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, program: Program, gpu: GPU, *, assumed: bool = False) -> Self:
        """Traces a program, and judges it.

        Raises:
            Failed: If the program, or the tracing of it, did not come to its end, or it put nothing on the GPU.
        """
        loaders, began = Loaders(), time.monotonic()
        with same_draws():
            ran = program.trace(gpu, changes=[loaders.watched()])
        if not len(ran.run.timeline):
            unsure = doubts(ran.run.not_covered, ran.run.conditional)
            why = "; ".join([*unsure, *ran.run.remarks]) or "does it ask for device='cpu'?"
            raise Failed(f"{program.target} put nothing on the GPU: {why}", cannot_say=bool(unsure))
        whole = ran.run.timeline.with_workspaces()
        verdict = judge(whole, gpu, goes_on=ran.goes_on)
        base = Seen.of(ZEROS.name, ran.run, verdict, ran.ended)
        if ran.run.answers.asked:
            found = _elsewhere(program, gpu, base, PATIENCE + 10 * (time.monotonic() - began))
        else:
            found = compared(base, ())
        if found.doubts:
            verdict = judge(whole, gpu, found.doubts, goes_on=ran.goes_on)
        plain = Trial.of(verdict, loaders, ran.run.timeline.info["steps"])
        unseen = [UNSEEN] if ran.goes_on and plain.fits else []
        remarks = (*ran.remarks, *found.remarks, *unseen)
        return cls(program, gpu, assumed, ran, whole, verdict, plain, found, remarks=remarks)

    @property
    def timeline(self) -> Timeline:
        """What the program asked for."""
        return self.ran.run.timeline

    @property
    def steps(self) -> int:
        """How many steps were marked; 0 if it ran by itself."""
        return self.timeline.info["steps"]

    @property
    def is_sure(self) -> bool:
        """Whether the trace is what a real run does, so that trials can be compared with it."""
        leaks = self.ran.goes_on and steps_until(self.verdict.left[0], self.whole) is not None
        return not (self.worlds.doubts or leaks)

    def advised(self) -> Self:
        """The same with the largest sizes that fit, and what each lever saves: each a trace of its own."""
        try:
            with Trials(self.program, self.gpu, settled=self.worlds.settled) as trials:
                return replace(self, advice=trials.advice(self.plain))
        except (BrokenExecutor, EOFError):
            return self.remarked(
                "what would help is not known: a trial's process was killed, perhaps as it filled the host"
            )

    def remarked(self, text: str) -> Self:
        """The same with one remark more."""
        return replace(self, remarks=(*self.remarks, text))

    @cached_property
    def answer(self) -> Mapping[str, Any]:
        """As JSON; `answer.schema.json` describes it."""
        program, gpu, run, timeline = self.program, self.gpu, self.ran.run, self.timeline
        verdict, needs = self.verdict, self.verdict.replay
        return {
            "schema": schema.VERSION,
            "function": program.target,
            "arguments": list(program.arguments),
            "ended": self.ran.ended,
            "gpu": {
                "key": gpu.key,
                "name": gpu.name,
                "total": gpu.total,
                "usable_at_least": gpu.usable[0],
                "usable_at_most": gpu.usable[1],
            },
            "assumed": self.assumed,
            "steps": self.steps,
            "verdict": verdict.word,
            "reason": verdict.why or None,
            "needs": verdict.needs,
            "left": {"at_least": verdict.left[0], "at_most": verdict.left[1]},
            "largest": {
                kind: {
                    "now": one.now,
                    "fits": one.size,
                    "bytes": one.nbytes or None,
                    "next_bytes": one.next_nbytes or None,
                    "next_reason": one.next_why or None,
                }
                for kind, one in self.advice.largest.items()
            },
            "levers": [
                {
                    "name": pulled.lever.name,
                    "saves": needs.peak_reserved - pulled.trial.nbytes,
                    "peak_reserved": pulled.trial.nbytes,
                    "fits": pulled.trial.fits,
                    "costs": pulled.lever.costs,
                    "edit": dict(pulled.lever.edit),
                }
                for pulled in self.advice.levers
            ],
            "peak_allocated": needs.peak_allocated,
            "peak_rounded": timeline.rounded(MIN_BLOCK).peak_bytes,
            "peak_requested": timeline.peak_bytes,
            "peak_reserved": needs.peak_reserved,
            "fragmentation": asdict(needs.fragmentation),
            "out_of_memory": verdict.failure and asdict(verdict.failure),
            "peak": answers.moment(timeline, timeline.peak, "step", "phase", "op", "module", "line", "own"),
            **{f"by_{key}": answers.by(timeline, key) for key in ("category", "module", "op", "line")},
            "saved_for_backward": answers.saved_for_backward(timeline),
            "growth_per_step": answers.growth_per_step(timeline),
            "workspaces": [asdict(taken) for taken in run.workspaces],
            "worlds": [
                {
                    "answers": seen.world,
                    "peak_allocated": seen.peak_allocated,
                    "ended": seen.ended or None,
                    "parts_at": self.worlds.parts[seen.world][1] if seen.world in self.worlds.parts else None,
                }
                for seen in self.worlds.others
            ],
            "not_covered": sorted(run.not_covered),
            "conditional": list(self.worlds.conditional),
            "left_out": sorted(run.left_out),
            "remarks": [*self.remarks, *run.remarks],
        }

    def lines(self) -> Iterator[str]:
        """The same for a terminal."""
        answer, gpu, peak = self.answer, self.gpu, self.answer["peak"]
        where = f"{gpu.name}{' (--gpu chooses another)' if self.assumed else ''}"
        yield printable(f"{answer['function']} on {where}, {answers.extent(answer)}: {answer['verdict']}")
        yield ""
        yield from _first(answer)
        yield ""
        yield from peaks(answer)
        context = f"less {gpu.context[0]:,} to {gpu.context[1]:,} B for a context"
        yield f"memory          {format_bytes(gpu.total):>46}  {context}"
        yield ""
        yield f"When most is reserved: {self.verdict.replay.fragmentation}."
        when = f"step {peak['step']}, {peak['phase']}" if peak["step"] >= 0 else f"event {peak['event']:,}"
        for key in ("category", "module", "op"):
            yield ""
            yield f"Requested at the peak ({when}), by {key}:"
            rows = [(row["bytes"], row["storages"], row[key] or "(outside any module)") for row in answer[f"by_{key}"]]
            yield from table(rows if len(rows) <= LONGEST_TABLE else alike(rows))
        for title, notes in (
            ("Beside the tensors, counted in allocated and reserved", [str(w) for w in self.ran.run.workspaces]),
            ("Not covered by any rule", answer["not_covered"]),
            ("Decided by values that no trace knows", answer["conditional"]),
            ("Traced with other values", otherwise.notes(answer["worlds"])),
            ("Left out", answer["left_out"]),
            ("Worth knowing", [*answer["remarks"], workspace.beside(gpu)]),
        ):
            if notes:
                yield ""
                yield f"{title}:"
                yield from (f"  {printable(note, LONGEST_LINE)}" for note in notes)


def _elsewhere(program: Program, gpu: GPU, base: Seen, seconds: float) -> Found:
    """What the program does where it is answered otherwise."""
    try:
        with Trials(program, gpu) as trials:
            return trials.worlds(base, seconds)
    except (BrokenExecutor, EOFError):
        found = compared(base, ())
        killed = (
            "whether values that no trace knows decide what is allocated is not known: the process that tries others "
            "was killed, or ended itself"
        )
        return replace(found, doubts=[*found.doubts, killed])


def _first(answer: Mapping[str, Any]) -> Iterator[str]:
    """What one wants to know first: how much is left or missing, where the peak is, what fits, what helps."""
    least, most = answer["left"]["at_least"], answer["left"]["at_most"]
    if most < 0:
        yield f"missing         {format_bytes(-most):>46}  at least, {-least:,} B at most"
    else:
        yield f"left            {format_bytes(max(least, 0)):>46}  at least, {most:,} B at most"
    peak = answer["peak"]
    at = " in ".join(filter(None, [peak["line"], peak["module"]]))
    yield printable(f"peak at         {at or peak['op']}{led_there(peak)}", LONGEST_LINE)
    for kind, one in answer["largest"].items():
        more = ""
        if one["next_bytes"]:
            more = f"; {one['fits'] + 1:,} needs {format_bytes(one['next_bytes'])}"
        elif one["next_reason"]:
            more = f"; {one['fits'] + 1:,} cannot be traced: {one['next_reason']}"
        yield printable(f"largest {kind.replace('_', ' ')} that fits: {one['fits']:,} (now {one['now']:,}{more})")
    if answer["levers"] and answer["verdict"] == FITS:
        edits = [one["name"] for one in answer["levers"]]
        yield printable(f"would be smaller with {', '.join(edits)} (--html and --json say by how much)", LONGEST_LINE)
    elif answer["levers"]:
        yield ""
        yield "What would make it smaller, each traced again alone (--html and --json say what to write):"
        for one in answer["levers"]:
            fits = "it fits" if one["fits"] else "it does not fit yet"
            yield f"  {format_bytes(one['saves']):>46}  {one['name']}: {fits}"
