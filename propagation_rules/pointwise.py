"""Pointwise ops: every output dim is a factor, inputs broadcast to it.

Any op with torch's `pointwise` tag uses the default entry, without linearity. What is listed here says what
pending inputs pass through: `0+1` is linear in both together (add), `0|1` in either (mul), `max:0` monotone,
`neg:0` antitone, `any:0` only moves elements. The same words are read with care for dtypes: booleans are not
added up, averages of integers are rounded, a cast on the way may round.

Functions that are monotone only where they are defined (sqrt, log) pass a pending minimum, but no maximum, which
ranks whose own part is negative may hold together. Not listed are those that swallow NaN (sign, fmax).

Numbers that enter a pending tensor: `x + 1`, `masked_fill(x, mask, 1)`, `fill_(x, 1)`.

Averages, maxima and minima take the number on every rank: avg(a + 1, b + 1) = avg(a, b) + 1. In a pending sum
it may count only once, so the first position of the pending axes takes it and the others a zero (a one in
`fill_` of a pending product):

    x: f32[8]{P:tp} on 4 ranks     x + 1     rank 0 adds 1, ranks 1 to 3 add 0; the result stays pending

Nothing is sent, and such ops work in place: `x.mean(-1).add_(eps)` over a sharded dim does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.placement import Partial
from dtensor.rules.registry import Builder, Call, present_groups, register
from dtensor.rules.rule import Dims, Linear, Rule
from dtensor.spec import Spec

from .build.dtypes import cast_passes, is_exact

__all__ = [
    "NUMBERS",
    "broadcast_dims",
    "broadcast_rule",
    "broadcast_shape",
    "is_list_op",
    "pointwise",
    "register_with_lists",
    "with_number",
]

NUMBERS = "* alpha value scalar scalars weight"
"""Arguments of pointwise ops whose value changes neither layouts nor metadata."""


# ------------------------------------------------------------ the builder
def broadcast_dims(shape: torch.Size, into: torch.Size) -> Dims:
    """Factors of a tensor of `shape` that broadcasts into `into`, one factor a dim of `into`."""
    first = len(into) - len(shape)
    return tuple((first + i,) if size == into[first + i] else () for i, size in enumerate(shape))


def broadcast_shape(shapes: Iterable[torch.Size]) -> torch.Size:
    """The shape that tensors of `shapes`, which fit, broadcast to."""
    out: list[int] = []
    for shape in shapes:
        out[:0] = shape[: max(len(shape) - len(out), 0)]
        for d in range(1, len(shape) + 1):
            if out[-d] == 1:
                out[-d] = shape[-d]
    return torch.Size(out)


def is_list_op(call: Call) -> bool:
    """True when `call` is one element of a `_foreach_*` op, which can have no local part of its own."""
    return "::_foreach_" in call.op._schema.name


def shared_inputs(call: Call) -> frozenset[int]:
    """Inputs of a list op that all elements share."""
    if not is_list_op(call):
        return frozenset()
    shared = {a.name for a in call.op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")}
    return frozenset(i for i, n in enumerate(call.names) if n in shared)


def broadcast_rule(call: Call, groups: Iterable[Linear] = ()) -> Rule:
    """The rule of a call whose tensors all broadcast together."""
    apart = {i for i in shared_inputs(call) if call.inputs[i].ndim}
    shape = broadcast_shape(s.shape for i, s in enumerate(call.inputs) if i not in apart)
    return Rule(
        tuple(((),) * s.ndim if i in apart else broadcast_dims(s.shape, shape) for i, s in enumerate(call.inputs)),
        tuple(() if m is None else broadcast_dims(m.shape, shape) for m in call.outputs),
        tuple(shape),
        linear=tuple(groups),
    )


def sound_groups(call: Call, groups: Iterable[Linear]) -> tuple[Linear, ...]:
    """`groups` without what the dtypes forbid, and without inputs that all elements of a list op share."""
    shared = shared_inputs(call)
    outs = [m.dtype for m in call.outputs if m is not None] or [s.dtype for s in call.inputs[:1]]
    found = []
    for group in groups:
        dtypes = {call.inputs[i].dtype for i in group.inputs}
        ops = group.ops
        if ops == (("*", "*"),):
            each = [cast_passes(src, dst) for src in dtypes for dst in outs]
            some = [e for e in each if e != ops]
            ops = tuple(p for p in some[0] if all(p in e for e in some)) if some else ops
        elif any(is_exact(d) for d in dtypes):
            wraps = any(s != d and ("sum", "sum") not in cast_passes(s, d) for s in dtypes for d in outs)
            drop = {"avg", "sum"} if torch.bool in dtypes or wraps else {"avg"}
            ops = () if ("max", "min") in ops else tuple(p for p in ops if p[0] not in drop)
        if ops and not group.inputs & shared:
            found.append(Linear(group.inputs, ops, group.whole_outputs))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class pointwise:  # noqa: N801 - used as a function
    """Builder of a pointwise rule; `linear` as in `dtensor.rules.registry.linear_groups`, `more` further groups.

    `truth`: numbers count as true or false, so that of numbers no pending `and` passes: 1 and 2 are true, 1 & 2 is not.
    """

    linear: str = ""
    more: tuple[Linear, ...] = ()
    truth: bool = False

    def __call__(self, call: Call) -> Rule:
        if not self.linear and not self.more:
            return broadcast_rule(call)
        more = [g for g in self.more if max(g.inputs) < len(call.inputs)]
        if self.truth and any(s.dtype != torch.bool for s in call.inputs):
            more = [replace(g, ops=tuple(p for p in g.ops if p[0] != "band")) for g in more]
        return broadcast_rule(call, sound_groups(call, (*present_groups(self.linear, call), *more)))

    @property
    def text_form(self) -> str:
        """Printed form."""
        more = "".join(f" and {dict(g.ops)} in {sorted(g.inputs)}" for g in self.more)
        return "pointwise" + (f"   linear {self.linear}" if self.linear else "") + more


def register_with_lists(names: str, build: Builder, values: str = NUMBERS) -> None:
    """Register ops given as `add mul.Tensor` and the `_foreach_` forms that exist of them."""
    for name in names.split():
        register(f"aten.{name}", build, values=values)
        if "." not in name and hasattr(torch.ops.aten, f"_foreach_{name}"):
            register(f"aten._foreach_{name}", build, values=values)


# ------------------------------------------------------------ the table
register("aten.<pointwise>", pointwise(), values=NUMBERS)
register(
    "aten.__lshift__ aten.__rshift__ aten.floor_divide "
    "aten.hardswish aten.isin.Tensor_Scalar aten._prelu_kernel aten._foreach_pow",
    pointwise(), values=NUMBERS,
)  # fmt: skip

# linear
register_with_lists("mul", pointwise("0|1"))
register_with_lists("div true_divide", pointwise("0"))
register("aten.div.Tensor_mode aten.div.Scalar_mode", pointwise(), values=NUMBERS)
register_with_lists("neg", pointwise("0|neg:0"))
register_with_lists("lerp", pointwise("0+1"))
register_with_lists("addcdiv", pointwise("0+1|max:0"))
register_with_lists("addcmul", pointwise("0+1|0+2|max:0"))
register("aten.conj_physical aten.positive aten._conj aten._conj_physical aten._neg_view", pointwise("0"))
register("aten.deg2rad aten.rad2deg", pointwise("0|max:0"))
register("aten.ldexp aten.ldexp_ aten.polar", pointwise("0"))
register("aten.complex", pointwise("0+1"))

# only move elements
register("aten.clone aten.alias aten.detach aten.lift_fresh aten._conj_copy aten.contiguous", pointwise("any:0"))
register("aten.where.self", pointwise("any:1+2"), values=NUMBERS)
register("aten.where.ScalarSelf aten.where.ScalarOther aten.where.Scalar", pointwise(), values=NUMBERS)
register_with_lists("copy", pointwise("any:0+1"))
register("aten.masked_fill.Tensor", pointwise("any:0+2"))
register_with_lists("zero", pointwise("any:0"))

# monotone
register_with_lists("maximum max.other", pointwise("max:0|max:1", (Linear(frozenset({0, 1}), (("max", "max"),)),)))
register_with_lists("minimum min.other", pointwise("max:0|max:1", (Linear(frozenset({0, 1}), (("min", "min"),)),)))
register_with_lists("clamp clamp_min.Tensor clamp_max.Tensor clip", pointwise("max:0|max:1|max:2"))
register_with_lists("clamp_min.default clamp_max.default", pointwise("max:0"))
register_with_lists(
    "asinh atan ceil erf exp exp2 expm1 floor hardshrink hardsigmoid hardtanh relu relu6 round sigmoid sinh "
    "special_log_ndtr special_ndtr tanh trunc", pointwise("max:0"),
)  # fmt: skip
register_with_lists("acosh log log10 log1p log2 sqrt", pointwise(more=(Linear(frozenset({0}), (("min", "min"),)),)))
register_with_lists("logaddexp logaddexp2", pointwise("max:0|max:1"))
register_with_lists("angle erfc special_erfcx", pointwise("neg:0"))

# of bits: what `any` and `all` leave pending
_EITHER, _BOTH = (("bor", "bor"), ("band", "band")), frozenset({0, 1})
_ONE = (Linear(frozenset({0}), _EITHER), Linear(frozenset({1}), _EITHER))
for _prefix, _truth in (("bitwise", False), ("logical", True)):
    register_with_lists(f"{_prefix}_or", pointwise(more=(*_ONE, Linear(_BOTH, (("bor", "bor"),))), truth=_truth))
    register_with_lists(f"{_prefix}_and", pointwise(more=(*_ONE, Linear(_BOTH, (("band", "band"),))), truth=_truth))
    _turned = (Linear(frozenset({0}), (("bor", "band"), ("band", "bor"))),)
    register_with_lists(f"{_prefix}_not", pointwise(more=_turned, truth=_truth))
register_with_lists("__or__", pointwise(more=(*_ONE, Linear(_BOTH, (("bor", "bor"),)))))
register_with_lists("__and__", pointwise(more=(*_ONE, Linear(_BOTH, (("band", "band"),)))))
register_with_lists("bitwise_xor __xor__", pointwise(more=(Linear(_BOTH, (("bxor", "bxor"),)),)))

# backward: linear in the gradient
register(
    "aten.elu_backward aten.gelu_backward aten.hardshrink_backward aten.hardsigmoid_backward aten.hardswish_backward "
    "aten.hardtanh_backward aten.leaky_relu_backward aten.log_sigmoid_backward aten.logit_backward aten.mish_backward "
    "aten.native_dropout_backward aten._prelu_kernel_backward aten.rrelu_with_noise_backward aten.sigmoid_backward "
    "aten.silu_backward aten.softplus_backward aten.softshrink_backward aten.tanh_backward aten.threshold_backward",
    pointwise("0"), values=NUMBERS,
)  # fmt: skip


def log_sigmoid(call: Call) -> Rule:
    """The second output is a buffer, which the local op leaves empty on accelerators: it is given its shape."""
    op = call.op

    def full_buffer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, buffer = op(x)
        return out, buffer if buffer.shape == out.shape else torch.empty_like(out)

    on_cpu = call.inputs[0].mesh.device_type == "cpu"
    return replace(broadcast_rule(call), bind=None if on_cpu else lambda ins, outs: full_buffer)


register("aten._to_copy prims.convert_element_type", pointwise("any:0"))
register("aten.log_sigmoid_forward", log_sigmoid)


Local = Callable[..., object]

ONCE: Mapping[str, int] = {"sum": 0, "bxor": 0, "product": 1}
"""Reductions in which a number counts once -> what the other positions take."""


@dataclass(frozen=True, slots=True)
class with_number:  # noqa: N801 - used as a function
    """Builder of ops that put the number `name` into the pending `self`.

    Where `name` is a tensor in this call, the groups `tensors` hold (as in `pointwise`).

    Args:
        name: the argument.
        passes: reductions of `self` that pass.
        tensors: linear groups of the forms in which `name` is a tensor.
    """

    name: str
    passes: str
    tensors: str = ""

    def __call__(self, call: Call) -> Rule:
        if call.index(self.name) is not None:
            return pointwise(self.tensors)(call)
        target = call.index("self")
        if is_list_op(call) or target is None:
            return broadcast_rule(call)
        drop = {"avg"} if is_exact(call.inputs[target].dtype) else set()
        ops = tuple((op, op) for op in self.passes.split() if op not in drop)
        rule = broadcast_rule(call, (Linear(frozenset({target}), ops),))
        at = next(i for i, a in enumerate(call.op._schema.arguments) if a.name == self.name)

        def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Local | None:
            out = outs[0] if outs else ins[target]
            other = None if out is None else _taken_elsewhere(out)
            return None if other is None else _with_constant(call.op, at, self.name, other)

        return replace(rule, bind=bind)

    @property
    def text_form(self) -> str:
        """Printed form."""
        return f"pointwise, number {self.name} in {self.passes}" + (f"   linear {self.tensors}" if self.tensors else "")


def _taken_elsewhere(spec: Spec) -> int | None:
    """What this rank takes in place of the number; None where it takes the number itself."""
    coord = spec.mesh.coord
    for p, r in zip(spec.placements, coord or (), strict=False):
        if isinstance(p, Partial) and p.reduce_op in ONCE and r > 0:
            return ONCE[p.reduce_op]
    return None


def _with_constant(op: torch._ops.OpOverload, at: int, name: str, constant: int) -> Local:
    """`op` with `constant`, in the type of the number, as argument number `at`."""

    def run(*args: object, **kwargs: object) -> object:
        if name in kwargs:
            kwargs[name] = type(kwargs[name])(constant)  # type: ignore[call-arg]
        else:
            args = (*args[:at], type(args[at])(constant), *args[at + 1 :])  # type: ignore[call-arg]
        return op(*args, **kwargs)

    return run


_AFFINE = "sum avg max min"
for _name in ("add", "sub"):
    register(f"aten.{_name} aten._foreach_{_name}", with_number("other", _AFFINE, "0+1|max:0"), values=NUMBERS)
register("aten.rsub", with_number("other", "sum avg", "0+1|max:1"), values=NUMBERS)
register("aten.masked_fill.Scalar", with_number("value", "sum avg max min product"), values=NUMBERS)
register("aten.fill.Scalar", with_number("value", "sum avg max min product band bor bxor"), values=NUMBERS)
register("aten.fill.Tensor", pointwise("any:0+1"))
