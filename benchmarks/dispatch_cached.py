"""What does an op cost the host when its plan is cached? Microseconds a call, on 1 and 2 mesh axes."""

from __future__ import annotations

from collections.abc import Callable

import side_by_side as bench
import torch
import torch.nn.functional as F


def cases(name: str, axes: int) -> dict[str, Callable[[], object]]:
    """The ops of one engine on a mesh of 4 ranks."""
    e = bench.engine(name)
    mesh = e.init_device_mesh("cpu", (4,) if axes == 1 else (2, 2), mesh_dim_names=("dp", "tp")[-axes:])
    rest = [e.Replicate()] * (axes - 1)
    rows, whole = [e.Shard(0), *rest], [e.Replicate(), *rest]

    def make(local: torch.Tensor, layout: list[object]) -> torch.Tensor:
        return e.DTensor.from_local(local, mesh, layout)

    torch.manual_seed(0)
    local = torch.randn(8, 8)
    a, b = make(local, rows), make(local.clone(), rows)
    weight, scale = make(torch.randn(8, 8), whole), make(torch.ones(8), whole)
    tokens = make(torch.randint(0, 8, (8,)), rows)
    heads = make(torch.randn(2, 2, 4, 4), rows)
    leaf = make(local.clone(), rows).requires_grad_()
    return {
        "a + b": lambda: a + b,
        "a * 2.0": lambda: a * 2.0,
        "a.add_(b)": lambda: a.add_(b, alpha=0.0),
        "gelu": lambda: F.gelu(a),
        "mm": lambda: torch.mm(a, weight),
        "t": lambda: a.t(),
        "view": lambda: a.view(a.shape[0], 2, 4),
        "chunk": lambda: a.chunk(2, 1),
        "cat": lambda: torch.cat([a, b], 1),
        "sum": lambda: a.sum(1),
        "softmax": lambda: torch.softmax(a, 1),
        "layer_norm": lambda: F.layer_norm(a, (8,), scale, scale),
        "embedding": lambda: F.embedding(tokens, weight),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        "foreach_add, 4 tensors": lambda: torch._foreach_add([a, b, a, b], 1.0),
        "from_local": lambda: make(local, rows),
        "to_local": lambda: a.to_local(),
        "two mm and relu, forward and backward": lambda: torch.autograd.grad(
            (F.relu(leaf @ weight) @ weight).sum(), leaf
        ),
    }


def main() -> None:
    """Print one table a number of mesh axes."""
    bench.start_fake_world(4)
    for axes in (1, 2):
        tables = {name: cases(name, axes) for name in bench.ENGINES}
        bench.compare(f"{axes} mesh {'axis' if axes == 1 else 'axes'}", tables)


if __name__ == "__main__":
    main()
