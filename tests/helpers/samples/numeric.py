"""Samples of linear algebra, transforms and other numeric ops."""

from __future__ import annotations

from typing import Any

import torch

from helpers.laws import Sample, ints, rand

aten = torch.ops.aten
SUM = ("sum", "avg")
B, C = 3, 4


def spd(*batch: int, n: int = C, seed: int = 0) -> torch.Tensor:
    """Symmetric positive definite matrices."""
    a = rand(*batch, n, n, seed=seed)
    return a @ a.mT + n * torch.eye(n)


def _plain(name: str, fn: Any, *tensors: torch.Tensor, **more: Any) -> Sample:
    return Sample(name, fn, tensors, grads=False, pending=SUM, **more)


def _grad(name: str, fn: Any, *tensors: torch.Tensor, **more: Any) -> Sample:
    return Sample(name, fn, tensors, pending=SUM, rtol=1e-2, atol=1e-3, **more)


A, M, V = spd(B), rand(B, C, 2, seed=3), rand(B, C, seed=4)
W, T = rand(B, 5, 3, seed=5), rand(B, C, C, seed=6).triu() + 3 * torch.eye(C)
LU, PIVOTS, _ = aten.linalg_lu_factor_ex(rand(B, C, C, seed=7))
LD, LD_PIVOTS, _ = aten.linalg_ldl_factor_ex(A)
CHOLESKY = torch.linalg.cholesky(A)
QR_A, QR_TAU = torch.geqrf(rand(B, 5, 3, seed=8))

LINALG = [
    _grad("cholesky", torch.linalg.cholesky, A),
    _plain("cholesky checked", lambda a: torch.linalg.cholesky_ex(a, check_errors=True), A),
    *([_plain("cholesky of old", lambda a: aten.cholesky(a), A)] if hasattr(aten, "cholesky") else []),  # 2.14 has none
    _plain("cholesky_inverse", torch.cholesky_inverse, CHOLESKY),
    _grad("cholesky_solve", torch.cholesky_solve, M, CHOLESKY),
    _plain("_cholesky_solve_helper", lambda m, a: aten._cholesky_solve_helper(m, a, False), M, CHOLESKY),
    _grad("det", torch.linalg.det, A),
    _grad("slogdet", torch.linalg.slogdet, A),
    _grad("inv", torch.linalg.inv, A),
    _grad("eigh", lambda a: torch.linalg.eigh(a)[0], A),
    _grad("eigvalsh", torch.linalg.eigvalsh, A),
    _plain("eig", lambda a: torch.linalg.eig(a)[0].abs().sum(-1), A),
    _plain("eigvals", lambda a: aten._linalg_eigvals(a).abs().sum(-1), A),
    _grad("svd", lambda a: torch.linalg.svd(a, full_matrices=False)[1], W),
    _plain("svd full", lambda a: torch.linalg.svd(a)[1], W),
    _grad("svdvals", torch.linalg.svdvals, W),
    _grad("solve", torch.linalg.solve, A, M),
    _grad("solve vectors", torch.linalg.solve, A, V),
    _grad("solve one matrix", torch.linalg.solve, A[0], rand(C, 5, seed=9)),
    _plain("solve right", lambda a, m: torch.linalg.solve(a, m, left=False), A, M.mT.contiguous()),
    _plain("solve broadcast", torch.linalg.solve, A[:1], M),
    _plain("lu_factor", torch.linalg.lu_factor, W),
    _grad("lu", lambda a: torch.linalg.lu(a)[1:], A),
    _grad("lu_solve", lambda lu, m, p: torch.linalg.lu_solve(lu, p, m), LU, M, PIVOTS),
    _plain("lu_solve right", lambda lu, m, p: torch.linalg.lu_solve(lu, p, m, left=False), LU, M.mT, PIVOTS),
    _plain("lu_unpack", torch.lu_unpack, LU, PIVOTS),
    _plain("lu_unpack half", lambda a, p: torch.lu_unpack(a, p, unpack_pivots=False)[1:], LU, PIVOTS),
    _plain("ldl_factor", lambda a: torch.linalg.ldl_factor_ex(a), A),
    _plain("ldl_solve", torch.linalg.ldl_solve, LD, LD_PIVOTS, M),
    _grad("qr", torch.linalg.qr, W),
    _plain("qr r", lambda a: torch.linalg.qr(a, mode="r")[1], W),
    _plain("householder_product", torch.linalg.householder_product, QR_A, QR_TAU),
    _plain("ormqr", torch.ormqr, QR_A, QR_TAU, rand(B, 5, 2, seed=11)),
    _plain("ormqr right", lambda a, t, m: torch.ormqr(a, t, m, left=False), QR_A, QR_TAU, rand(B, 2, 5, seed=12)),
    _plain("geqrf", torch.geqrf, W),
    _plain("lstsq", lambda a, b: torch.linalg.lstsq(a, b).solution, W, rand(B, 5, 2, seed=13)),
    _grad("solve_triangular", lambda a, m: torch.linalg.solve_triangular(a, m, upper=True), T, M),
    _plain("solve_triangular right", lambda a, m: torch.linalg.solve_triangular(a, m, upper=True, left=False), T, M.mT),
    _plain("triangular_solve", lambda m, a: aten.triangular_solve(m, a), M, T),
    _grad("matrix_exp", torch.linalg.matrix_exp, A / 8),
    _grad("pinv", torch.linalg.pinv, W),
    _plain("pinv tolerances", lambda a, r: torch.linalg.pinv(a, rtol=r), W, torch.full((B,), 1e-3)),
    _grad("cross", lambda a, b: torch.linalg.cross(a, b, dim=1), rand(4, 3, 2), rand(1, 3, 2, seed=1)),
    _grad("matrix_power", lambda a: torch.linalg.matrix_power(a / 8, 3), A),
    _grad("matrix_norm", lambda a: torch.linalg.matrix_norm(a, "nuc"), W),
    _grad("tensorinv", lambda a: torch.linalg.tensorinv(a.reshape(2, 2, 4)), A[0]),
    _grad("renorm", lambda a: torch.renorm(a, 2, 1, 1.0), W),
    _grad("trace", torch.trace, rand(5, 7)),
    _plain("trace int", torch.trace, rand(5, 4, dtype=torch.int32)),
]

