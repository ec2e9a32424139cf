"""Linear algebra: the dims of a matrix stay replicated, batch dims are free, so are the columns of a right-hand side.

    cholesky    ... [n] [n] -> ... [n] [n], ...                   and how it went, a number a matrix
    svd         ... [m] [n] -> ... [m] [k], ... [k], ... [k] [n]
    solve       ... [n] [n], ... [n] c -> ... [n] c, ...          linear in the right-hand side

A factor that only some outputs have is sharded by a kernel: the others come out alike everywhere, which is not a sum.

    solve, columns c over 2 ranks       x = S(1)     the LU factors: the same on both ranks

Decompositions that may fail do so on the rank that holds the bad matrix; a flag, reduced after each, makes all
ranks fail together. Where an op only reports (`info`), it is `_linalg_check_errors` that fails: it reads all reports.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.rules.kernel import KernelContext, traced
from dtensor.rules.patterns import parse_pattern
from dtensor.rules.registry import Builder, Call, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule, linear
from dtensor.spec import Spec

from .build.dtypes import accumulation_dtype
from .build.gathered import output_spec
from .pointwise import broadcast_rule, sound_groups

__all__ = ["matrices", "plain_run"]


def plain_run(ctx: KernelContext) -> object:
    """The op itself on this rank's tensors."""
    params = ctx.call.op._schema.arguments
    args = [ctx.arguments[a.name] for a in params if not a.kwarg_only]
    return ctx.call.op(*args, **{a.name: ctx.arguments[a.name] for a in params if a.kwarg_only})


def _together(ctx: KernelContext) -> object:
    """The op itself; where it fails on one rank, it fails on all of the kernel's axes."""
    if traced(ctx.inputs[0]):
        return plain_run(ctx)
    error: Exception | None = None
    try:
        got = plain_run(ctx)
    except RuntimeError as e:
        error = e
    flag = torch.tensor([int(error is not None)], dtype=torch.int32, device=ctx.inputs[0].device)
    if bool(ctx.all_reduce(flag, "max").item()):
        raise torch.linalg.LinAlgError(f"{ctx.call.op}: the algorithm failed for a matrix of the batch") from error
    return got


@dataclass(frozen=True, slots=True)
class matrices:  # noqa: N801 - used as a function
    """Builder from a pattern over the tensors given; an output without elements that should have has no factors.

    Args:
        text: the pattern.
        linear: the input that the first output is linear in, the other outputs not depending on it.
        fails: the op raises where a matrix will not do; `check_errors=True` makes any op do so.
    """

    text: str
    linear: int | None = None
    fails: bool = False

    def __call__(self, call: Call) -> Rule:
        left, _, right = self.text.partition("->")
        metas = call.outputs
        skipped = [m is not None and tuple(m.shape) == (0,) and t.split() != ["n"] for t, m in zip(
            right.split(","), metas, strict=True)]  # fmt: skip
        wanted = ["1" if skip else t for t, skip in zip(right.split(","), skipped, strict=True)]
        ins, outs, sizes, whole, _ = parse_pattern(
            f"{left}->{','.join(wanted)}",
            [s.shape for s in call.inputs],
            [None if m is None else m.shape for m in metas],
        )
        groups: tuple[Linear, ...] = ()
        if self.linear is not None:
            others = frozenset(range(1, len(metas)))
            groups = sound_groups(call, (replace(linear(self.linear), whole_outputs=others),))
        fails = self.fails or bool(call.get("check_errors"))
        return _with_kernels(Rule(ins, outs, sizes, whole, linear=groups), fails)

    @property
    def text_form(self) -> str:
        """Printed form."""
        return self.text + ("" if self.linear is None else f"   linear {self.linear}")


def _with_kernels(rule: Rule, fails: bool) -> Rule:
    """Kernels for the factors that not all outputs have, or for all where the op may fail."""
    used = {f for dims in (*rule.inputs, *rule.outputs) for d in dims for f in d} - rule.whole
    kernels: dict[tuple[str, ...], set[int]] = {}
    for f in used:
        hows = tuple("shard" if any(f in d for d in dims) else "replicate" for dims in rule.outputs)
        if fails or "replicate" in hows:
            kernels.setdefault(hows, set()).add(f)
    run, sent = (_together, 1) if fails else (plain_run, 0)
    made = tuple(Kernel("matrices", frozenset(fs), hows, run, sent, sent) for hows, fs in sorted(kernels.items()))
    return replace(rule, whole=rule.whole.union(*kernels.values()), kernels=made)


