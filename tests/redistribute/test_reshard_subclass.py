"""Parts that are tensor subclasses with few operations: gathered, sharded and joined, or refused on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh, simulate
from dtensor.errors import LayoutError
from dtensor.placement import StridedShard
from dtensor.spec import Spec

R, S0, S1 = Replicate(), Shard(0), Shard(1)
KNOWN = ("_c10d_functional.all_gather_into_tensor", "_c10d_functional.wait_tensor", "aten.detach", "aten.slice",
         "aten.clone", "aten.alias", "aten.cat", "aten.split", "aten.chunk")  # fmt: skip


class Coded(torch.Tensor):
    """Numbers as 8-bit codes and a scale. It knows what moves rows, and nothing that makes or fills tensors."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Coded:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16, strides=codes.stride())
        made.codes = codes
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: object, stride: object) -> Coded:
        return Coded(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not str(f).startswith(KNOWN):
            raise NotImplementedError(f"Coded has no {f}")
        first = args[0]
        first = [x.codes for x in first] if isinstance(first, (list, tuple)) else first.codes
        out = f(first, *args[1:], **(kwargs or {}))
        return [Coded(t) for t in out] if isinstance(out, (list, tuple)) else Coded(out)


WHOLE = torch.arange(64, dtype=torch.int8).view(8, 8)
LAYOUTS: dict[tuple[int, ...], list[list[Placement]]] = {
    (2,): [[R], [S0], [S1]],
    (2, 2): [[R, R], [S0, R], [R, S0], [S0, S0], [S0, S1], [S1, S0], [S1, R], [S1, S1]],
}


def _codes(spec: Spec) -> torch.Tensor:
    assert spec.mesh.coord is not None
    part = WHOLE
    for d, runs in enumerate(spec.intervals_of(spec.mesh.coord)):
        part = torch.cat([part.narrow(d, start, n) for start, n in runs], d)
    return part.clone()


def _held(x: torch.Tensor) -> Any:
    return x.trigger_wait() if hasattr(x, "trigger_wait") else x


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_between_replicas_and_even_shards(shape: tuple[int, ...]) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", shape)
        for src in LAYOUTS[shape]:
            spec = Spec.make(mesh, tuple(src), (8, 8), (8, 1), torch.bfloat16)
            for dst in LAYOUTS[shape]:
                for again in range(2):
                    x = DTensor.from_local(Coded(_codes(spec)), mesh, src, run_check=False)
                    y = x.redistribute(placements=dst, async_op=bool(again))
                    got, want = _held(y.to_local()), _codes(spec.with_placements(tuple(dst)))
                    assert y.placements == tuple(dst) and type(got) is Coded, (src, dst)
                    assert torch.equal(got.codes, want), (src, dst)
            whole: Any = x.full_tensor()
            assert type(whole) is Coded and torch.equal(whole.codes, WHOLE)

    simulate(4 if len(shape) == 2 else 2)(run)


@pytest.mark.parametrize(
    ("src", "dst", "rows"),
    [
        ([S0], [R], 3), ([R], [S0], 3), ([S0], [S1], 3), ([Partial()], [R], 4),
        ([StridedShard(0, split_factor=2)], [R], 8),
    ],
    ids=str,
)  # fmt: skip
def test_others_are_refused_on_all_ranks(src: list[Placement], dst: list[Placement], rows: int) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        spec = Spec.make(mesh, tuple(src), (rows, 4), (4, 1), torch.bfloat16)
        part = Coded(torch.zeros(spec.local_shape, dtype=torch.int8))
        x = DTensor.from_local(part, mesh, src, run_check=False, shape=(rows, 4), stride=(4, 1))
        for _ in range(2):
            with pytest.raises(LayoutError, match=r"no plain tensors(?s:.)*class Coded\n.*dequantize"):
                x.redistribute(placements=dst)

    simulate(2)(run)
