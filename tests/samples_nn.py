"""Samples of convolutions, pools, resampling, distances, losses and whole layers."""

from __future__ import annotations

import torch.nn.functional as F
from laws import Sample, rand

SUMS = ("sum",)

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