# ------------------------------------------------------------ by hand
def _is_vector(a: Sequence[int], b: Sequence[int]) -> bool:
    """How torch tells right-hand sides that are vectors from matrices."""
    return len(b) == 1 or (len(a) - 1 == len(b) and tuple(a[:-1]) == tuple(b))


def solve(call: Call) -> Rule:
    """The right-hand side may be a matrix on either side, or a vector."""
    side = "... [n] c" if call["left"] else "... c [n]"
    if _is_vector(call.inputs[0].shape, call.inputs[1].shape):
        side = "... [n]"
    return matrices(f"... [n] [n], {side} -> {side}, ... [n] [n], ... [n], ...", linear=1)(call)


def in_memory_order(builder: Builder) -> Builder:
    """For ops that give the LU factors of the matrix, or, where it is contiguous and real, of the transposed one.

    Their derivatives look at the global tensor to tell which, so the local one must be contiguous where that one is.
    """

    def build(call: Call) -> Rule | None:
        rule, op = builder(call), call.op
        a = call.inputs[0]
        if rule is None or a.dtype.is_complex:
            return rule
        contiguous = torch.empty_strided(a.shape, a.stride, device="meta").is_contiguous()

        def ordered(x: torch.Tensor) -> torch.Tensor:
            return x.contiguous() if contiguous else x.mT.contiguous().mT

        def kept(kernel: Kernel) -> Kernel:
            name = op._schema.arguments[0].name
            run = lambda c: kernel.run(replace(c, arguments={**c.arguments, name: ordered(c.inputs[0])}))  # noqa: E731
            return replace(kernel, run=run)

        def bind(_: Sequence[Spec], __: Sequence[Spec | None]) -> Callable[..., object]:
            return lambda x, *args, **kwargs: op(ordered(x), *args, **kwargs)

        return replace(rule, bind=bind, kernels=tuple(map(kept, rule.kernels)))

    if isinstance(builder, matrices):
        build.text_form = builder.text_form  # type: ignore[attr-defined]
    else:
        functools.update_wrapper(build, builder)
    return build


def _sided(left: str, right: str, linear: int) -> Builder:
    """The pattern depends on the side that a matrix stands on."""

    def build(call: Call) -> Rule:
        return matrices(left if call["left"] else right, linear)(call)

    build.text_form = f"{left}   or   {right}   linear {linear}"  # type: ignore[attr-defined]
    return build


def svd(call: Call) -> Rule:
    """Full matrices have more rows and columns than there are singular values."""
    u, v = ("[m]", "[n]") if call["full_matrices"] else ("[k]", "[k]")
    return matrices(f"... [m] [n] -> ... [m] {u}, ... [k], ... {v} [n]", fails=True)(call)


def cross(call: Call) -> Rule:
    """Dims broadcast; the one that the product works along is replicated."""
    rule = broadcast_rule(call, sound_groups(call, (linear(0), linear(1))))
    out = call.outputs[0]
    assert out is not None
    return replace(rule, whole=frozenset({int(call["dim"]) % len(out.shape)}))


def renorm(call: Call) -> Rule:
    """Each slice of `dim` is scaled by its norm; where other dims are sharded, the norms are reduced."""
    x = call.inputs[0]
    d = call.dim()
    dims: Dims = tuple((i,) for i in range(x.ndim))
    others = frozenset(range(x.ndim)) - {d}
    kernel = Kernel("renorm", others, ("shard",), _run_renorm, x.shape[d], 1)
    return Rule((dims,), (dims,), tuple(x.shape), others, kernels=(kernel,))


def _run_renorm(ctx: KernelContext) -> torch.Tensor:
    x, p, most = ctx.inputs[0], float(str(ctx.arguments["p"])), float(str(ctx.arguments["maxnorm"]))
    others = [d for d in range(x.ndim) if d != ctx.call.dim()]
    shape = [n if d == ctx.call.dim() else 1 for d, n in enumerate(x.shape)]
    size = x.abs()
    size = size.to(accumulation_dtype(size.dtype))
    if math.isinf(p):
        norm = size.amax(others, True) if size.numel() else size.new_zeros(shape)
        norm = ctx.all_reduce(norm, "max")
    else:
        norm = ctx.all_reduce(size.pow(p).sum(others, keepdim=True), "sum").pow(1 / p)
    return (x * torch.where(norm > most, most / (norm + 1e-7), 1.0)).to(x.dtype)


