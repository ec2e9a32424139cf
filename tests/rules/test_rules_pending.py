"""Every kind of pending reduction: it passes through an op, or is written to, only where it holds what comes out."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import all_samples, check_kinds, forms, make, rand, recorded

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.experimental import local_map
from dtensor.rules.registry import override
from propagation_rules.pointwise import pointwise
from propagation_rules.proof.parts import kinds_of
from propagation_rules.proof.recorded import RecordedCall

R = Replicate()
UNSTEADY = re.compile(
    r"aten\.(eq|ne|view\.dtype|linalg_eig"  # parts that add up to a number within rounding are not equal to it
    r"|_ctc_loss\.out|binary_cross_entropy\.out|_embedding_bag\.out"  # torch's own results differ from call to call
    r"|.*bfloat16)"
)


def test_ops_and_their_forms_that_write() -> None:
    """All registered rules; in place, with `out=`, and on lists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = recorded(all_samples())
        every = [c for one in calls for c in (one, *forms(one)) if not UNSTEADY.match(str(c))]
        out = [c for c in every if "out" in c.op._overloadname]  # which all go the same way
        report = check_kinds([c for c in every if c not in out] + out[::5], (2,))
    report.must_hold()
    assert report.right > 1500 and len(report.refused) < 20, (report.right, report.refused)


aten = torch.ops.aten
BITS: list[tuple[Any, ...]] = [
    (aten.all.dim, 0), (aten.any.dim, 0), (aten.logical_not.default,), (aten.bitwise_not.default,),
    *((op, rand(4, 3, seed=2, dtype=torch.int64)) for op in (
        aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor,
    )),
]  # fmt: skip


def test_bits_and_truth_of_numbers() -> None:
    """1 and 2 are both true, and have no bit in common."""
    calls = []
    for (op, *rest), dtype in itertools.product(BITS, (torch.int64, torch.uint8, torch.bool)):
        args = [t.to(dtype) if isinstance(t, torch.Tensor) else t for t in (rand(4, 3, dtype=torch.int64), *rest)]
        calls.append(RecordedCall(op, tuple(args), {}))
    check_kinds([c for one in calls for c in (one, *forms(one))], (3,)).must_hold()


@pytest.mark.parametrize("claim", ["max:0", "any:0", "sum:0"])
def test_the_law_finds_a_wrong_claim(claim: str) -> None:
    call = RecordedCall(aten.abs.default, (rand(4, 3),), {})
    with override("aten.abs", pointwise(claim)):
        report = check_kinds([call, *forms(call)], (2,))
    assert report.wrong, claim


# ------------------------------------------------------------ what a kind holds
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "stack": lambda n, r: torch.stack([n, r]),
    "cat": lambda n, r: torch.cat([r, n]),
    "where": lambda n, r: torch.where(r < 0, r, n),
    "index_copy": lambda n, r: n.index_copy(0, (r[:1] * 0).long(), r[:1]),
    "neg_": lambda n, r: n.neg_(),
    "copy_": lambda n, r: n.copy_(r),
    "lists": lambda n, r: (torch._foreach_copy_([n], [r]), n)[1],
    "out=": lambda n, r: torch.mul(r, 1, out=n),
    "a part": lambda n, r: (n[0].copy_(r[1]), n)[1],
    "an alias": lambda n, r: (n.detach().copy_(r), n)[1],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_pending_tensor_holds_every_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """To the last bit: negative ones, and those whose square, or whose multiple, the dtype does not hold."""
    ends = {torch.float16: 3e4, torch.int8: 100, torch.float64: 1e100}.get(dtype, 1e30)
    numbers = [-1.5, 2.0, ends, -ends] if dtype.is_floating_point else [-2, 3, ends, -ends]

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", shape)
        row, wrong = torch.tensor(numbers).to(dtype), []
        for kind in (*kinds_of(dtype), *(("avg",) if dtype == torch.int8 and mesh.ndim == 1 else ())):
            if (kind, dtype) in (("avg", torch.float16), ("norm3", torch.float64)):
                continue  # out of range
            placed = [Partial(kind)] * mesh.ndim
            for name, write in WRITES.items():
                start = torch.arange(1, 5).to(dtype)
                want = write(start.clone(), row)
                got = write(make(start, mesh, placed), distribute_tensor(row, mesh, [R] * mesh.ndim)).full_tensor()
                far = want.abs() > 1e2
                near = 0.2 if dtype == torch.bfloat16 else 1e-2  # parts are rounded, what is written is not
                if not torch.allclose(got, want, rtol=near) or not torch.equal(got[far], want[far]):
                    wrong.append(f"{name} of {kind}: {got.tolist()}, not {want.tolist()}")
        return wrong

    assert not (wrong := dtensor.simulate(4)(run)[0]), "\n".join(wrong)


