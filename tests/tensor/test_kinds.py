"""Kinds of faults that wrappers of tensors are prone to, each kind on several layouts, against the plain program.

What they have in common: the value of a single op is right, and a program of several goes wrong. Autograd is not
told of a write; a place in memory is taken for a place in the tensor; a view is read after its base was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import flat, make, rand

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from dtensor.errors import LayoutError
from dtensor.propagation_rules.proof.parts import differs

R = Replicate()
LAYOUTS: tuple[tuple[Placement, ...], ...] = (
    (Shard(0), R), (Shard(1), Shard(0)), (R, Partial()), (StridedShard(0, split_factor=2), Shard(1)),
)  # fmt: skip
Program = Callable[[torch.Tensor], Any]


def like(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`t` for a program on `x`: replicated where `x` is a DTensor."""
    return distribute_tensor(t, x.device_mesh, [R] * x.device_mesh.ndim) if isinstance(x, DTensor) else t


def gradient(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def check(program: Program, value: torch.Tensor) -> None:
    """The results of `program` on a leaf of this value, in all layouts on a mesh of two axes, are the plain ones."""
    want = [t.detach() for t in flat(program(value.clone().requires_grad_()))]

    def on_rank() -> list[list[torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2))
        found = []
        for placements in LAYOUTS:
            results = flat(program(make(value, mesh, placements, True)))
            found.append([t.detach().full_tensor() if isinstance(t, DTensor) else t.detach() for t in results])
        return found

    for per_layout in dtensor.simulate(4)(on_rank):
        for placements, got in zip(LAYOUTS, per_layout, strict=True):
            assert len(got) == len(want)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert not (bad := differs(a, b, 1e-6, 1e-6)), f"{placements}, result {i}: {bad}"


# ------------------------------------------------------------ writes that autograd must learn of
def _list_add(x: torch.Tensor) -> Any:
    base = x * 1
    view = base.view(30)
    torch._foreach_add_([base], [base.detach() * 2 + 1])
    torch._foreach_mul_([base], [x])
    return view, gradient((view * view).sum(), x)


def _list_write_in_view(x: torch.Tensor) -> Any:
    base = x * 1
    row, middle = base[1], base.view(30)[3:17]
    torch._foreach_mul_([middle], 3.0)
    return base, row, gradient((row * row).sum() + base.sum(), x)


def _rows_one_after_the_other(x: torch.Tensor) -> Any:
    base = x * 1
    for i in range(5):
        base[i + 1] = base[i] * 2 + base[i + 1]
    return base, gradient((base * base).sum(), x)


def _transposed_and_flat(x: torch.Tensor) -> Any:
    base = x * 1
    part = base[1:4].t()
    part[1:3] = x[0, :3] * 2
    base.view(-1)[::4] = x[0, 0]
    return base, part, gradient((base * base).sum() + part.sum(), x)


def _exchanged(x: torch.Tensor) -> Any:
    a, b = x * 1, x * 2
    a[0] = b[1]
    b.copy_(a.flip(0))
    a[a > 0.5] = 0.25
    return a, b, gradient((a * b).sum(), x)


def _indices_and_masks(x: torch.Tensor) -> Any:
    base, at = x * 1, like(x, torch.tensor([1, 3, 1]))
    view = base[1:5]
    base[at] = base[at] + 1
    base.index_add_(0, at, base[:3] * 1)
    base[:, 1:3].index_fill_(0, at[:1], 3.0)
    view.masked_fill_(view < -1, 2.0)
    return base, view, gradient((base * base).sum(), x)


WRITES = [
    _list_add, _list_write_in_view, _rows_one_after_the_other, _transposed_and_flat, _exchanged, _indices_and_masks,
]  # fmt: skip


@pytest.mark.parametrize("program", WRITES)
def test_gradients_through_writes(program: Program) -> None:
    check(program, rand(6, 5, dtype=torch.float64))


def test_list_ops_spoil_what_was_saved() -> None:
    def on_rank() -> int:
        x = make(rand(6), init_device_mesh("cpu", (2,)), (Shard(0),), True)
        before = x._version
        with torch.no_grad():
            torch._foreach_add_([x], 1.0)
        y = x.exp()
        torch._foreach_mul_([y], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return x._version - before

    assert dtensor.simulate(2)(on_rank) == [1, 1]


def _conjugates(x: torch.Tensor) -> Any:
    z = torch.complex(x, x.flip(0))
    there = z.conj()
    there[1] = 3 + 2j
    there.imag.mul_(2)
    pairs = torch.view_as_real(z)
    pairs[..., 0] = pairs[..., 1] * 2
    return z, there, pairs, gradient(z.abs().pow(2).sum(), x)


def test_writes_through_lazy_conjugates() -> None:
    check(_conjugates, rand(6, 5, dtype=torch.float64))


# ------------------------------------------------------------ places in memory
DIAGONALS: dict[str, Program] = {
    "rows": lambda x: x[1:].fill_diagonal_(7),
    "columns": lambda x: x[:, 1:].fill_diagonal_(7),
    "transposed": lambda x: x.t()[1:].fill_diagonal_(7),
    "a piece": lambda x: x.narrow(0, 2, 3).fill_diagonal_(7),
    "wrapped": lambda x: x[:, :2].fill_diagonal_(7, wrap=True),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_of_views(name: str) -> None:
    def program(x: torch.Tensor) -> Any:
        base = x * 1
        DIAGONALS[name](base)
        return base, gradient((base * base).sum(), x)

    check(program, rand(6, 5, dtype=torch.float64))


def test_as_strided_starts_where_the_view_starts() -> None:
    def program(x: torch.Tensor) -> Any:
        base = x.detach().clone()
        view = base[1:]
        view.as_strided((4,), (6,)).fill_(7)
        view.as_strided((2,), (1,), view.storage_offset()).fill_(9)
        return base

    check(program, rand(6, 6))


@pytest.mark.parametrize("offset", [0, 2, 6, 7])
def test_offsets_in_the_memory_of_shards_are_refused(offset: int) -> None:
    """The parts are 2, 2, 2 and 0 columns wide: the view starts elsewhere in each memory, or at the same place."""

    def on_rank() -> None:
        view = make(rand(6, 6), init_device_mesh("cpu", (4,)), (Shard(1),))[1:]
        with pytest.raises(LayoutError, match="means another element on every rank"):
            view.as_strided((2,), (1,), offset)

    dtensor.simulate(4)(on_rank)


# ------------------------------------------------------------ nothing there
def test_undefined_gradients() -> None:
    def on_rank() -> list[Any]:
        mesh = init_device_mesh("cpu", (3,))
        leaves = [make(rand(5, 3), mesh, (p,), True) for p in (R, Shard(0), Shard(1), Partial())]
        for x in leaves:
            torch.linalg.vector_norm(x, 0, 0).sum().backward()
        return [x.grad for x in leaves]

    assert dtensor.simulate(3)(on_rank) == [[None] * 4] * 3


@pytest.mark.parametrize("shape", [(1, 4), (1, 1), (5, 1)])
def test_quantiles_of_single_rows(shape: tuple[int, ...]) -> None:
    """The interpolation weights are plain tensors of torch's own, here of one repeated element."""
    check(lambda x: torch.quantile(x, 0.3, -1), rand(*shape))


# ------------------------------------------------------------ the order in memory decides what an op gives
MATRICES: dict[str, Program] = {
    "contiguous": lambda x: x * 1,
    "transposed": lambda x: (x * 1).mT,
    "expanded": lambda x: (x * 1)[0].expand(3, 4, 4),
    "of another op": lambda x: torch.linalg.svd(x)[2].mT @ x.mT.contiguous(),
}


@pytest.mark.parametrize("name", MATRICES)
def test_factors_of_the_transposed_matrix(name: str) -> None:
    """Torch factors the transposed matrix where the matrix is contiguous, and tells so in backward by the same look."""

    def program(x: torch.Tensor) -> Any:
        a = MATRICES[name](x)
        right = torch.ones_like(a[..., :1])
        found = torch.linalg.det(a), torch.linalg.slogdet(a)[1], torch.linalg.solve(a, right)
        solved, _ = torch.linalg.solve_ex(a, right, check_errors=True)
        return *found, *(gradient(t.sin().sum(), x) for t in (*found, solved))

    check(program, rand(3, 4, 4, dtype=torch.float64) + 3 * torch.eye(4, dtype=torch.float64))


def test_determinants_twice_differentiated() -> None:
    def program(x: torch.Tensor) -> Any:
        once = torch.autograd.grad(torch.linalg.det(x).sin(), x, create_graph=True)[0]
        return once, gradient(once.sin().sum(), x)

    check(program, rand(4, 4, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64))


def test_sums_with_zeros_of_a_second_backward() -> None:
    def program(x: torch.Tensor) -> Any:
        once = torch.autograd.grad((x.abs() ** 1.5).pow(2).sum(), x, create_graph=True)[0]
        return once, gradient(once.sum(), x)

    check(program, rand(6, 5, dtype=torch.float64))


ELSEWHERE_IN_MEMORY: dict[str, Program] = {
    "svd": lambda x: torch.linalg.svd(x)[2].abs(),
    "rfft2": lambda x: torch.fft.rfft2(x),
    "rfftn": lambda x: torch.fft.rfftn(x[None].expand(2, 6, 6)),
}


@pytest.mark.parametrize("name", ELSEWHERE_IN_MEMORY)
def test_results_lie_in_memory_as_on_this_device(name: str) -> None:
    """Whether `reshape` is a view or a copy follows from the strides, which torch's shape functions tell per device."""
    if name == "rfftn" and torch.__version__ < "2.12":
        pytest.skip("the shape function of torch 2.11 gives other strides than its kernel")

    def program(x: torch.Tensor) -> Any:
        y = ELSEWHERE_IN_MEMORY[name](x.detach())
        strides = [torch.tensor(s) for s in y.stride()]
        y.reshape(-1).mul_(2)
        y.mT.reshape(-1).add_(1)
        return y, *strides

    check(program, rand(6, 6, dtype=torch.float64))


def test_views_that_moved_lie_in_memory_as_their_strides_say() -> None:
    """A write through a reshaped transpose arrives in what was computed from windows that had to move."""

    def program(x: torch.Tensor) -> torch.Tensor:
        z = torch.stft(x.flatten(), 8, return_complex=True, window=like(x, torch.ones(8))) * 1
        z.mT.reshape(-1).add_(1)
        return z

    def on_rank() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        layouts = ([Shard(1), Partial("max")], [R, Partial("max")], [Shard(0), Shard(1)], [Shard(1), R])
        return [program(make(value, mesh, layout)).full_tensor() for layout in layouts]

    value = rand(6, 6)
    for results in dtensor.simulate(4)(on_rank):
        for got in results:
            torch.testing.assert_close(got, program(value))


def test_powers_of_bools_in_place() -> None:
    """torch's shape function refuses what its op allows."""

    def on_rank() -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.tensor([True, False, True, True, False]), mesh, [Shard(0), R])
        torch._foreach_pow_([x.pow_(True)], True)
        return [bool(b) for b in x.full_tensor()]

    assert dtensor.simulate(4)(on_rank)[0] == [True, False, True, True, False]
