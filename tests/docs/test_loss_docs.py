"""docs/loss.md: its tables are what simulated ranks measure. The page's examples are run with those of the other pages.

`make tables` writes the tables anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import ints, rand
from helpers.parallel import sent

import dtensor
from dtensor import DeviceMesh, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.loss import linear_cross_entropy, loss_parallel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loss.md"
R, S, P = Replicate(), Shard, Partial()
REDUCTIONS = ("none", "sum", "mean")
Layout = Sequence[Placement]


def on_ranks(names: str, f: Callable[[DeviceMesh], str | None]) -> str:
    """What rank 0 of a mesh of 2 ranks an axis says."""
    axes = tuple(names.split(","))

    def run() -> str | None:
        return f(init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes))

    return str(dtensor.simulate(2 ** len(axes))(run)[0])


def shown(layout: Layout) -> str:
    return ", ".join("P" if p == P else str(p) for p in layout)


def traffic(mode: CommDebugMode) -> str:
    total = sum(mode.get_comm_bytes().values())
    return f"{sent(mode)} ({total:,} B)" if sent(mode) else "nothing"


# ------------------------------------------------------------ layouts
# axes of the mesh, shape and layout of the logits, layout of the target
LAYOUTS: list[tuple[str, tuple[int, ...], Layout, Layout]] = [
    ("tp", (8, 12), [S(1)], [R]),
    ("tp", (12,), [S(0)], [R]),
    ("dp,tp", (8, 12), [S(0), S(1)], [S(0), R]),
    ("dp,tp", (8, 12), [R, S(1)], [R, R]),
    ("dp,tp", (8, 12, 4), [S(2), S(1)], [S(1), R]),
    ("dp,tp", (8, 12, 4), [S(0), S(1)], [S(0), R]),
    ("dp,tp", (8, 12), [S(0), S(1)], [R, R]),
    ("tp,dp", (8, 12), [S(1), S(0)], [R, S(0)]),
    ("dp,cp,tp", (8, 12, 4), [S(0), S(2), S(1)], [S(0), S(1), R]),
]


def layouts() -> str:
    text = (
        "| mesh | logits | | target | loss: none | sum | mean | forward | for a mean | backward |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return text + "".join(on_ranks(case[0], lambda mesh, case=case: _layout_row(mesh, *case)) for case in LAYOUTS)


def _layout_row(mesh: DeviceMesh, names: str, shape: tuple[int, ...], of_logits: Layout, of_target: Layout) -> str:
    c = 1 if len(shape) > 1 else 0
    rows = (*shape[:c], *shape[c + 1 :])
    x = distribute_tensor(rand(*shape), mesh, list(of_logits)).requires_grad_()
    t = distribute_tensor(ints(shape[c], *rows), mesh, list(of_target))
    forward, out, back = [], [], []
    for reduction in REDUCTIONS:
        with loss_parallel(), CommDebugMode() as there:
            loss = F.cross_entropy(x, t, reduction=reduction)
        given = distribute_tensor(torch.ones(loss.shape), mesh, loss.placements if loss.ndim else [R] * mesh.ndim)
        with CommDebugMode() as again:
            loss.backward(given)
        assert x.grad is not None and x.grad.placements == x.placements
        forward.append(traffic(there))
        out.append(shown(loss.placements))
        back.append(traffic(again))
    assert forward[0] == forward[1] and len(set(back)) == 1
    more = forward[2].replace(forward[0], "the same")
    cells = [names, list(shape), shown(of_logits), shown(of_target), *out, forward[0], more, back[0]]
    return "| " + " | ".join(map(str, cells)) + " |\n"


# ------------------------------------------------------------ options
OPTIONS: dict[str, dict[str, Any]] = {
    "class indices": {},
    "`ignore_index`": {"ignore_index": 3},
    "class weights": {"weight": torch.arange(1.0, 13.0)},
    "`label_smoothing`": {"label_smoothing": 0.1},
    "class probabilities": {"probabilities": True},
    "probabilities, weights, smoothing": {
        "probabilities": True, "label_smoothing": 0.1, "weight": torch.arange(1.0, 13.0)},
    "bfloat16 logits": {"dtype": torch.bfloat16},
}  # fmt: skip


def options() -> str:
    def f(mesh: DeviceMesh) -> str:
        text = "| call | numbers a row and rank | bytes each | forward | backward |\n|---|---|---|---|---|\n"
        for label, given in OPTIONS.items():
            kw = dict(given)
            dtype, probabilities = kw.pop("dtype", torch.float32), kw.pop("probabilities", False)
            x = distribute_tensor(rand(8, 12).to(dtype), mesh, [S(1)]).requires_grad_()
            t = distribute_tensor(rand(8, 12).softmax(1), mesh, [S(1)]) if probabilities else ints(12, 8)
            with loss_parallel(), CommDebugMode() as there:
                loss = F.cross_entropy(x, t, **kw)
            with CommDebugMode() as again:
                loss.backward()
            numbers = sum(there.get_comm_bytes().values()) // 8 // 4  # 8 rows of the other rank, 4 bytes each
            text += f"| {label} | {numbers} | 4 | {sent(there)} | {traffic(again)} |\n"
        return text

    return on_ranks("tp", f)


# ------------------------------------------------------------ with the linear layer
# axes of the mesh, layouts of hidden states [4, 6, 8], weight [12, 8] and target
LINEAR: list[tuple[str, Layout, Layout, Layout]] = [
    ("tp", [R], [S(0)], [R]),
    ("tp", [S(1)], [S(0)], [R]),
    ("dp", [S(0)], [R], [S(0)]),
    ("dp,tp", [S(0), R], [R, S(0)], [S(0), R]),
    ("dp,tp", [S(0), S(1)], [R, S(0)], [S(0), R]),
    ("dp,tp", [S(0), R], [S(0), S(0)], [S(0), R]),
]


def linear() -> str:
    text = (
        "| mesh | hidden | weight | target | loss: none | mean | forward, mean | backward | gradient of hidden "
        "| of weight |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return text + "".join(on_ranks(case[0], lambda mesh, case=case: _linear_row(mesh, *case)) for case in LINEAR)


def _linear_row(mesh: DeviceMesh, names: str, of_hidden: Layout, of_weight: Layout, of_target: Layout) -> str:
    h = distribute_tensor(rand(4, 6, 8), mesh, list(of_hidden)).requires_grad_()
    w = distribute_tensor(rand(12, 8), mesh, list(of_weight)).requires_grad_()
    t = distribute_tensor(ints(12, 4, 6), mesh, list(of_target))
    none = linear_cross_entropy(h, w, t, reduction="none")
    with CommDebugMode() as there:
        loss = linear_cross_entropy(h, w, t)
    given = distribute_tensor(torch.tensor(1.0), mesh, [R] * mesh.ndim)
    with CommDebugMode() as again:
        loss.backward(given)
    grads = [shown(x.grad.placements) for x in (h, w) if x.grad is not None]
    cells = [
        names, shown(of_hidden), shown(of_weight), shown(of_target), shown(none.placements), shown(loss.placements),
        traffic(there), traffic(again), *grads,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


# ------------------------------------------------------------ the page
TABLES = {"layouts": layouts, "options": options, "linear": linear}


def with_table(text: str, name: str) -> str:
    """The page's text with one table measured anew."""
    start, end = f"<!-- {name}, measured by tests/docs/test_loss_docs.py -->\n", "<!-- end -->\n"
    before, mark, rest = text.partition(start)
    assert mark, f"the page has no table {name}"
    return f"{before}{start}{TABLES[name]()}{end}{rest.partition(end)[2]}"


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_measured(name: str) -> None:
    text = PAGE.read_text()
    assert with_table(text, name) == text, "run `make tables` and read the diff"


