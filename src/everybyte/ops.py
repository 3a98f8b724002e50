"""What a trace needs to know of an op, asked once: an op comes thousands of times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from . import workspace
from .kernels import Plan
from .rules import Rules, engine

aten: Final = torch.ops.aten
ITEM: Final = aten._local_scalar_dense.default
COPY: Final = aten.copy_.default
PACK: Final = aten._pack_padded_sequence.default
EMPTY: Final = aten.empty.memory_format
LIFT: Final = aten.lift_fresh.default
TO: Final = aten.to.dtype_layout
SPECIAL: Final = frozenset({ITEM, COPY, PACK, EMPTY, LIFT, TO})
"""Ops that a trace treats each in a way of its own."""
RESCALE: Final = aten._amp_update_scale_.default
UNSCALE: Final = aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclass(frozen=True)
class Op:
    """An op, as `Op.of` finds it."""

    func: Any
    plan: Plan
    name: str  # without namespace and overload
    aliases: bool  # every output is a view of, or is, an argument: no storage can be new
    mutates: bool
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that are written
    may_grow: bool  # an argument that is written can get another size
    number_slots: tuple[int, ...]  # positions at which a number that was given becomes a tensor that is counted
    data_dependent: bool  # the result's shape, or the result itself if it is no tensor, depends on values
    may_take_over: bool  # a real run may write the result into an argument
    composed: bool  # the rules have it run as the ops that it is made of
    special: bool  # `Trace.on_op` treats it in a way of its own
    is_view: bool  # of its first argument, and takes no other tensor
    scratch: Callable[..., Iterable[int | None]] | None  # of the rules
    scratch_first: bool
    made_in: tuple[int, ...] | Callable[..., tuple[int, ...]] | None  # the order of its results, if it is not theirs
    is_named: bool  # takes what no rule derives, or is not covered
    multiplies: bool  # and asks for a workspace
    takes_more: bool  # scratch, or one of these
    draws: bool  # at random

    def as_made(self, out: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Its results in the order in which the kernel makes them, of these arguments."""
        results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        order = self.made_in(*args) if callable(self.made_in) else self.made_in
        return results if order is None else tuple(results[i] for i in order)

    @classmethod
    def of(cls, func: Any, rules: Rules) -> Self:
        schema, tags = func._schema, func.tags
        name, arguments = schema.name.split("::")[1], list(enumerate(schema.arguments))
        resizes = "resize" in name or name.startswith("set_")
        plan, special = Plan(func, rules), func in SPECIAL or func.namespace == "prims"
        scratch = rules.scratch.get(func) or plan.iterated
        is_named = func in rules.left_out or func in rules.not_covered
        takes_more = scratch is not None or is_named or str(func) in workspace.PRODUCTS
        aliases = bool(schema.returns) and all(returned.alias_info is not None for returned in schema.returns)
        takes_tensors = [i for i, arg in arguments if "Tensor" in str(arg.type)]
        counted = rules.on_host and not rules.keeps_operands  # candle keeps a number in the operation
        return cls(
            func=func,
            plan=plan,
            name=name,
            aliases=aliases,
            mutates=schema.is_mutable,
            written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
            may_grow=resizes or any(arg.is_out for arg in schema.arguments),
            number_slots=tuple(i for i, arg in arguments if counted and str(arg.type) == "Tensor"),
            data_dependent=torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags,
            may_take_over=func in engine.WRITES,
            composed=func in rules.composed,
            special=special,
            is_view=aliases and takes_tensors == [0] and not (schema.is_mutable or special or takes_more),
            scratch=scratch,
            scratch_first=takes_more and func in rules.scratch_first,
            made_in=rules.made_in.get(func),
            is_named=is_named,
            multiplies=str(func) in workspace.PRODUCTS,
            takes_more=takes_more,
            draws=torch.Tag.nondeterministic_seeded in tags,
        )