COMPLEX = torch.complex(rand(4, 3, 5), rand(4, 3, 5, seed=1))
FFT = [
    _grad("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)), rand(4, 6, 3)),
    _grad("irfft", lambda x: torch.fft.irfft(torch.view_as_complex(x), dim=0), rand(4, 3, 2)),
    _plain("fft2", lambda x: torch.fft.fft2(x, dim=(0, -1)), COMPLEX),
    _plain("fft shifted", lambda x: torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft(x), 1)), COMPLEX),
    _plain("hfft", torch.fft.hfft, COMPLEX),
]

X, Y, FEW = rand(5, 4), rand(5, 4, seed=1), rand(2, 4)
I64, BOOL = torch.int64, torch.bool
NANS = torch.where(X > 0.5, float("nan"), X)
MASK, ROWS = rand(5, 4, dtype=BOOL), torch.tensor([True, False, True, True, False])


def _inplace(name: str, fn: Any, *tensors: torch.Tensor) -> Sample:
    """Writes that no shard of the target refuses."""
    return Sample(name, fn, tensors, inplace=True, pending=())


INDEX = [
    _plain("index_select bools", lambda x, i: x.index_select(0, i), X > 0, ints(5, 7)),
    _plain("gather ints", lambda x, i: x.gather(0, i), rand(5, 4, dtype=I64), ints(5, 3, 2)),
    _plain("index bools", lambda x, i, j: x[i, j], X > 0, ints(5, 6), ints(4, 6)),
    _grad("gather shorter index", lambda x, i: x.gather(1, i), X, ints(4, 3, 6)),
    _plain("take bools", lambda x, i: x.take(i), X > 0, ints(20, 3, 2) - 20),
    _inplace("put_", lambda x, i, v: x.put_(i, v), X, torch.tensor([3, -1, 7]), rand(3)),
    _inplace("put_ adding", lambda x, i, v: x.put_(i, v, accumulate=True), X, ints(20, 6), rand(6)),
    _inplace("scatter_ shorter", lambda x, i, v: x.scatter_(1, i, v), X, torch.tensor([[0, 2], [3, 1]]), rand(2, 2)),
    _inplace("scatter_ number", lambda x, i: x.scatter_(0, i, 2.5), X, ints(5, 3, 2)),
    _inplace("scatter_add_ shorter", lambda x, i, v: x.scatter_add_(0, i, v), X, ints(5, 6, 2), rand(6, 2)),
    Sample(
        "scatter_reduce_ shorter",
        lambda x, i, v: x.scatter_reduce_(1, i, v, "prod"),
        (X, ints(4, 2, 6), rand(2, 6)),
        inplace=True,
        pending=(),
        grads=False,
    ),
    _inplace("index_add_", lambda x, i, v: x.index_add_(0, i, v), X, ints(5, 7), rand(7, 4)),
    _inplace("index_copy_", lambda x, i, v: x.index_copy_(1, i, v), X, torch.tensor([3, 0]), rand(5, 2)),
    _inplace("index_fill_", lambda x, i: x.index_fill_(0, i, 2.5), X, ints(5, 2)),
    _inplace("x[mask] = values", lambda x, m, v: x.index_put_((m,), v), X, MASK, rand(int(MASK.sum()))),
    _inplace("x[rows] = values", lambda x, m, v: x.index_put_((m,), v), X, ROWS, rand(3, 4)),
    _inplace("x[rows] += row", lambda x, m, v: x.index_put_((m,), v, accumulate=True), X, ROWS, rand(1, 4)),
    _inplace("x[:, mask] = values", lambda x, m, v: aten.index_put_(x, [None, m], v), X, X[0] > 0, rand(5, 1)),
    _inplace("x[mask] = one", lambda x, m, v: x.index_put_((m,), v), X, MASK, rand(1)),
    _inplace("masked_scatter_", lambda x, m, v: x.masked_scatter_(m, v), X, MASK, rand(3, 8)),
    _grad("masked_scatter", lambda x, m, v: x.masked_scatter(m, v), X, X[0] > 0, rand(20)),
    _plain("masked_scatter spread", lambda x, m, v: x.masked_scatter(m, v), X[0], MASK, rand(20)),
    _inplace("renorm_", lambda x: x.renorm_(2, 1, 0.5), rand(5, 3, 4)),
    _inplace("renorm_ inf", lambda x: x.renorm_(float("inf"), 0, 0.5), X),
    _inplace("addmv_ few rows", lambda x, a, v: x.addmv_(a, v, beta=0.5), rand(2), rand(2, 3), rand(3)),
    _grad("addmv of one", torch.addmv, rand(1), rand(3, 2), rand(2)),
    _inplace("ldexp_", lambda x, y: x.ldexp_(y.detach().round()), X, Y),
]

