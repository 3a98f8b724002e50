"""What a set of rules is: one device, and what its kernels do otherwise than the meta device shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from . import dtypes, layout
from .autocast import Policy

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rules:
    """Whose kernels' rules a trace follows.

    Attributes:
        name: As `everybyte.trace(rules=...)` takes it.
        device: Where traced tensors say that they live.
        kernels: Op -> a function of the same arguments that returns, on the meta device, what the device's kernel
            returns.
        functions: Function of torch's Python face -> a function of the same arguments that takes the device's path.
        reads: Function among these -> positions of tensors of which its path takes the values, as lists of numbers.
        scratch: Op -> a function of the same arguments: the sizes in bytes of what its kernel allocates for itself, in
            order; all of it is given back before the kernel returns, and -n says that n bytes are given back earlier.
        iterated: The same for pointwise ops: op -> such a function, or None.
        scratch_first: Ops whose kernel allocates it before its results, or where None stands among the sizes before one
            of these; the others' do after them.
        made_in: Op of several results -> the order in which its kernel makes them, if it is not theirs; or a function
            of the same arguments that returns it.
        remarks: Function of torch's Python face -> a function of the same arguments: what the user should know of the
            call, or None.
        left_out: Op or function -> memory that it takes beside what is traced and that no rule derives: its name, or a
            function of the same arguments that returns it, or None.
        composed: Ops whose kernel is made of other ops, which are traced in its place.
        not_covered: Function -> what it is called, if the device has a kernel for it that no rule states.
        keeps_operands: Whether every operand of every recorded op lives as long as its graph (`rules.candle`).
        autocast: Op, by name -> what autocast does with it (`rules.autocast`).
    """

    name: str
    device: torch.device
    kernels: Mapping[Any, Function]
    functions: Mapping[Any, Function]
    reads: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    scratch: Mapping[Any, Callable[..., Iterable[int | None]]] = field(default_factory=dict)
    iterated: Callable[[Any], Callable[..., Iterable[int]] | None] = lambda op: None
    scratch_first: frozenset[Any] = frozenset()
    made_in: Mapping[Any, tuple[int, ...] | Callable[..., tuple[int, ...]]] = field(default_factory=dict)
    remarks: Mapping[Any, Callable[..., str | None]] = field(default_factory=dict)
    left_out: Mapping[Any, str | Callable[..., str | None]] = field(default_factory=dict)
    composed: frozenset[Any] = frozenset()
    not_covered: Mapping[Any, str] = field(default_factory=dict)
    autocast: Mapping[str, Policy] = field(default_factory=dict)
    keeps_operands: bool = False

    @cached_property
    def on_host(self) -> bool:
        """Whether the device's memory is the host's, so that there is no other side for a tensor to be on."""
        return self.device.type == "cpu"

    def kernel(self, op: Any) -> Function:
        """What runs in an op's place on the meta device."""
        return dtypes.checked(op, self.kernels.get(op) or layout.as_iterated(op), self.on_host)


def stating(table: dict[Any, Function], *names: Any) -> Callable[[Function], Function]:
    """Decorates a function that states the rule for these ops or functions: it goes into the table under each.

    Raises:
        ValueError: If one of them has a rule there already.
    """

    def register(function: Function) -> Function:
        if twice := [str(name) for name in names if name in table]:
            raise ValueError(f"{function.__name__}: {', '.join(twice)} has a rule already")
        table.update(dict.fromkeys(names, function))
        return function

    return register
