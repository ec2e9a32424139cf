"""Why a rule does not offer a row that would be right: `docs/missing.md` is written from this.

A reason stands for rows of overloads, each given as a regular expression that must match the whole name or row. The
first that matches counts; a row without a reason is listed as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .sweep import OpReport

__all__ = ["REASONS", "Reason", "reason_of", "written_missing"]


@dataclass(frozen=True)
class Reason:
    """`title` of the group, the `text` that explains it, what it covers."""

    title: str
    text: str
    overloads: str = ".*"
    rows: str = ".*"


_EXTREME = r".*P\((max|min|max\|min)\).*"
_BACKWARD = r".*_backward(_data)?\..*"

REASONS: tuple[Reason, ...] = (
    Reason(
        "Inputs that are not read",
        "The op looks at the shape of this input only, or not at all in this mode. A pending one is reduced all "
        "the same; it is hardly ever pending, and a group for it would be tried in every search.",
        rows=r"(R, )*P\([a-z|]+\)(, R)* -> R(, R)*",
    ),
    Reason(
        "Gradients pending in maxima or minima",
        "Gradients are pending in sums. Nothing makes one that is pending in a maximum or a minimum.",
        _BACKWARD,
        _EXTREME,
    ),
    Reason(
        "Saved tensors pending in a backward",
        "A backward is linear in the gradient, which does arrive pending, and often in a saved tensor too, which "
        "does not: the forward has reduced it.",
        _BACKWARD,
    ),
    Reason(
        "Failures that all ranks must share",
        "The batch could be sharded without communication, were it not for matrices that fail: one number is reduced, "
        "so that all ranks raise or none does.",
        r"aten\.(_linalg|linalg)_.*",
        r"S\(.*",
    ),
    Reason(
        "Numbers that are no part of a plan",
        "Right for the value that the number has in these calls (a default, a positive one), wrong for others; a "
        "plan serves all values of it, so that a changing number causes no miss.",
        r"aten\.(add|sub|rsub|mul|div|pow|celu|elu|leaky_relu|softplus|softshrink|hardshrink|threshold|lerp|hardtanh"
        r"|native_dropout|mvlgamma|round)\..*",
    ),
    Reason(
        "Maxima and minima in sums and products",
        "An addend may be pending in a maximum or minimum where the rest is replicated. What `amax` and `amin` "
        "leave pending goes through pointwise ops, not into matrix products, norms and sums over indices.",
        r"aten\.(_?addmm\w*|addbmm|baddbmm|addmv|addr|_?convolution|index_add|scatter|scatter_add|scatter_reduce|index_reduce|put"
        r"|index_put|native_layer_norm|native_group_norm|native_batch_norm|trace|masked_scatter\w*|max_unpool\dd"
        r"|_?adaptive_\w+|\w*pool\w*|bucketize|searchsorted|linear)\..*",
        _EXTREME,
    ),
    Reason(
        "Weight and bias of a norm",
        "Outputs are linear in both together where the input is replicated. Parameters are never pending sums.",
        r"aten\.(native_\w+_norm|_fused_rms_norm)\..*",
    ),
    Reason(
        "Weight of a loss",
        "Linear in the weights of classes or elements, which are given and never pending.",
        r"aten\.(binary_cross_entropy\w*|multi_margin_loss)\..*",
        r"R, R, P.*",
    ),
    Reason(
        "Bounds that are pending",
        "`clamp` is monotone in its bounds too; pending bounds do not occur.",
        r"aten\.clamp.*",
    ),
    Reason(
        "Averages of factors",
        "A function that is affine in one input passes its average, though not its sum. Averages are pending in "
        "gradients and means, and those go through ops that are listed.",
        rows=r"[^>]*P\(avg\)[^>]*-> (R, )*P\(avg\).*",
    ),
    Reason(
        "Integers",
        "Right for these dtypes; the same line serves others, in which the op overflows or rounds.",
        r"aten\.(bitwise_\w+|erfc|special_erfcx|nan_to_num|neg|angle|sign|sgn|_to_copy|ceil|floor|trunc|round)\..*",
    ),
    Reason(
        "Zero times infinity",
        "Linear in the first argument but where the other is 0 or infinite, which gives 0 or NaN.",
        r"aten\.(xlogy|special_xlog1py|ldexp|rsqrt)\..*",
    ),
    Reason(
        "Masks and indices sharded like what they index",
        "Right for a mask that is sharded as its target is; an integer index in its place is not.",
        r"aten\.(index_put|index|masked_\w+)\..*",
    ),
    Reason(
        "Functions that are monotone in part",
        "Monotone in this argument, or where they are defined: special functions and comparisons of two numbers, "
        "through which pending maxima hardly ever go.",
        r"aten\.(special_\w+|i0|igammac?|hypot|polygamma|lgamma|digamma|nextafter|copysign|heaviside|fmax|fmin|fmod"
        r"|atan2|remainder|_prelu_kernel|glu|pow|floor_divide|angle|logit|erfinv|acos|acosh|asin|atanh|cosh|cos|sin|frac|mvlgamma)\..*",
        _EXTREME,
    ),
    Reason(
        "Right within rounding only",
        "The result differs from the argument by less than the tolerance of the comparison.",
        r"aten\.nextafter\..*",
    ),
    Reason(
        "Boundaries that are sharded",
        "Places in shards of the boundaries add up where all of them are sorted, which torch does not ask for.",
        r"aten\.(bucketize|searchsorted)\..*",
    ),
    Reason(
        "Sizes, indices and divisors of a sample",
        "Right for those of these calls only: a pool whose windows are of one element, an index that names no row "
        "twice, a divisor of 1, a grid that points at pixels.",
        r"aten\.(floor_divide|grid_sampler_\dd|_?adaptive_\w+|\w*pool\w*|_?upsample_\w+|embedding\w*|scatter_reduce|index_reduce|max_unpool\dd|_c?pdist\w*|\w+_pad\dd)\..*",
    ),
)


def reason_of(overload: str, row: str) -> Reason | None:
    """The reason for a missing row, None where there is none yet."""
    for reason in REASONS:
        if re.fullmatch(reason.overloads, overload) and re.fullmatch(reason.rows, row):
            return reason
    return None


def written_missing(reports: Iterable[OpReport]) -> str:
    """The document: rows by reason and overload, with the share of the calls that each would be right for."""
    groups: dict[Reason | None, dict[str, list[str]]] = {}
    for report in sorted(reports, key=lambda r: r.name):
        for row, (n, _) in report.missing.items():
            rows = groups.setdefault(reason_of(report.name, row), {}).setdefault(report.name, [])
            rows.append(f"`{row}` ({n} of {report.calls})")
    count = sum(len(rows) for group in groups.values() for rows in group.values())
    lines = [_HEAD.format(count=count)]
    known: Sequence[Reason | None] = [r for r in REASONS if r in groups]
    for reason in [*known, *([None] if None in groups else [])]:
        title, text = (reason.title, reason.text) if reason else ("No reason yet", "Rows that a rule should offer.")
        lines += [f"## {title}", text, ""]
        lines += [f"- `{name}`: {', '.join(rows)}" for name, rows in groups[reason].items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """# Rows that the rules do not offer

Written by `make sweep`. A row is a layout of all inputs and outputs on one mesh axis that would have been right
without communication for some sample calls (how many of how many is said in brackets), and for which the engine
communicates or gathers instead: the result is right all the same, it costs more. How a row is found, and what it has
to stand: `propagation_rules/proof/missing.py`. There are {count}, grouped by the reason they are left out for.
"""