SCANS = [
    _grad("cummax", lambda x: torch.cummax(x, 0), X),
    _grad("cummin", lambda x: torch.cummin(x, -1), X),
    _plain("cummax ties", lambda x: (torch.cummax(x, 0), torch.cummin(x, 0)), ints(2, 9, 2)),
    _plain("cummax bools", lambda x: torch.cummax(x, 0), rand(6, 2, dtype=BOOL)),
    _plain("cummax few rows", lambda x: torch.cummax(x, 0), FEW),
    Sample("cummax nan", lambda x: (torch.cummax(x, 0), torch.cummin(x, 1)), (NANS,), grads=False, pending=()),
    _grad("cumprod with zeros", lambda x: torch.cumprod(x, 0), torch.where(X > 1, 0.0, X)),
    _inplace("cumsum_ int", lambda x: x.cumsum_(-1), rand(5, 4, dtype=I64)),
    _inplace("cumprod_", lambda x: x.cumprod_(0), X),
]

POINTWISE = [
    _plain(f"pending {name}", fn, X, Y)
    for name, fn in {
        "or": lambda x, y: ((x > 1).any(0) | (y > 0).any(0), (x > 1).any(0) | (y[0] > 0), (x > 0).all(0) | (y[0] > 0)),
        "and": lambda x, y: ((x > 1).all(0) & (y > 0).all(0), (x > 1).any(0) & (y[0] > 0), (x > 0).all(0) & (y[0] > 0)),
        "xor": lambda x, y: ((x > 1).any(0) ^ (y > 0).any(0), (x > 1).any(0) ^ (y[0] > 0)),
        "not": lambda x, y: (~(x > 1).any(0), (x > 0).all(0).logical_not(), (~(x > 0).all(0)).any()),
        "logical": lambda x, y: ((x > 1).any(0).logical_or((y > 0).all(0)), (x > 1).any(0).logical_and((y > 0).any(0))),
        "bits": lambda x, y: (aten.__or__(x > 0, y > 0), aten.__and__(x > 0, y > 0), aten.__xor__(x > 0, y > 0)),
    }.items()
] + [
    Sample(name, fn, (X, Y), grads=False)
    for name, fn in {
        "erfc": lambda x, y: (torch.erfc(x), torch.special.erfcx(x)),
        "ndtr": lambda x, y: (torch.special.ndtr(x), torch.special.log_ndtr(x)),
        "shrink": lambda x, y: torch.nn.functional.hardshrink(x),
        "logaddexp": lambda x, y: (torch.logaddexp(x, y), torch.logaddexp2(x, y)),
        "special": lambda x, y: (x.sgn(), x.heaviside(y), torch.polygamma(2, x.abs() + 1), x.nan_to_num(), x.ldexp(y)),
        "frexp": lambda x, y: torch.frexp(x),
    }.items()
]

