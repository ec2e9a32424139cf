"""register_sharding: a rule written as a table of placements, one row a strategy of one mesh axis.

    @register_sharding(torch.ops.mylib.scale.default)
    def rule(x, factor):
        return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]

A row is (placements of the outputs, placements of the arguments, None where an argument is no tensor). On a
mesh of several axes a row is chosen per axis. "Everything replicated" is always possible and needs no row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dtensor.experimental.verify import wrong_row
from dtensor.placement import Placement, Shard, StridedShard, as_placement
from dtensor.rules.call import op_name
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule
from dtensor.spec import Spec

__all__ = ["register_sharding"]

Op = torch._ops.OpOverload
Row = tuple[Sequence[Placement | None], Sequence[Placement | None]]
RuleFn = Callable[..., Sequence[Row]]


def register_sharding(op: Op | Sequence[Op], *, check: bool = True) -> Callable[[RuleFn], RuleFn]:
    """Decorator that registers a function as the sharding rule of an operator overload, or of several.

    The function is called with the operator's arguments, tensors given as `Spec` (shape, ndim, dtype, placements
    and mesh), whenever an argument or a layout is new; it returns rows as in the module's text. An existing rule
    is replaced. Raises TypeError when `op` is no operator overload; a row that does not fit the call raises
    ValueError when the operator is called, and so does a row that gives other numbers than the operator.

    Args:
        op: the overload, or several that share the rule.
        check: try the rows on small random inputs, without communication, when a call is new (see
            `dtensor.experimental.verify`). False for operators whose kernels communicate or keep state.
    """
    ops: list[Any] = list(op) if isinstance(op, (list, tuple)) else [op]
    for o in ops:
        if not isinstance(o, Op):
            raise TypeError(
                f"register_sharding: expected an operator overload, got {repr(o)[:200]}\n"
                "  fix: one such as torch.ops.aten.mm.default"
            )

    def decorate(fn: RuleFn) -> RuleFn:
        def build(call: Call) -> Rule:
            rule = _rule(fn, call)
            found = wrong_row(call, rule.rows) if check else None
            if found is not None:
                raise ValueError(_wrong(call, rule.rows[found[0]], found[1]))
            return rule

        build.__name__ = f"rows of {getattr(fn, '__name__', 'a function')}"
        register([op_name(o) for o in ops], build)
        return fn

    return decorate


def _rule(fn: RuleFn, call: Call) -> Rule:
    args, kwargs, slots = _arguments(fn, call)
    outs = [None if m is None else len(m.shape) for m in call.outputs]
    rows = []
    for given in fn(*args, **kwargs):
        try:
            out_row, in_row = given
        except (TypeError, ValueError):
            raise ValueError(_bad(call, given, "a row is a pair (output placements, input placements)")) from None
        ins = _input_row(call, given, list(in_row), slots)
        rows.append((_output_row(call, given, list(out_row), outs), ins))
    nothing = lambda ndim: ((),) * (ndim or 0)  # noqa: E731
    return Rule(
        tuple(nothing(s.ndim) for s in call.inputs), tuple(nothing(n) for n in outs), (), rows=tuple(rows)
    )


def _arguments(fn: RuleFn, call: Call) -> tuple[list[Any], dict[str, Any], list[Spec | None]]:
    """Arguments for `fn`, and what each placement of a row stands for: a tensor, or None for another argument.

    Trailing arguments that have their default value are left out when `fn` does not take them.
    """
    schema = call.op._schema.arguments
    parameters = inspect.signature(fn).parameters.values()
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    room = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    takes = {p.name for p in parameters} if not any(p.kind is p.VAR_KEYWORD for p in parameters) else None
    positional = [a for a in schema if not a.kwarg_only]
    while not many and len(positional) > room and _is_default(positional[-1], call):
        positional.pop()
    named = [
        a for a in schema if a.kwarg_only and (takes is None or a.name in takes or not _is_default(a, call))
    ]
    slots: list[Spec | None] = []
    for a in (*positional, *named):
        value = call[a.name]
        if isinstance(value, (list, tuple)) and any(isinstance(v, Spec) for v in value):
            slots += [v if isinstance(v, Spec) else None for v in value]
        else:
            slots.append(value if isinstance(value, Spec) else None)
    as_given = lambda v: list(v) if isinstance(v, tuple) else v  # noqa: E731
    return [as_given(call[a.name]) for a in positional], {a.name: as_given(call[a.name]) for a in named}, slots


def _is_default(argument: Any, call: Call) -> bool:
    value = call[argument.name]
    return bool(argument.has_default_value() and not isinstance(value, Spec) and value == argument.default_value)


def _input_row(call: Call, row: object, given: list[Any], slots: list[Spec | None]) -> tuple[Placement, ...]:
    tensors = [s for s in slots if s is not None]
    if len(given) != len(slots):
        longer = max(len(given), len(slots))
        padded = given + [None] * (longer - len(given))
        asked = slots + [None] * (longer - len(slots))
        if any((p is None) != (s is None) for p, s in zip(padded, asked)):
            padded = [p for p in given if p is not None]
            asked = [*tensors]
        if len(padded) != len(asked):
            raise ValueError(
                _bad(call, row, f"{len(given)} input placements for {len(slots)} arguments, {len(tensors)} tensors")
            )
        given, slots = padded, asked
    out = []
    for i, (p, spec) in enumerate(zip(given, slots)):
        if spec is None:
            if p is not None:
                raise ValueError(_bad(call, row, f"argument {i} is no tensor, so its placement must be None"))
        elif p is None:
            raise ValueError(_bad(call, row, f"argument {i} is a tensor and needs a placement"))
        else:
            out.append(_placement(call, row, p, spec.ndim))
    return tuple(out)


def _output_row(call: Call, row: object, given: list[Any], ndims: list[int | None]) -> tuple[Placement, ...]:
    if len(given) != len(ndims):
        raise ValueError(_bad(call, row, f"{len(given)} output placements for {len(ndims)} outputs"))
    return tuple(
        _placement(call, row, p, 0 if n is None else n) if p is not None or n is not None else as_placement(p)
        for p, n in zip(given, ndims)
    )


def _placement(call: Call, row: object, given: object, ndim: int) -> Placement:
    try:
        p = as_placement(given)
    except TypeError as error:
        raise ValueError(_bad(call, row, str(error))) from None
    if isinstance(p, (Shard, StridedShard)):
        d = p.dim + ndim if p.dim < 0 else p.dim
        if not 0 <= d < ndim:
            raise ValueError(_bad(call, row, f"{p!r} for a tensor of {ndim} dims"))
        if d != p.dim:
            return Shard(d) if isinstance(p, Shard) else StridedShard(d, split_factor=p.split_factor)
    return p


def _wrong(call: Call, row: tuple[tuple[Placement, ...], tuple[Placement, ...]], how: str) -> str:
    shapes: Iterable[str] = (str(list(s.shape)) for s in call.inputs)
    return (
        f"register_sharding: the rule of {op_name(call.op)} has a row that gives other numbers than the operator: "
        f"{how}\n"
        f"  row: outputs {list(row[0])}, inputs {list(row[1])}, for shapes {', '.join(shapes)}\n"
        "  fix: leave the row out; register_sharding(op, check=False) if the operator's kernel itself communicates"
    )


def _bad(call: Call, row: object, why: str) -> str:
    shapes: Iterable[str] = (str(s) for s in call.inputs)
    return (
        f"register_sharding: the rule of {op_name(call.op)} gave a row that does not fit the call: {why}\n"
        f"  got: {row!r} for inputs {', '.join(shapes)}\n"
        "  rule: one placement for each output, one for each argument, None where an argument is no tensor"
    )