def trace(call: Call) -> Rule:
    """Of a shard those elements are added up that lie on the diagonal of the whole."""
    rule = matrices("[m] [n] ->", linear=0)(call)
    return replace(rule, kernels=(Kernel("trace", frozenset({0, 1}), ("sum",), _run_trace),))


def _run_trace(ctx: KernelContext) -> torch.Tensor:
    x, out = ctx.inputs[0], output_spec(ctx)
    rows, columns = (ctx.indices(0, d, x.device) for d in (0, 1))
    return torch.where(rows[:, None] == columns, x, torch.zeros_like(x)).sum(dtype=out.dtype)


def check_errors(call: Call) -> Rule:
    """Error codes are gathered, so that all ranks raise or none does."""
    return Rule(tuple(((),) * s.ndim for s in call.inputs), (), ())


_SQUARE = "... [n] [n]"
register("aten._linalg_check_errors", check_errors)
register("aten._linalg_det", in_memory_order(matrices(f"{_SQUARE} -> ..., {_SQUARE}, ... [n]")))
register("aten._linalg_eigh", matrices(f"{_SQUARE} -> ... [n], {_SQUARE}", fails=True))
register("aten._linalg_eigvals", matrices(f"{_SQUARE} -> ... [n]", fails=True))
register("aten._linalg_slogdet", in_memory_order(matrices(f"{_SQUARE} -> ..., ..., {_SQUARE}, ... [n]")))
register("aten._linalg_solve_ex", in_memory_order(solve))
register("aten._linalg_svd", svd)
register("aten.cholesky", matrices(f"{_SQUARE} -> {_SQUARE}", fails=True))
register("aten.cholesky_inverse aten.linalg_matrix_exp", matrices(f"{_SQUARE} -> {_SQUARE}"))
register("aten.cholesky_solve aten._cholesky_solve_helper", matrices("... [n] c, ... [n] [n] -> ... [n] c", linear=0))
register("aten.linalg_cholesky_ex aten.linalg_inv_ex", matrices(f"{_SQUARE} -> {_SQUARE}, ..."))
register("aten.linalg_cross", cross)
register("aten.linalg_eig", matrices(f"{_SQUARE} -> ... [n], {_SQUARE}", fails=True))
register("aten.linalg_householder_product", matrices("... [m] [n], ... [k] -> ... [m] [n]"))
register("aten.linalg_ldl_factor_ex", matrices(f"{_SQUARE} -> {_SQUARE}, ... [n], ..."))
register("aten.linalg_ldl_solve", matrices("... [n] [n], ... [n], ... [n] c -> ... [n] c", linear=2))
register("aten.linalg_lu", matrices("... [m] [n] -> ... [m] [m], ... [m] [k], ... [k] [n]"))
register("aten.linalg_lu_factor_ex", matrices("... [m] [n] -> ... [m] [n], ... [k], ..."))
register(
    "aten.linalg_lu_solve",
    _sided("... [n] [n], ... [n], ... [n] c -> ... [n] c", "... [n] [n], ... [n], ... c [n] -> ... c [n]", 2),
)
register("aten.linalg_qr", matrices("... [m] [n] -> ... [m] [k], ... [l] [n]"))
register(
    "aten.linalg_solve_triangular",
    _sided("... [n] [n], ... [n] c -> ... [n] c", "... [n] [n], ... c [n] -> ... c [n]", 1),
)
register("aten.lu_unpack", matrices("... [m] [n], ... [k] -> ... [m] [m], ... [m] [k], ... [k] [n]"))
register(
    "aten.ormqr",
    _sided("... [n] [k], ... [l], ... [n] c -> ... [n] c", "... [n] [k], ... [l], ... c [n] -> ... c [n]", 2),
)
register("aten.renorm", renorm, values="maxnorm p")
register("aten.trace", trace)
register("aten.triangular_solve", matrices("... [n] c, ... [n] [n] -> ... [n] c, ... [n] [n]", linear=0))


def pinv(call: Call) -> Rule:
    """The tolerances, tensors here, have the batch's shape, or broadcast to it."""
    tolerances = ", ...".join([""] * len(call.inputs))
    return matrices(f"... [m] [n]{tolerances} -> ... [n] [m]", fails=True)(call)


register("aten.linalg_pinv.atol_rtol_tensor", pinv)
