"""What does a redistribution cost the host, once its plan is cached? Microseconds a call, on 1 and 2 mesh axes."""

from __future__ import annotations

from collections.abc import Callable

import side_by_side as bench
import torch


def cases(name: str, axes: int) -> dict[str, Callable[[], object]]:
    """The transitions of one engine on a mesh of 4 ranks, each of a [16, 16] tensor of 4-byte numbers."""
    e = bench.engine(name)
    mesh = e.init_device_mesh("cpu", (4,) if axes == 1 else (2, 2), mesh_dim_names=("dp", "tp")[-axes:])
    s0, s1, whole, pending = e.Shard(0), e.Shard(1), e.Replicate(), e.Partial()
    one = {
        "S(0) to R, all-gather": ([s0], [whole]),
        "R to S(0), a slice": ([whole], [s0]),
        "S(0) to S(1), all-to-all": ([s0], [s1]),
        "P to R, all-reduce": ([pending], [whole]),
        "P to S(0), reduce-scatter": ([pending], [s0]),
    }
    two = {
        "S(0) S(1) to R R": ([s0, s1], [whole, whole]),
        "S(0) R to R S(0)": ([s0, whole], [whole, s0]),
        "S(0) S(0) to S(1) S(1)": ([s0, s0], [s1, s1]),
        "P P to R R": ([pending, pending], [whole, whole]),
        "S(0) P to S(0) S(1)": ([s0, pending], [s0, s1]),
    }
    calls: dict[str, Callable[[], object]] = {}
    for label, (before, after) in (one if axes == 1 else two).items():
        shape = [16, 16]
        for placement in before:
            if placement.is_shard():
                shape[placement.dim] //= mesh.size(0)
        x = e.DTensor.from_local(torch.randn(shape), mesh, before)
        calls[label] = lambda x=x, after=after: x.redistribute(placements=after)  # type: ignore[misc]
    return calls


def main() -> None:
    """Print one table a number of mesh axes."""
    bench.start_fake_world(4)
    for axes in (1, 2):
        tables = {name: cases(name, axes) for name in bench.ENGINES}
        bench.compare(f"{axes} mesh {'axis' if axes == 1 else 'axes'}", tables)


if __name__ == "__main__":
    main()
