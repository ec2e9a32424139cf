"""Samples of the matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helpers.laws import Sample, rand

SUMS = ("sum", "avg")

SAMPLES = [
    Sample("mm", torch.mm, (rand(5, 6), rand(6, 3))),
    Sample("mm even", torch.mm, (rand(8, 4), rand(4, 8)), pending=SUMS),
    Sample("mm small", torch.mm, (rand(1, 3), rand(3, 2)), pending=SUMS),
    Sample("mm nothing to sum", torch.mm, (rand(3, 0), rand(0, 2)), pending=SUMS),
    Sample("mm no rows", torch.mm, (rand(0, 3), rand(3, 2)), pending=SUMS),
    Sample("mm int", torch.mm, (rand(5, 6, dtype=torch.int64), rand(6, 3, dtype=torch.int64))),
    *(
        Sample(
            f"{name} int, fractions",  # shards of the contracted dim are empty on some meshes
            lambda c, a, b, name=name: getattr(torch, name)(c, a, b, alpha=1.6, beta=2.6),
            tuple(rand(*shape, dtype=torch.int64) for shape in shapes),
        )
        for name, shapes in {
            "addmm": ((4, 3), (4, 1), (1, 3)), "addmv": ((4,), (4, 1), (1,)),
            "addbmm": ((4, 3), (2, 4, 1), (2, 1, 3)), "baddbmm": ((2, 4, 3), (2, 4, 1), (2, 1, 3)),
        }.items()
    ),
    Sample("addmm", torch.addmm, (rand(5, 3), rand(5, 6), rand(6, 3)), pending=SUMS),
    Sample("addmm vector", torch.addmm, (rand(3), rand(5, 6), rand(6, 3)), pending=SUMS),
    Sample("addmm row", torch.addmm, (rand(1, 3), rand(5, 6), rand(6, 3)), pending=SUMS),
    Sample("addmm column", torch.addmm, (rand(5, 1), rand(5, 6), rand(6, 3)), pending=SUMS),
    Sample("addmm scalar", torch.addmm, (rand(1).view(()), rand(5, 6), rand(6, 3)), pending=SUMS),
    Sample(
        "addmm alpha beta",
        lambda c, a, b: torch.addmm(c, a, b, alpha=2.0, beta=-0.5),
        (rand(3), rand(5, 6), rand(6, 3)),
        pending=SUMS,
    ),
    Sample(
        "addmm beta 0",
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        (rand(3) / 0, rand(5, 6), rand(6, 3)),
        pending=(),
        grads=False,
    ),
    Sample(
        "addmm_",
        lambda c, a, b: c.addmm_(a, b),
        (rand(5, 3), rand(5, 6), rand(6, 3)),
        pending=SUMS,
        inplace=True,
        may_refuse=True,
    ),
    Sample("bmm", torch.bmm, (rand(3, 4, 5), rand(3, 5, 2)), pending=SUMS),
    Sample("baddbmm", torch.baddbmm, (rand(3, 4, 2), rand(3, 4, 5), rand(3, 5, 2)), pending=SUMS),
    Sample("baddbmm broadcast", torch.baddbmm, (rand(4, 1), rand(3, 4, 5), rand(3, 5, 2)), pending=SUMS),
    Sample("addbmm", torch.addbmm, (rand(4, 2), rand(3, 4, 5), rand(3, 5, 2)), pending=SUMS),
    Sample("addmv", torch.addmv, (rand(4), rand(4, 5), rand(5)), pending=SUMS),
    Sample("addmv scalar", torch.addmv, (rand(1), rand(4, 5), rand(5)), pending=SUMS),
    Sample("mv", torch.mv, (rand(4, 5), rand(5)), pending=SUMS),
    Sample("dot", torch.dot, (rand(7), rand(7, seed=1)), pending=SUMS),
    Sample(
        "vdot complex",
        torch.vdot,
        (rand(5, dtype=torch.complex64), rand(5, seed=1, dtype=torch.complex64)),
        grads=False,
    ),
    Sample("addr", torch.addr, (rand(4, 3), rand(4), rand(3)), pending=SUMS),
    Sample("addr broadcast", torch.addr, (rand(1, 3), rand(4), rand(3)), pending=SUMS),
    Sample("outer", torch.outer, (rand(5), rand(3)), pending=SUMS),
    Sample("linear", F.linear, (rand(5, 6), rand(3, 6), rand(3)), pending=SUMS),
    Sample("matmul 3-D", torch.matmul, (rand(4, 2, 6), rand(6, 3)), pending=SUMS),
    Sample("matmul broadcast", torch.matmul, (rand(2, 1, 4, 6), rand(3, 6, 2)), pending=()),
    Sample("linear 3-D", F.linear, (rand(4, 2, 6), rand(3, 6), rand(3)), pending=()),
]

INFERENCE = [
    Sample("linear 3-D whole", F.linear, (rand(5, 2, 6), rand(3, 6), rand(3)), grads=False, pending=SUMS),
    Sample("linear 1-D weight", F.linear, (rand(5, 2, 6), rand(6)), grads=False, pending=SUMS),
    Sample("linear no bias", F.linear, (rand(5, 6), rand(3, 6)), grads=False, pending=SUMS),
    Sample("matmul 3-D whole", torch.matmul, (rand(5, 2, 6), rand(6, 3)), grads=False, pending=()),
    Sample("matmul 1-D whole", torch.matmul, (rand(6), rand(6, 3)), grads=False, pending=()),
]
