"""Pools: batch and channels are free, batched or not; so are, by a kernel, the spatial dims of plain windows.

    avg_pool2d      ... [h] [w] -> ... [h'] [w']            linear
    max_pool2d      ... [h] [w] -> ... [h'] [w'] twice      values, and where in the plane they were

Where windows lie side by side, and shards hold whole ones, a sharded spatial dim costs nothing; elsewhere rows of the
neighbours are brought in. Adaptive and fractional pools, whose windows differ, keep them whole.

Every tensor of these ops, gradients and indices too, has the same leading dims and as many spatial ones as the
op's name says, so one builder serves all. Indices count places in one plane, which no split of leading dims changes.
Torch refuses planes without channels: an empty shard gives zeros of the promised shape.

Pools whose spatial dims are sharded: the rows of neighbours that a window looks at are brought in (`halo`).

A rank makes a small image of the rows that its outputs read, with the padding written out, and pools that:

    averages    sums of windows, divided by how many elements the op counts for a window of the whole image
    maxima      padding is the lowest number; places are counted in the whole plane

Backward gives each window's gradient to the rows it came from: averages by the op's own backward on the small
image, maxima by their places; then the gradients of foreign rows go back to their owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, linear_groups, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule
from dtensor.spec import Spec, TensorMeta

from .build.dtypes import is_exact
from .build.empty_shards import zeros_of
from .build.gathered import output_spec
from .build.halo import Halo
from .build.labelled import labelled

__all__ = ["Window", "planes", "run_average", "run_average_backward", "run_largest", "run_largest_backward", "windows"]

Run = Callable[[KernelContext], object]


@dataclass(frozen=True, slots=True)
class planes:  # noqa: N801 - used as a function
    """Builder for ops on planes of `spatial` dims: the dims before them are free. `linear` as in `linear_groups`.

    An argument `input_size` is the shape of the output. `samples` of fractional pools have one dim behind the free
    ones, and a batch dim of 1 where the input has none.
    """

    spatial: int
    linear: str = ""

    def __call__(self, call: Call) -> Rule:
        lead = call.inputs[0].ndim - self.spatial

        def labels(name: str, t: Spec | TensorMeta) -> Sequence[Hashable]:
            if name == "random_samples":
                return [*([None] if lead == 1 else []), *range(lead), None]
            return [*range(lead), *(None,) * self.spatial]

        rule = labelled(
            call, [labels(n, s) for n, s in zip(call.names, call.inputs, strict=True)],
            [[] if m is None else labels("", m) for m in call.outputs], linear=self._groups(call),
            bind=lambda ins, outs: zeros_of(outs) if any(not s.local_numel for s in ins) else None,
            localize=_input_size if "input_size" in call.arguments else None,
        )  # fmt: skip
        return rule

    def _groups(self, call: Call) -> tuple[Linear, ...]:
        """None where integers are averaged, and so rounded; what only moves elements passes all the same."""
        exact = is_exact(call.inputs[0].dtype) and not self.linear.startswith("any")
        return () if exact else linear_groups(self.linear)

    @property
    def text_form(self) -> str:
        """Printed form."""
        space = " ".join(f"[s{i}]" for i in range(self.spatial))
        return f"planes ... {space}" + (f"   linear {self.linear}" if self.linear else "")


def _input_size(_: Sequence[Spec], outs: Sequence[Spec | None]) -> dict[str, object]:
    return {} if outs[0] is None else {"input_size": list(outs[0].local_shape)}


def windowed(spatial: int, linear: str, run: Run, collectives: int) -> Callable[[Call], Rule]:
    """`planes` with a kernel for the spatial dims, which brings in neighbours' rows `collectives` times."""
    whole = planes(spatial, linear)

    def build(call: Call) -> Rule:
        rule = whole(call)
        x = call["self"]
        y = call["grad_output"].shape if "grad_output" in call.names else call.outputs[0].shape  # type: ignore[union-attr]
        lead = x.ndim - spatial
        dims: Dims = tuple((d,) for d in range(x.ndim))
        found = windows(call, x.shape, y)
        ranks = math.prod(x.mesh.shape)
        aligned = all(
            w.reach <= w.stride and not w.padding and w.size == w.count * w.stride and w.count % ranks == 0
            for w in found
        )
        halo = max(x.numel // max(w.size, 1) * max(w.reach - w.stride, 1) for w in found)
        kernel = Kernel(
            "halo", frozenset(range(lead, x.ndim)), ("shard",) * len(call.outputs), run, halo,
            0 if aligned else collectives, "all_to_all",
        )  # fmt: skip
        if is_exact(x.dtype):  # averages are rounded, each window by itself
            return rule
        return replace(
            rule, inputs=(dims,) * len(call.inputs), outputs=(dims,) * len(call.outputs), sizes=tuple(x.shape),
            whole=frozenset(range(lead, x.ndim)), kernels=(kernel,),
        )  # fmt: skip

    build.text_form = f"{whole.text_form}   kernel halo"  # type: ignore[attr-defined]
    return build


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Window:
    """The windows along one dim of `size` elements, of which there are `count`."""

    size: int
    count: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def reads(self, a: int, b: int) -> tuple[int, int]:
        """Elements, perhaps outside, that windows [a, b) look at."""
        return a * self.stride - self.padding, (b - 1) * self.stride - self.padding + self.reach

    @property
    def reach(self) -> int:
        """From the first element of a window to the one after its last."""
        return self.dilation * (self.kernel - 1) + 1

    def counted(self, a: int, b: int, with_padding: bool) -> list[int]:
        """How many elements of windows [a, b) an average counts; those beyond the padding never."""
        out = []
        for i in range(a, b):
            start = i * self.stride - self.padding
            stop = min(start + self.kernel, self.size + self.padding)
            out.append(stop - start if with_padding else min(stop, self.size) - max(start, 0))
        return out


def windows(call: Call, x: Sequence[int], y: Sequence[int]) -> list[Window]:
    """The windows of a pool's spatial dims, from the shapes of its input and output."""
    n = 3 if call.op._schema.name.split("_pool")[-1].startswith("3") else 2
    lead = len(x) - n

    def each(name: str, missing: Sequence[int]) -> list[int]:
        given = call.get(name)
        given = [given] if isinstance(given, int) else list(given or missing)
        return [int(v) for v in given] * (n if len(given) == 1 else 1)

    kernel = each("kernel_size", ())
    stride, padding, dilation = each("stride", kernel), each("padding", [0]), each("dilation", [1])
    return [
        Window(x[lead + i], y[lead + i], kernel[i], stride[i], padding[i], dilation[i]) for i in range(n)
    ]  # fmt: skip


@dataclass(slots=True)
class _View:
    """What this rank pools: its windows of every spatial dim, and the halos of the dims that are sharded."""

    windows: list[Window]
    halos: dict[int, Halo]
    lead: int

    @staticmethod
    def of(ctx: KernelContext, x: Spec, y: Spec) -> _View:
        """`x` and `y`: layouts of the image and of the pooled image."""
        found = windows(ctx.call, x.shape, y.shape)
        lead, halos = x.ndim - len(found), {}
        for i, w in enumerate(found):
            along = [a for a, f in zip(ctx.axes, ctx.factors, strict=True) if f == lead + i]
            if along:
                halos[i] = Halo.of(ctx, along, x, y, lead + i, w.reads)
        return _View(found, halos, lead)

    def outputs(self, i: int) -> tuple[int, int]:
        """This rank's windows along spatial dim `i`."""
        return self.halos[i].outputs if i in self.halos else (0, self.windows[i].count)

    def frame(self, i: int) -> tuple[int, int]:
        """Elements before and after the rows at hand that this rank's windows look at; negative: at hand but unseen."""
        w, (a, b) = self.windows[i], self.outputs(i)
        first, last = w.reads(a, b)
        lo, hi = self.halos[i].rows if i in self.halos else (0, w.size)
        return lo - first, last - hi

    def pad(self, x: torch.Tensor, value: float = 0.0, sign: int = 1) -> torch.Tensor:
        """The rows at hand with what surrounds them, or with sign -1 that taken off."""
        width = [sign * v for i in reversed(range(len(self.windows))) for v in self.frame(i)]
        return torch.nn.functional.pad(x, width, value=value) if any(width) else x

    def image(self, x: torch.Tensor) -> torch.Tensor:
        """The rows at hand."""
        for halo in self.halos.values():
            x = halo.bring(x)
        return x

    def zeros(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Zeros for the rows at hand of an image whose own part has this shape."""
        wide = list(shape)
        for i, halo in self.halos.items():
            wide[self.lead + i] = halo.rows[1] - halo.rows[0]
        return like.new_zeros(wide)

    def give_back(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of the rows at hand to their owners."""
        for halo in reversed(self.halos.values()):
            grad = halo.give_back(grad)
        return grad

    def settings(self) -> tuple[list[int], list[int], list[int]]:
        """Kernel, stride and no padding: it is written out."""
        return [w.kernel for w in self.windows], [w.stride for w in self.windows], [0] * len(self.windows)


def _divisor(ctx: KernelContext, view: _View, like: torch.Tensor) -> torch.Tensor:
    """What the sums of this rank's windows are divided by."""
    fixed = ctx.call.get("divisor_override")
    if fixed is not None:
        return torch.full((), float(fixed), dtype=like.dtype, device=like.device)
    total = torch.ones((), dtype=like.dtype, device=like.device)
    for i, w in enumerate(view.windows):
        counts = w.counted(*view.outputs(i), bool(ctx.call["count_include_pad"]))
        total = total * torch.tensor(counts, dtype=like.dtype, device=like.device).reshape(
            -1, *(1,) * (len(view.windows) - 1 - i)
        )
    return total


def _op(name: str, view: _View) -> Any:
    return getattr(aten, name.format(len(view.windows))).default


# ------------------------------------------------------------ averages
def run_average(ctx: KernelContext) -> torch.Tensor:
    """`avg_pool2d` and `avg_pool3d`."""
    spec = output_spec(ctx)
    view = _View.of(ctx, ctx.in_specs[0], spec)
    x = view.image(ctx.inputs[0])
    if 0 in spec.local_shape:
        return x.new_zeros(spec.local_shape)
    sums: torch.Tensor = _op("avg_pool{}d", view)(view.pad(x), *view.settings(), False, True, 1)
    return sums / _divisor(ctx, view, sums)


def run_average_backward(ctx: KernelContext) -> torch.Tensor:
    """Their gradients; the input's values are not read, so its halo is not brought in."""
    grad, x = ctx.tensor("grad_output"), ctx.tensor("self")
    view = _View.of(ctx, ctx.in_specs[1], ctx.in_specs[0])
    image = view.zeros(grad, x.shape)
    if grad.numel():
        padded = view.pad(image)
        spread = _op("avg_pool{}d_backward", view)(
            (grad / _divisor(ctx, view, grad)).contiguous(), padded, *view.settings(), False, True, 1
        )
        image = view.pad(spread, sign=-1)
    return view.give_back(image)


# ------------------------------------------------------------ maxima
def run_largest(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    """`max_pool2d_with_indices` and `max_pool3d_with_indices`."""
    spec = output_spec(ctx)
    view = _View.of(ctx, ctx.in_specs[0], spec)
    x = view.image(ctx.inputs[0])
    if 0 in spec.local_shape:
        return x.new_zeros(spec.local_shape), x.new_zeros(spec.local_shape, dtype=torch.int64)
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = view.pad(x, lowest)
    values, places = _op("max_pool{}d_with_indices", view)(
        padded, *view.settings(), [w.dilation for w in view.windows], False
    )
    return values, _moved(places, view, padded.shape, to_plane=True)


def _moved(places: torch.Tensor, view: _View, padded: Sequence[int], to_plane: bool) -> torch.Tensor:
    """Places in the padded image as places in the whole plane, or back."""
    small = list(padded[view.lead :])
    whole = [w.size for w in view.windows]
    source, target = (small, whole) if to_plane else (whole, small)
    out = torch.zeros_like(places)
    for i, w in enumerate(view.windows):
        first = w.reads(*view.outputs(i))[0]
        at = places // prod(source[i + 1 :]) % source[i]
        at = at + first if to_plane else at - first
        # A window of nothing but the lowest number has its place in the padding if it begins there: its first
        # element within the plane is meant.
        out = out * target[i] + (torch.where(at < 0, at.remainder(w.dilation), at) if to_plane else at)
    return out


def run_largest_backward(ctx: KernelContext) -> torch.Tensor:
    """Their gradients, from the places alone."""
    grad, x, places = ctx.tensor("grad_output"), ctx.tensor("self"), ctx.tensor("indices")
    view = _View.of(ctx, ctx.in_specs[1], ctx.in_specs[0])
    image = view.zeros(grad, x.shape)
    if grad.numel():
        padded = view.pad(image)
        flat, lead = padded.reshape(*padded.shape[: view.lead], -1), grad.shape[: view.lead]
        at = _moved(places, view, padded.shape, to_plane=False).reshape(*lead, -1)
        spread = flat.scatter_add(-1, at, grad.reshape(*lead, -1)).reshape(padded.shape)
        image = view.pad(spread, sign=-1)
    return view.give_back(image)


for n in (2, 3):
    register(f"aten.avg_pool{n}d", windowed(n, "0", run_average, 1))
    register(f"aten.avg_pool{n}d_backward", windowed(n, "0", run_average_backward, 1))
    register(f"aten.max_pool{n}d_with_indices", windowed(n, "", run_largest, 1))
    register(f"aten.max_pool{n}d_with_indices_backward", windowed(n, "0", run_largest_backward, 1))
    register(f"aten._adaptive_avg_pool{n}d aten._adaptive_avg_pool{n}d_backward", planes(n, "0"))
    register(f"aten.adaptive_max_pool{n}d aten.fractional_max_pool{n}d", planes(n))
    register(f"aten.adaptive_max_pool{n}d_backward aten.fractional_max_pool{n}d_backward", planes(n, "0"))
    register(f"aten.max_unpool{n}d", planes(n, "0"))
