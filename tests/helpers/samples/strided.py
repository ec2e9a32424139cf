"""Samples of `as_strided`, in the plain and in the forms that torch's own code uses."""

from __future__ import annotations

import torch

from helpers.laws import Sample, rand


def frames_of(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.stft(x, 16, 4, window=torch.ones_like(x[0, :16]), return_complex=True))


SAMPLES = [
    Sample("frames of every row", lambda x: x.as_strided((4, 4, 3), (10, 2, 1)), (rand(4, 10),)),
    Sample("two leading dims", lambda x: x.as_strided((2, 3, 4, 3), (30, 10, 2, 1)), (rand(2, 3, 10),)),
    Sample("offset", lambda x: x.as_strided((4, 2), (10, 2), 3), (rand(4, 10),)),
    Sample("across rows", lambda x: x.as_strided((3, 3), (1, 2), 1), (rand(4, 5),)),
    Sample("of a transposed tensor", lambda x: x.t().as_strided((4, 3), (5, 1)), (rand(4, 5),)),
    Sample("stft", frames_of, (rand(4, 40),)),
]

WRITES = [
    Sample(
        "write through as_strided", lambda x: x.as_strided((2, 2), (5, 1)).fill_(3.0), (rand(4, 5),), grads=False,
        inplace=True, pending=(),
    ),
]  # fmt: skip