def test_norms_of_low_precision_do_not_overflow() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x = torch.full((8, 3), 200.0, dtype=torch.float16)
        for p in (1, 2, 3):
            got = distribute_tensor(x, mesh, [Shard(0)]).norm(p, 0)
            assert got.placements == (Partial(f"norm{p}"),)
            torch.testing.assert_close(got.full_tensor(), x.norm(p, 0))

    dtensor.simulate(4)(run)


# ------------------------------------------------------------ gradients of parts
REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0), "norm2": lambda t: t.norm(dim=0), "norm3": lambda t: t.norm(3, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("layout", ["P", "PP", "PR", "SP", "PS"])
def test_the_gradient_of_a_part_is_that_of_the_reduction(kind: str, layout: str) -> None:
    """Against the reduction of all parts in plain torch, differentiated."""
    shape = (4,) if len(layout) == 1 else (2, 2)
    placed: list[Placement] = [{"P": Partial(kind), "R": R, "S": Shard(1)}[c] for c in layout]

    def held(coord: tuple[int, ...]) -> torch.Tensor:
        return rand(3, 4, seed=sum(c * 3**a for a, c in enumerate(coord) if placed[a] != R)).abs() + 0.1

    def run() -> None:
        mesh = init_device_mesh("cpu", shape)
        me = mesh.coord
        coords = [c for c in itertools.product(*map(range, shape))
                  if all(layout[a] == "P" or c[a] == me[a] for a in range(len(shape)))]  # fmt: skip
        parts = [held(c).requires_grad_() for c in coords]
        local = held(me).requires_grad_()
        for grads in (None, [R if p == Partial(kind) else p for p in placed]):
            local.grad = parts[coords.index(me)].grad = None
            y = DTensor.from_local(local, mesh, placed, grad_placements=grads)
            y.pow(2).sum().backward()
            REDUCED[kind](torch.stack(parts)).pow(2).sum().backward()
            torch.testing.assert_close(local.grad, parts[coords.index(me)].grad)

    dtensor.simulate(math.prod(shape))(run)


def test_a_part_and_back_is_the_part() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for kind in ("sum", "avg"):
            local = rand(3).requires_grad_()
            DTensor.from_local(local, mesh, [Partial(kind)] * 2).to_local().mul(3).sum().backward()
            assert local.grad.tolist() == [3.0] * 3

    dtensor.simulate(4)(run)


def test_a_second_derivative_of_an_extreme_is_refused() -> None:
    def run() -> None:
        y = DTensor.from_local(rand(3).requires_grad_(), init_device_mesh("cpu", (2,)), [Partial("max")])
        with pytest.raises(RuntimeError, match="second derivative through from_local of .*max.*\n  fix:"):
            torch.autograd.grad(y.pow(2).sum(), y.grad_fn.next_functions[0][0].variable, create_graph=True)

    dtensor.simulate(2)(run)


def test_averages_through_local_map() -> None:
    """An average of means; what goes in as an average comes out as one, or as a sum of as many."""
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        plain = torch.arange(16.0).reshape(8, 2).requires_grad_()
        plain.mean(0).pow(2).sum().backward()
        x = distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
        local_map(lambda t: t.mean(0), out_placements=[Partial("avg")])(x).pow(2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        for out, times in (("avg", 2), ("sum", 8)):
            x = make(rand(3), mesh, [Partial("avg")], requires_grad=True)
            local_map(lambda t: 2 * t, out_placements=[Partial(out)])(x).pow(2).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), 2 * times**2 * rand(3))

    dtensor.simulate(4)(run)
