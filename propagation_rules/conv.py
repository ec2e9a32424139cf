"""Convolutions: batch, groups and channels are free; spatial dims are sharded with a halo of neighbours' rows.

    convolution     n (g c) [h] [w], (g o) c 1 1, (g o) -> n (g o) [h'] [w']     bias: an addend where c is sharded
    transposed      n (g c) [h] [w], (g c) o 1 1, (g o) -> n (g o) [h'] [w']
    its backward    gradients that lack n are pending sums

`g` is there with groups only; sharding it leaves each rank with fewer of them. `h` and `h'` differ in size but are
sharded alike, by a kernel: it brings in the rows that this rank's outputs look at (`halo`), writes the padding out
and runs the op on what is then an ordinary small image; backward runs the op's backward on the same image and
gives the foreign rows' gradients back. Where a window is one row and steps by one, spatial dims are free.
The gradient of the bias lacks the input's channels without being a sum over them: where those are sharded, all ranks
but the first give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.placement import Partial
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, present_groups, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear
from dtensor.spec import Spec

from .build.halo import Halo
from .pointwise import sound_groups

N, G, C, O, SPACE = range(5)  # noqa: E741
NAMES = ("input", "weight", "bias")


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial dim: window, stride, padding, dilation and extra rows at the end of a transposed output."""

    window: int
    stride: int
    padding: int
    dilation: int
    extra: int
    transposed: bool

    @property
    def reach(self) -> int:
        """Rows from the first to the last that a window touches, less one."""
        return self.dilation * (self.window - 1)

    def reads(self, a: int, b: int) -> tuple[int, int]:
        """Input rows, perhaps outside of the input, that outputs [a, b) depend on."""
        s, p = self.stride, self.padding
        if self.transposed:
            return -((self.reach - a - p) // s), (b - 1 + p) // s + 1
        return a * s - p, (b - 1) * s - p + self.reach + 1

    @property
    def pointwise(self) -> bool:
        """Output row i depends on input row i alone."""
        return self.window == 1 and self.stride == 1 and self.padding == 0 and self.extra == 0


def _each(value: Any, n: int) -> list[int]:
    """One number a spatial dim, from a list of one or of `n`."""
    return [int(v) for v in value] * (n if len(value) == 1 else 1)


def _axes(call: Call) -> list[_Axis]:
    n = call["input"].ndim - 2
    stride, padding, dilation, extra = (
        _each(call[name], n) for name in ("stride", "padding", "dilation", "output_padding")
    )
    windows, transposed = call["weight"].shape[2:], bool(call["transposed"])
    return [_Axis(windows[i], stride[i], padding[i], dilation[i], extra[i], transposed) for i in range(n)]


def _rule(call: Call, outputs: Sequence[str], y: Sequence[int], kernel: Callable[..., Kernel], **more: Any) -> Rule:
    """The rule of forward or backward; `y` is the shape of the output, `outputs` names what is returned."""
    x, axes, groups = call["input"], _axes(call), int(call["groups"])
    space: Dims = tuple((SPACE + i,) for i in range(len(axes)))
    many: tuple[int, ...] = (G,) if groups != 1 else ()
    window: Dims = ((),) * len(axes)
    weight: Dims = ((*many, C), (O,)) if call["transposed"] else ((*many, O), (C,))
    dims: dict[str, Dims] = {
        "input": ((N,), (*many, C), *space), "weight": (*weight, *window), "bias": ((*many, O),),
        "output": ((N,), (*many, O), *space), "grad_output": ((N,), (*many, O), *space),
    }  # fmt: skip
    sizes = (x.shape[0], groups, x.shape[1] // groups, y[1] // groups, *x.shape[2:])
    cut = frozenset(SPACE + i for i, a in enumerate(axes) if not a.pointwise)
    halo = max((x.numel // max(x.shape[2 + i], 1) * a.reach for i, a in enumerate(axes)), default=0)
    return Rule(
        tuple(dims[n] for n in call.names),
        tuple(() if m is None else dims[n] for n, m in zip(outputs, call.outputs, strict=True)),
        sizes, cut, frozenset({G, C, O} | (set(range(SPACE, len(sizes))) - cut)),
        kernels=(kernel(cut, halo),) if cut else (), **more,
    )  # fmt: skip


def _fits(call: Call) -> bool:
    """True for the usual call: a batch dim, and as many spatial dims as the window has."""
    return bool(call["input"].ndim == call["weight"].ndim and call["input"].ndim > 2)


def convolution(call: Call) -> Rule | None:
    """Linear in the input, and in weight and bias together with the addend."""
    if not _fits(call) or call.outputs[0] is None:
        return None
    bias, groups = call.index("bias"), int(call["groups"])
    return _rule(
        call, ("output",), call.outputs[0].shape,
        lambda cut, halo: Kernel("halo", cut, ("shard",), _run, halo, 1, "all_to_all"),
        addends=frozenset() if bias is None else frozenset({bias}),
        linear=sound_groups(call, present_groups("0+2|1+2", call)),
        localize=lambda ins, outs: {"groups": _local_groups(call, ins, outs[0], groups)},
    )  # fmt: skip


def _local_groups(call: Call, ins: Sequence[Spec], y: Spec | None, groups: int) -> int:
    """Groups of this rank, from the channels of one group, which are the weight's second dim."""
    of = y if call["transposed"] else ins[call.names.index("input")]
    each = ins[call.names.index("weight")].local_shape[1]
    return groups if groups == 1 or of is None else of.local_shape[1] // max(each, 1)


def convolution_backward(call: Call) -> Rule | None:
    """Linear in the gradient."""
    if not _fits(call):
        return None
    asked, groups = call["output_mask"], int(call["groups"])

    def localize(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
        bias = {} if outs[2] is None else {"bias_sizes": list(outs[2].local_shape)}
        return bias | {"groups": _local_groups(call, ins, ins[0], groups)}

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        if not _silent(ins, outs):
            return None

        def run(*args: Any, **kwargs: Any) -> object:
            x, w, b = call.op(*args, **kwargs)
            return x, w, torch.zeros_like(b)

        return run

    how = tuple(kind if given else "replicate" for kind, given in zip(("shard", "sum", "sum"), asked, strict=True))
    return _rule(
        call, NAMES, call["grad_output"].shape,
        lambda cut, halo: Kernel("halo backward", cut, how, _run_backward, halo, 2, "all_to_all"),
        linear=(linear(0),), localize=localize, bind=bind,
    )  # fmt: skip


def _silent(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> bool:
    """True where this rank's gradient of the bias repeats another's: only the input's channels are sharded."""
    grad, bias = ins[0], outs[2]
    if bias is None or grad.mesh.coord is None:
        return False
    return any(
        isinstance(b, Partial) and r and grad.placements[a].is_replicate()
        for a, (b, r) in enumerate(zip(bias.placements, grad.mesh.coord, strict=True))
    )


# ------------------------------------------------------------ spatial dims
def _halos(ctx: KernelContext, x: int, y: Spec) -> dict[int, Halo]:
    """Spatial dim (counted from 0) -> its halo, for the dims that the kernel's axes shard. `x` is the input's place."""
    out = {}
    for i, axis in enumerate(_axes(ctx.call)):
        along = [a for a, f in zip(ctx.axes, ctx.factors, strict=True) if f == SPACE + i]
        if along:
            out[i] = Halo.of(ctx, along, ctx.in_specs[x], y, 2 + i, axis.reads)
    return out


def _image(ctx: KernelContext, x: torch.Tensor, halos: Mapping[int, Halo]) -> torch.Tensor:
    for halo in halos.values():
        x = halo.bring(x)
    return x


@dataclass(slots=True)
class _Frame:
    """How the rows at hand of one sharded dim lie in what the op sees: zeros before and after, then what is cropped."""

    before: int
    after: int


def _frames(ctx: KernelContext, halos: Mapping[int, Halo]) -> dict[int, _Frame]:
    """Per sharded dim what to add to (negative: take off) the op's rows.

    Not transposed: padding around the input. Transposed: around the output of the op without padding, so that
    it becomes this rank's rows.
    """
    axes, out = _axes(ctx.call), {}
    for i, halo in halos.items():
        axis, (a, b), (lo, hi) = axes[i], halo.outputs, halo.rows
        if axis.transposed:  # the op gives rows [lo s, (hi - 1) s + reach + 1) of those counted from -padding
            first, last = a + axis.padding, b + axis.padding
            out[i] = _Frame(lo * axis.stride - first, last - ((hi - 1) * axis.stride + axis.reach + 1))
        else:
            first, last = axis.reads(a, b)
            out[i] = _Frame(lo - first, last - hi)
    return out


def _pad(x: torch.Tensor, frames: Mapping[int, _Frame], sign: int = 1) -> torch.Tensor:
    """Zeros around the sharded dims, rows off where negative; with sign -1 the reverse."""
    width = [0] * (2 * (x.ndim - 2))
    for i, f in frames.items():
        at = 2 * (x.ndim - 3 - i)
        width[at], width[at + 1] = sign * f.before, sign * f.after
    return torch.nn.functional.pad(x, width) if any(width) else x


def _settings(ctx: KernelContext, halos: Mapping[int, Halo]) -> tuple[Any, ...]:
    """Stride, padding, dilation, transposed, output padding and groups; nothing is padded where a dim is sharded."""
    n, call = ctx.call["input"].ndim - 2, ctx.call
    off = lambda name: [0 if i in halos else v for i, v in enumerate(_each(call[name], n))]  # noqa: E731
    return (
        _each(call["stride"], n), off("padding"), _each(call["dilation"], n), call["transposed"],
        off("output_padding"), ctx.arguments["groups"],
    )  # fmt: skip


def _run(ctx: KernelContext) -> torch.Tensor:
    x, weight, bias = ctx.tensor("input"), ctx.tensor("weight"), ctx.optional("bias")
    y = ctx.out_specs[0]
    assert y is not None
    halos = _halos(ctx, 0, y)
    image, settings, frames = _image(ctx, x, halos), _settings(ctx, halos), _frames(ctx, halos)
    if image.numel() == 0 or 0 in y.local_shape:
        out = x.new_zeros(y.local_shape)
    elif ctx.call["transposed"]:
        out = _pad(torch.ops.aten.convolution(image, weight, None, *settings), frames)
    else:
        return torch.ops.aten.convolution(_pad(image, frames), weight, bias, *settings)
    return out if bias is None else out + bias.reshape(-1, *(1,) * (out.ndim - 2))


def _run_backward(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    grad, x, weight = ctx.tensor("grad_output"), ctx.tensor("input"), ctx.tensor("weight")
    asked = ctx.call["output_mask"]
    halos = _halos(ctx, 1, ctx.in_specs[0])
    image, settings, frames = _image(ctx, x, halos), _settings(ctx, halos), _frames(ctx, halos)
    dbias = grad.sum((0, *range(2, grad.ndim))) if asked[2] else None
    if dbias is not None and _silent(ctx.in_specs, ctx.out_specs):
        dbias = torch.zeros_like(dbias)
    if image.numel() == 0 or grad.numel() == 0:
        dx, dw = (image.new_zeros(image.shape) if asked[0] else None), (torch.zeros_like(weight) if asked[1] else None)
    else:
        seen = image if ctx.call["transposed"] else _pad(image, frames)
        around = _pad(grad, frames, -1) if ctx.call["transposed"] else grad
        dx, dw, _ = torch.ops.aten.convolution_backward(
            around, seen, weight, None, *settings, [asked[0], asked[1], False]
        )
        if dx is not None and not ctx.call["transposed"]:
            dx = _pad(dx, frames, -1)
    if dx is not None:
        for halo in reversed(halos.values()):
            dx = halo.give_back(dx)
    return dx, dw, dbias


register("aten.convolution aten._convolution", convolution)
register("aten.convolution_backward", convolution_backward)