SEQ = torch.tensor([-1.0, -0.5, 0.0, 0.4, 1.0])
OTHER = [
    _plain("histc", lambda x: x.histc(4), X),
    _plain("histc of one number", lambda x: x.histc(4), torch.ones(2)),
    _plain("bincount", torch.bincount, ints(6, 9)),
    _plain("bincount few", lambda x, w: torch.bincount(x, w, 4), ints(3, 2), rand(2)),
    _plain("searchsorted", torch.searchsorted, SEQ, X),
    _plain("searchsorted rows", torch.searchsorted, rand(3, 5).sort().values, rand(3, 4)),
    _plain("searchsorted one", lambda s: torch.searchsorted(s, 0.3, right=True), SEQ),
    _plain(
        "searchsorted sorter",
        lambda s, x, i: torch.searchsorted(s, x, sorter=i),
        SEQ.flip(0),
        X,
        torch.arange(5).flip(0),
    ),
    _plain("bucketize", lambda x, b: torch.bucketize(x, b, out_int32=True), X, SEQ),
    _plain("bucketize one", lambda b: torch.bucketize(0.3, b), SEQ),
    _grad("bilinear", torch.nn.functional.bilinear, rand(3, 2), rand(3, 4), rand(5, 2, 4)),
    _plain("block_diag", lambda x, y: torch.block_diag(x, y, x), X, rand(2, 3)),
    _plain("all true", lambda x: (aten._is_all_true(x), aten._is_any_true(x)), MASK),
    _plain("copies", lambda x: (aten.alias_copy(x), aten.detach_copy(x), aten.lift_fresh_copy(x), aten.lift(x)), X),
    _plain("powsum", lambda x: aten.linalg__powsum(x, 3, [0]), X),
    _plain("euclidean distance", lambda x, y: aten._euclidean_dist(x, y), rand(3, 4), Y),
]

Z = torch.complex(X, Y)
COMPLEX_OPS = [
    _plain(f"complex {name}", fn, Z)
    for name, fn in {
        "sums": lambda z: (z.sum(0), z.mean(1), z.sum(), z.count_nonzero(0)),
        "prod": lambda z: (z.prod(0), z.cumprod(0)),
        "scans": lambda z: (z.cumsum(0), z.cumsum(-1)),
        "parts": lambda z: (z.real * 1, z.imag * 1, z.abs(), z.angle(), z.conj() * 2, z.conj().imag * 1, z.sgn()),
        "views": lambda z: (torch.view_as_real(z), torch.view_as_complex(torch.view_as_real(z) * 2), z.mH @ z),
        "norms": lambda z: (z.norm(), torch.linalg.vector_norm(z, 1, 0), z.std(0), z.var()),
        "reading": lambda z: (z[torch.tensor(2)], z.index_select(0, z[:3].abs().argsort(0)[:, 0]), z.flip(0), z[1:4]),
        "writing": lambda z: (z.masked_fill(z.real > 0, 1j), torch.where(z.real > 0, z, z.conj()), z.tril(), z + 1j),
        "products": lambda z: (torch.kron(z, z[:2]), torch.outer(z[0], z[1]), torch.vdot(z[0], z[1]), z @ z.T),
        "renorm": lambda z: torch.renorm(z, 2, 0, 1.0),
    }.items()
]

SMALL = X.bfloat16()
LOW = [
    Sample(f"bf16 {name}", fn, (SMALL,), grads=False, pending=("max",), rtol=5e-2, atol=5e-2)
    for name, fn in {
        "scans": lambda x: (x.cumsum(0), x.cumprod(0), x.logcumsumexp(0), x.cummax(0)),
        "sums": lambda x: (x.sum(0), x.logsumexp(0), x.std(0), x.norm(), x.nansum(0), x.prod(0)),
        "softmax": lambda x: (x.softmax(0), x.log_softmax(0)),
    }.items()
]

LAYOUTS_ONLY = [*COMPLEX_OPS, *LOW, _grad("logcumsumexp", lambda x: torch.logcumsumexp(x, 0), X)]
"""The gradient of the last holds the least number there is, which parts of pending averages go beyond."""

SAMPLES = [*LINALG, *FFT, *INDEX, *SCANS, *POINTWISE, *OTHER]
