"""Matrix products: a contracted dim is missing in the output, so sharding it leaves a pending sum.

    mm          m k, k n -> m n          linear in either operand
    addmm       the same, plus an addend that broadcasts to m n: pending where k is sharded, else as the output

`matmul`, `einsum`, `tensordot`, `outer`, `inner` and `bilinear` are composites of these, of views and of
pointwise products. `linear` and `matmul` reach the engine whole in inference mode only; `linear` then has the
rule below, which needs no views, and `matmul` is taken apart there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.rules.patterns import parse_pattern
from dtensor.rules.registry import Call, is_inplace, pattern, present_groups, register
from dtensor.rules.rule import Dims, Linear, Rule
from dtensor.spec import Spec

from .build.dtypes import is_exact
from .build.empty_shards import is_empty_shard
from .pointwise import sound_groups


@dataclass(frozen=True, slots=True)
class plus:  # noqa: N801 - used as a function
    """Builder of `beta * addend + alpha * product`; the first input is the addend and broadcasts to the output.

    `text` is the pattern of the product alone, `linear` counts all inputs. Data alone cannot say it: which of
    the addend's dims broadcast, and how many it has, differs from call to call. `nonempty` names factors of
    which no shard may be empty.
    """

    text: str
    linear: str = ""
    nonempty: tuple[str, ...] = ()

    def __call__(self, call: Call) -> Rule:
        out = call.outputs[0]
        ins, outs, sizes, whole, names = parse_pattern(
            self.text, [s.shape for s in call.inputs[1:]], [None if out is None else out.shape]
        )
        shape = call.inputs[0].shape
        target = outs[0]
        skipped = len(target) - len(shape)
        addend: Dims = tuple(
            target[skipped + d] if n == _size(sizes, target[skipped + d]) else () for d, n in enumerate(shape)
        )
        return Rule(
            (addend, *ins), outs, sizes, whole, frozenset(names[n] for n in self.nonempty), addends=frozenset({0}),
            linear=_sound(call, present_groups(self.linear, call)), bind=whole_scales(call),
        )  # fmt: skip

    @property
    def text_form(self) -> str:
        """Printed form."""
        return f"addend, {self.text}" + (f"   linear {self.linear}" if self.linear else "")


def _size(sizes: tuple[int, ...], factors: tuple[int, ...]) -> int:
    n = 1
    for f in factors:
        n *= sizes[f]
    return n


@dataclass(frozen=True, slots=True)
class product:  # noqa: N801 - used as a function
    """Builder of a product by pattern, linear where the dtypes allow.

    Averages of integers are rounded, and a pending sum of 8-bit integers wraps around where the sum of 32-bit
    results does not.
    """

    text: str
    linear: str = "0|1"
    addends: tuple[int, ...] = ()

    def __call__(self, call: Call) -> Rule:
        rule = pattern(self.text, linear=self.linear, addends=self.addends)(call)
        return replace(rule, linear=_sound(call, rule.linear))

    @property
    def text_form(self) -> str:
        """Printed form."""
        return pattern(self.text, linear=self.linear, addends=self.addends).text_form


def _sound(call: Call, groups: tuple[Linear, ...]) -> tuple[Linear, ...]:
    out = call.outputs[0]
    if out is not None and is_exact(out.dtype) and any(s.dtype != out.dtype for s in call.inputs):
        return ()
    return sound_groups(call, groups)


def linear(call: Call) -> Rule:
    """`... k, n k, n -> ... n`; a weight of one dim gives `... k, k -> ...`."""
    if call["weight"].ndim == 1:
        return product("... k, k -> ...")(call)
    return product("... k, n k, n -> ... n", "0+2|1+2", (2,))(call)


def whole_scales(call: Call) -> Callable[..., Callable[..., object] | None] | None:
    """How a product scaled by `beta` and `alpha` runs on tensors of whole numbers.

    torch gathers numbers of the two, but where nothing is contracted it refuses fractions, and a shard may be
    empty although the tensor is not.
    """
    if "alpha" not in call.arguments or not is_exact(call.inputs[0].dtype):
        return None

    def run(*args: object, beta: float = 1, alpha: float = 1, **named: object) -> object:
        return call.op(*args, beta=int(beta), alpha=int(alpha), **named)

    return lambda ins, outs: run if any(map(is_empty_shard, ins[1:])) else None


def addmv(call: Call) -> Rule:
    """As `addmm`; but without rows or columns torch gives an addend of one element back as it is."""
    rule = plus("m k, k -> m", linear="0+1|0+2")(call)
    inplace = is_inplace(call.op)

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        out = outs[0]
        if out is None or not is_empty_shard(ins[1]):
            return None

        def run(x: torch.Tensor, *_: object, beta: float = 1, **__: object) -> torch.Tensor:
            beta = int(beta) if is_exact(x.dtype) else beta
            scaled = x * beta if beta else torch.zeros_like(x)
            return x.copy_(scaled) if inplace else scaled.expand(out.local_shape).to(out.dtype, copy=True)

        return run

    return replace(rule, bind=bind)


register("aten._addmm_activation", plus("m [k], [k] n -> m n"), values="alpha beta")
register("aten._int_mm", product("m k, k n -> m n"))
register("aten.addbmm", plus("b m k, b k n -> m n", linear="0+1|0+2"), values="alpha beta")
register("aten.addmm", plus("m k, k n -> m n", linear="0+1|0+2"), values="alpha beta")
register("aten.addmv", addmv, values="alpha beta")
register("aten.addr", plus("m, n -> m n", linear="0+1|0+2"), values="alpha beta")
register("aten.baddbmm", plus("b m k, b k n -> b m n", linear="0+1|0+2"), values="alpha beta")
register("aten.bmm", product("b m k, b k n -> b m n"))
register("aten.dot aten.vdot", product("k, k ->"))
register("aten.linear", linear)
register("aten.mm", product("m k, k n -> m n"))
register("aten.mv", product("m k, k -> m"))


def _scaled_mm(call: Call) -> Rule | None:
    """Products of 8-bit floats with scales: one each, or one a row and one a column.

    Only layouts that need no sum are offered: partial results would have to be kept in the low output precision.
    """
    one_each = call["scale_a"].numel == 1 and call["scale_b"].numel == 1
    m, n = call["self"].shape[0], call["mat2"].shape[1]
    per_row = tuple(call["scale_a"].shape) == (m, 1) and tuple(call["scale_b"].shape) == (1, n)
    if not (one_each or per_row) or call["scale_result"] is not None:
        return None
    dims: dict[str, Dims] = {
        "self": ((0,), (2,)),
        "mat2": ((2,), (1,)),
        "scale_a": ((0,), ()) if per_row else ((),) * call["scale_a"].ndim,
        "scale_b": ((), (1,)) if per_row else ((),) * call["scale_b"].ndim,
        "bias": ((1,),),
    }
    k = call["self"].shape[1]
    inputs = tuple(dims[name] for name in call.names)
    return Rule(inputs, (((0,), (1,)),), (m, n, k), frozenset({2}), nonempty=frozenset({0, 1}))


register("aten._scaled_mm", _scaled_mm)
