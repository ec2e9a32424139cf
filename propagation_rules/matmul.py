"""Matrix products: a contracted dim is missing in the output, so sharding it leaves a pending sum.

    mm          m k, k n -> m n          linear in either operand
    addmm       the same, plus an addend that broadcasts to m n: pending where k is sharded, else cut like the output

`matmul`, `einsum`, `tensordot`, `outer`, `inner` and `bilinear` are composites of these, of views and of
pointwise products. `linear` and `matmul` reach the engine whole in inference mode only; `linear` then has the
rule below, which needs no views, and `matmul` is taken apart there.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.factors import Dims, Rule, parse_pattern
from dtensor.registry import Call, pattern, present_groups, register


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
            linear=present_groups(self.linear, call),
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
class exact:  # noqa: N801 - used as a function
    """Builder of a product whose result has another dtype than its inputs: linear only where sums are not rounded.

    A pending sum of 8-bit integers wraps around where the sum of the 32-bit results does not.
    """

    product: pattern

    def __call__(self, call: Call) -> Rule:
        rule = self.product(call)
        wraps = any(not (s.dtype.is_floating_point or s.dtype.is_complex) for s in call.inputs)
        out = call.outputs[0]
        if wraps and out is not None and out.dtype != call.inputs[0].dtype:
            return Rule(rule.inputs, rule.outputs, rule.sizes, rule.whole)
        return rule

    @property
    def text_form(self) -> str:
        """Printed form."""
        return f"{self.product.text_form}, if not integers of other widths"


def linear(call: Call) -> Rule:
    """`... k, n k, n -> ... n`; a weight of one dim gives `... k, k -> ...`."""
    if call["weight"].ndim == 1:
        return pattern("... k, k, -> ...", addends=(2,), linear="0+2|1+2")(call)
    return pattern("... k, n k, n -> ... n", addends=(2,), linear="0+2|1+2")(call)


register("aten._addmm_activation", plus("m [k], [k] n -> m n"), values="alpha beta")
register("aten._int_mm", exact(pattern("m k, k n -> m n", linear="0|1")))
register("aten.addbmm", plus("b m k, b k n -> m n", linear="0+1|0+2"), values="alpha beta")
register("aten.addmm", plus("m k, k n -> m n", linear="0+1|0+2"), values="alpha beta")
# Without rows torch gives an addend of one element back as it is.
register("aten.addmv", plus("m k, k -> m", linear="0+1|0+2", nonempty=("m",)), values="alpha beta")
register("aten.addr", plus("m, n -> m n", linear="0+1|0+2"), values="alpha beta")
register("aten.baddbmm", plus("b m k, b k n -> b m n", linear="0+1|0+2"), values="alpha beta")
register("aten.bmm", exact(pattern("b m k, b k n -> b m n", linear="0|1")))
register("aten.dot aten.vdot", pattern("k, k ->", linear="0|1"))
register("aten.linear", linear)
register("aten.mm", exact(pattern("m k, k n -> m n", linear="0|1")))
register("aten.mv", pattern("m k, k -> m", linear="0|1"))


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

