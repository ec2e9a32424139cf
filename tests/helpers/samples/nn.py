"""Samples of convolutions, pools, resampling, distances, losses and whole layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from helpers.laws import Sample, ints, rand

SUMS = ("sum",)
REDUCTIONS = ("none", "mean", "sum")

CONV = [
    Sample("conv2d", F.conv2d, (rand(4, 3, 5, 6), rand(6, 3, 3, 3), rand(6)), pending=SUMS),
    Sample("conv2d padded", lambda x, w: F.conv2d(x, w, padding=1), (rand(4, 3, 9, 6), rand(6, 3, 3, 3)), pending=SUMS),
    Sample("conv2d few", lambda x, w: F.conv2d(x, w, stride=2, dilation=2), (rand(1, 2, 11, 7), rand(2, 2, 3, 3)),
           pending=()),
    Sample("conv2d patches", lambda x, w, b: F.conv2d(x, w, b, stride=3),
           (rand(2, 2, 12, 9), rand(4, 2, 3, 3), rand(4)), pending=SUMS),
    Sample("conv2d grouped", lambda x, w, b: F.conv2d(x, w, b, groups=2, padding=(2, 0)),
           (rand(4, 4, 5, 4), rand(8, 2, 3, 2), rand(8)), pending=SUMS),
    Sample("conv2d depthwise", lambda x, w, b: F.conv2d(x, w, b, groups=5, padding="same"),
           (rand(2, 5, 9, 4), rand(5, 1, 3, 3), rand(5)), pending=SUMS),
    Sample("conv2d 1x1", F.conv2d, (rand(2, 4, 5, 3), rand(6, 4, 1, 1), rand(6)), pending=SUMS),
    Sample("conv2d no batch", F.conv2d, (rand(3, 5, 6), rand(6, 3, 3, 3), rand(6)), pending=()),
    Sample("conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=3, padding=4, dilation=2),
           (rand(5, 3, 13), rand(4, 3, 4), rand(4)), pending=()),
    Sample("conv1d wide", lambda x, w: F.conv1d(x, w, padding=8), (rand(1, 2, 6), rand(2, 2, 9)), pending=()),
    Sample("conv3d", lambda x, w: F.conv3d(x, w, padding=1, stride=2), (rand(2, 2, 4, 5, 4), rand(2, 2, 3, 3, 3)),
           pending=()),
    Sample("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
           (rand(4, 3, 5, 3), rand(3, 4, 2, 2), rand(4)), pending=SUMS),
    Sample("conv_transpose2d grouped", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=3, padding=1, groups=2),
           (rand(2, 4, 6, 3), rand(4, 2, 4, 2), rand(4)), pending=SUMS),
    Sample("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, dilation=2, padding=2),
           (rand(2, 3, 7), rand(3, 2, 3), rand(2)), pending=()),
]  # fmt: skip

IMAGE, VOLUME, LINE = rand(5, 3, 7, 6), rand(2, 3, 5, 4, 6), rand(4, 3, 9)


def distinct(*shape: int) -> torch.Tensor:
    """Numbers without ties, so that the place of a maximum is one."""
    n = math.prod(shape)
    return torch.randperm(n, generator=torch.Generator().manual_seed(n)).reshape(shape).float() / 8


def unpool(dims: int, kernel: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A pool and its reverse, so that the places are valid."""
    pool, back = (getattr(F, f"max_{kind}{dims}d") for kind in ("pool", "unpool"))
    return lambda x: back(*pool(x, kernel, return_indices=True), kernel)