def test_the_loss_by_hand_that_the_benchmark_compares_with_is_right() -> None:
    sys.path.append(str(PAGE.parent.parent / "benchmarks"))
    try:
        from loss_parallel import ByHand
    finally:
        sys.path.pop()
    x, t = rand(6, 12), ints(12, 6)
    whole = x.clone().requires_grad_()
    want = F.cross_entropy(whole, t, reduction="none")
    want.mean().backward()

    def f(mesh: DeviceMesh) -> None:
        local = x.chunk(2, 1)[mesh.get_rank()].clone().requires_grad_()
        got = ByHand.apply(local, t)
        got.mean().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(local.grad, whole.grad.chunk(2, 1)[mesh.get_rank()])

    on_ranks("tp", f)


def test_the_documented_layouts_of_torch_are_among_them() -> None:
    rows = {(len(shape), shown(a), shown(b)) for _, shape, a, b in LAYOUTS}
    documented = [
        (2, [S(0), S(1)], [S(0), R]),
        (2, [R, S(1)], [R, R]),
        (3, [S(2), S(1)], [S(1), R]),
        (3, [S(0), S(1)], [S(0), R]),
    ]
    assert {(n, shown(a), shown(b)) for n, a, b in documented} <= rows


if __name__ == "__main__":
    for table in TABLES:
        PAGE.write_text(with_table(PAGE.read_text(), table))