def fractional(dims: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    pool = getattr(F, f"fractional_max_pool{dims}d")
    return lambda x, s: pool(x, 2, output_size=3, _random_samples=s.detach().sigmoid())


def adaptive(kind: str, dims: int) -> Callable[[torch.Tensor], torch.Tensor]:
    pool = getattr(F, f"adaptive_{kind}_pool{dims}d")
    return lambda x: pool(x, 3)


POOLS = [
    Sample("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), (LINE,)),
    Sample("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGE,), pending=SUMS),
    Sample("avg_pool2d ceil", lambda x: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True), (IMAGE,), pending=SUMS),
    Sample("avg_pool2d no batch", lambda x: F.avg_pool2d(x, 2, divisor_override=3), (IMAGE[0],), pending=SUMS),
    Sample("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (VOLUME,), pending=SUMS),
    Sample("avg_pool3d of integers", lambda x: F.avg_pool3d(x, 2), ((VOLUME * 5).long(),), pending=SUMS),
    Sample("bilinear of bytes", lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
           ((IMAGE.abs() * 40).byte(),), pending=SUMS),
    Sample("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), (IMAGE.abs() + 0.1,), pending=()),
    Sample("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (distinct(4, 3, 9),), pending=("max",)),
    Sample("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), (distinct(5, 3, 7, 6),), pending=("max",)),
    Sample("max_pool2d no batch", lambda x: F.max_pool2d(x, 3, 2, 1, 2), (distinct(3, 7, 6),), pending=SUMS),
    Sample("max_pool3d", lambda x: F.max_pool3d(x, 2), (distinct(2, 3, 5, 4, 6),), pending=SUMS),
    *(Sample(f"adaptive_{kind}_pool{d}d", adaptive(kind, d), (distinct(4, 3, *(7, 5, 6)[:d]),), pending=SUMS)
      for kind in ("avg", "max") for d in (1, 2, 3)),
    Sample("global average", lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), pending=SUMS),
    Sample("max_unpool2d", unpool(2, 2), (distinct(3, 2, 6, 4),), pending=()),
    Sample("max_unpool3d", unpool(3, 2), (distinct(2, 3, 4, 4, 4),), pending=()),
    Sample("fractional_max_pool2d", fractional(2), (distinct(4, 3, 9, 8), rand(4, 3, 2)), pending=()),
    Sample("fractional_max_pool3d", fractional(3), (distinct(3, 9, 8, 7), rand(1, 3, 3)), pending=()),
]  # fmt: skip


def resize(mode: str, align: bool | None = None, **kw: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, mode=mode, align_corners=align, **kw)  # type: ignore[arg-type]


RESAMPLE = [
    Sample("nearest 1d", resize("nearest", scale_factor=2), (LINE,)),
    Sample("nearest 2d", resize("nearest", size=(5, 9)), (IMAGE,)),
    Sample("nearest 3d", resize("nearest", scale_factor=2), (VOLUME,), pending=SUMS),
    Sample("nearest-exact 1d", resize("nearest-exact", size=4), (LINE,), pending=SUMS),
    Sample("nearest-exact 2d", resize("nearest-exact", scale_factor=1.5), (IMAGE,), pending=SUMS),
    Sample("nearest-exact 3d", resize("nearest-exact", size=3), (VOLUME,), pending=SUMS),
    Sample("linear", resize("linear", True, scale_factor=2), (LINE,), pending=SUMS),
    Sample("bilinear", resize("bilinear", False, size=(5, 9)), (IMAGE,), pending=SUMS),
    Sample("bilinear antialias", resize("bilinear", False, size=(4, 3), antialias=True), (IMAGE,), pending=SUMS),
    Sample("bicubic", resize("bicubic", False, scale_factor=2), (rand(5, 3, 3, 4),), pending=SUMS),
    Sample("bicubic antialias", resize("bicubic", False, size=4, antialias=True), (IMAGE,), pending=SUMS),
    *([Sample("lanczos", resize("lanczos", False, size=4, antialias=True), (IMAGE,), pending=SUMS)]
      if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa") else []),  # older torch has none
    Sample("trilinear", resize("trilinear", True, size=(3, 6, 5)), (VOLUME,), pending=SUMS),
    Sample("grid_sample 2d", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
           (IMAGE, rand(5, 4, 3, 2)), pending=SUMS),
    Sample("grid_sample 3d", lambda x, g: F.grid_sample(x, g.tanh(), padding_mode="reflection", align_corners=False),
           (VOLUME, rand(2, 3, 2, 4, 3)), pending=SUMS),
    Sample("affine_grid", lambda t: F.affine_grid(t, [5, 3, 4, 6], align_corners=False), (rand(5, 2, 3),)),
    Sample("affine_grid 3d", lambda t: F.affine_grid(t, [3, 1, 2, 4, 3], align_corners=True), (rand(3, 3, 4),)),
    Sample("unfold", lambda x: F.unfold(x, (3, 2), padding=1, stride=2), (IMAGE,), pending=SUMS),
    Sample("unfold no batch", lambda x: F.unfold(x, 2), (IMAGE[0],), pending=SUMS),
    Sample("fold", lambda x: F.fold(x, (5, 4), (2, 3), padding=1), (rand(3, 24, 24),), pending=SUMS),
    Sample("fold no batch", lambda x: F.fold(x, 4, 2, stride=2), (rand(12, 4),), pending=SUMS),
]  # fmt: skip

DISTANCES = [
    *(Sample(f"cdist {p}", lambda a, b, p=p: torch.cdist(a, b, p), (rand(2, 5, 4), rand(2, 6, 4)), pending=SUMS)
      for p in (2.0, 1.0, 3.0, float("inf"))),
    Sample("cdist broadcast", torch.cdist, (rand(3, 1, 5, 4), rand(2, 6, 4, seed=1)), pending=SUMS),
    Sample("pdist", F.pdist, (rand(6, 4),), pending=SUMS),
    Sample("pairwise_distance", F.pairwise_distance, (rand(5, 6), rand(5, 6, seed=1)), pending=SUMS),
]  # fmt: skip

Y = torch.tensor([2, 0, 4, 1, 3, 3, 0])
MARGINS = [
    *(Sample(f"multi_margin_loss {r}", lambda x, t, w, r=r: F.multi_margin_loss(x, t, weight=w.detach(), reduction=r),
             (rand(7, 5), Y, rand(5).abs()), pending=SUMS) for r in REDUCTIONS),
    Sample("multi_margin_loss of one", lambda x, t: F.multi_margin_loss(x, t, 2), (rand(5), Y[0]), pending=SUMS),
    *(Sample(f"multilabel_margin_loss {r}", lambda x, t, r=r: F.multilabel_margin_loss(x, t, reduction=r),
             (rand(6, 4), torch.tensor([[1, 3, -1, 0]] * 3 + [[2, -1, 0, 0]] * 3)), pending=SUMS) for r in REDUCTIONS),
]  # fmt: skip

aten = torch.ops.aten
DIRECT = [
    Sample("_convolution", lambda x, w, b: aten._convolution(
        x, w, b, [2, 1], [1, 0], [1, 1], False, [0, 0], 1, False, False, False, False),
        (IMAGE, rand(4, 3, 3, 2), rand(4)), pending=SUMS, grads=False),
]  # fmt: skip

OFFSETS, NUMBERS = torch.tensor([0, 3, 3, 5]), ints(9, 8)
BAGS = [
    *(Sample(f"bag {mode} padded", lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m, padding_idx=2),
             (rand(9, 6), torch.tensor([2, 1, 2, 0, 2, 8, 5, 2]), OFFSETS), grads=mode != "max", pending=SUMS)
      for mode in ("sum", "mean", "max")),
    Sample("bag last offset", lambda w, i, o: F.embedding_bag(i, w, o, mode="mean", include_last_offset=True),
           (rand(9, 6), NUMBERS, torch.tensor([0, 3, 3, 8])), pending=SUMS),
    Sample("bag by frequency", lambda w, i, o: F.embedding_bag(i, w, o, mode="sum", scale_grad_by_freq=True),
           (rand(9, 6), NUMBERS, OFFSETS), pending=()),
    Sample("bag weighted", lambda w, i, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum", padding_idx=3),
           (rand(9, 6), ints(9, 4, 3), rand(4, 3)), pending=SUMS),
    Sample("bag of none", lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"),
           (rand(9, 6), NUMBERS[:0], torch.tensor([0, 0])), pending=()),
]  # fmt: skip

LENGTHS = ((8, 7, 8, 6, 8), (3, 2, 1, 1, 2))
CTC = [  # what its second result holds beyond the lengths is not initialised
    Sample("ctc", lambda x, t: F.ctc_loss(x.log_softmax(2), t, *LENGTHS, reduction="none"),
           (rand(8, 5, 6), ints(5, 5, 3) + 1), pending=SUMS),
    Sample("ctc strung together", lambda x, t: F.ctc_loss(x.log_softmax(2), t, *LENGTHS),
           (rand(8, 5, 6), ints(5, 9) + 1), pending=()),
]  # fmt: skip

SELF, ATTENTION = [rand(24, 8), rand(24), rand(8, 8), rand(8)], aten._native_multi_head_attention
NORMS_AND_WIDE = [rand(8), rand(8), rand(8), rand(8), rand(16, 8), rand(16), rand(8, 16), rand(8)]
LAYERS = [
    Sample("weight_norm", lambda v, g: aten._weight_norm_interface(v, g, 0)[0], (rand(6, 4, 3), rand(6, 1, 1)),
           pending=SUMS),
    Sample("weight_norm last", lambda v, g: aten._weight_norm_interface(v, g, 1)[0], (rand(6, 4), rand(1, 4)),
           pending=SUMS),
    Sample("attention layer", lambda x, *w: ATTENTION(x, x, x, 8, 2, *w), (rand(5, 3, 8), *SELF), pending=(),
           grads=False),
    Sample("attention layer masked", lambda x, m, *w: ATTENTION(x, x, x, 8, 2, *w, m, True, True, 1),
           (rand(5, 3, 8), torch.tensor([[False, False, True]] * 5), *SELF), pending=(), grads=False),
    Sample("encoder layer",
           lambda x, *w: aten._transformer_encoder_layer_fwd(x, 8, 2, *w[:4], True, True, 1e-5, *w[4:]),
           (rand(5, 3, 8), *SELF, *NORMS_AND_WIDE), pending=(), grads=False),
]  # fmt: skip
EVALUATION = [  # kernels that give less than torch's shape function says: no elements, or nothing
    Sample("native_batch_norm, not training", lambda x, m, v: aten.native_batch_norm(
        x, None, None, m, v.abs() + 0.5, False, 0.1, 1e-5), (IMAGE, rand(3), rand(3, seed=1)), pending=(), grads=False),
    Sample("attention layer without weights", lambda x, *w: ATTENTION(x, x, x, 8, 2, *w, None, False)[0],
           (rand(5, 3, 8), *SELF), pending=(), grads=False),
]  # fmt: skip
