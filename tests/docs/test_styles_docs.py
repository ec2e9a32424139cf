"""docs/styles: the tables are what 4 simulated ranks measure, the examples run, and every style has its page.

`make tables` writes the tables anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.laws import ints, rand
from helpers.modules import MLP, Attention, PackedAttention
from helpers.parallel import on_ranks, sent
from torch import nn

from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, parallel
from dtensor.debug import CommDebugMode
from dtensor.dispatch import products
from dtensor.parallel import (
    ColwiseParallel,
    PackedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    parallelize_module,
)
from dtensor.placement import StridedShard

PAGES = Path(__file__).resolve().parents[2] / "docs" / "styles"
START, END = "<!-- measured by tests/docs/test_styles_docs.py -->\n", "<!-- end -->\n"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
R, P = Replicate(), Partial()

Case = tuple[str, Callable[[], nn.Module], Any, int | None]


def linear() -> nn.Module:
    return nn.Linear(16, 32)


def embedding() -> nn.Module:
    return nn.Embedding(32, 16)


def conv() -> nn.Module:
    return nn.Conv1d(8, 8, 3, padding=1)


def move(a: Placement, b: Placement) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=a, desired_input_layouts=b)


def hand(a: Placement, b: Placement) -> PrepareModuleOutput:
    return PrepareModuleOutput(output_layouts=a, desired_output_layouts=b)


PAIR = {"a": ColwiseParallel(), "b": RowwiseParallel()}
CUT_PAIR = {"a": ColwiseParallel(input_layouts=Shard(1)), "b": RowwiseParallel(output_layouts=Shard(1))}

# What stands in the tables: (what is shown, module, plan, the dim on which x = float32[2,8,16] is sharded, or None).
# Lookups take i = int64[2,8]; the rows of a page are measured in this order.
CASES: dict[str, list[Case]] = {
    "colwise": [
        ("Linear, `ColwiseParallel()`", linear, ColwiseParallel(), None),
        ("Linear, `input_layouts=Shard(1)`", linear, ColwiseParallel(input_layouts=Shard(1)), 1),
        ("Linear, `output_layouts=Replicate()`", linear, ColwiseParallel(output_layouts=R), None),
        ("Linear, `output_layouts=Shard(1)`", linear, ColwiseParallel(output_layouts=Shard(1)), None),
        ("Embedding, `ColwiseParallel()`", embedding, ColwiseParallel(), None),
        ("Embedding, `output_layouts=Replicate()`", embedding, ColwiseParallel(output_layouts=R), None),
        ("Conv1d, `ColwiseParallel()`", conv, ColwiseParallel(), None),
        ("q, k, v by columns, o by rows", Attention, {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()}, None),
    ],
    "rowwise": [
        ("Linear, `RowwiseParallel()`", linear, RowwiseParallel(), 2),
        ("Linear, `output_layouts=Shard(1)`", linear, RowwiseParallel(output_layouts=Shard(1)), 2),
        ("Linear, `input_layouts=Replicate()`", linear, RowwiseParallel(input_layouts=R), None),
        ("Linear, `input_layouts=Shard(1)`", linear, RowwiseParallel(input_layouts=Shard(1)), 1),
        ("Embedding, `input_layouts=Replicate()`", embedding, RowwiseParallel(input_layouts=R), None),
        ("Embedding, the same and `output_layouts=Shard(1)`", embedding,
         RowwiseParallel(input_layouts=R, output_layouts=Shard(1)), None),
        ("Conv1d, `RowwiseParallel()`", conv, RowwiseParallel(), 1),
        ("columns, then rows", MLP, PAIR, None),
        ("the same for a sharded sequence", MLP, CUT_PAIR, 1),
    ],
    "packed": [
        ("qkv of 4, 4 and 4 heads, o by rows", lambda: PackedAttention(4, 4, 4),
         {"qkv": PackedColwiseParallel((16, 16, 16), unit=4), "o": RowwiseParallel()}, None),
        ("qkv of 8, 4 and 4 heads, o by rows", lambda: PackedAttention(8, 4, 4),
         {"qkv": PackedColwiseParallel((32, 16, 16), unit=4), "o": RowwiseParallel()}, None),
        ("8 and 8 features, as a DTensor", lambda: nn.Linear(16, 16),
         PackedColwiseParallel((8, 8), use_local_output=False), None),
        ("8, 4 and 4 features, as a DTensor", lambda: nn.Linear(16, 16),
         PackedColwiseParallel((8, 4, 4), use_local_output=False), None),
    ],
    "sequence": [
        ("LayerNorm", lambda: nn.LayerNorm(16), SequenceParallel(), 1),
        ("RMSNorm", lambda: nn.RMSNorm(16), SequenceParallel(), 1),
        ("Dropout", nn.Dropout, SequenceParallel(), 1),
        ("LayerNorm, `use_local_output=True`", lambda: nn.LayerNorm(16), SequenceParallel(use_local_output=True), 1),
    ],
    "prepare_input": [
        ("`Shard(1)` to `Replicate()`", nn.Identity, move(Shard(1), R), 1),
        ("`Replicate()` to `Shard(1)`", nn.Identity, move(R, Shard(1)), None),
        ("`Shard(1)` to `Shard(2)`", nn.Identity, move(Shard(1), Shard(2)), 1),
        ("`Partial()` to `Shard(1)`", nn.Identity, move(P, Shard(1)), None),
    ],
    "prepare_output": [
        ("`Replicate()` to `Shard(1)`", nn.Identity, hand(R, Shard(1)), None),
        ("`Shard(1)` to `Replicate()`", nn.Identity, hand(Shard(1), R), 1),
        ("`Partial()` to `Replicate()`", nn.Identity, hand(P, R), None),
        ("`Partial()` to `Shard(1)`", nn.Identity, hand(P, Shard(1)), None),
    ],
    "prepare_input_output": [
        ("in `Shard(1)` to `Replicate()`, out `Replicate()` to `Shard(1)`", nn.Identity, PrepareModuleInputOutput(
            input_layouts=Shard(1), desired_input_layouts=R, output_layouts=R, desired_output_layouts=Shard(1)), 1),
        ("the same, `use_local_input=True`", nn.Identity, PrepareModuleInputOutput(
            input_layouts=Shard(1), desired_input_layouts=R, use_local_input=True,
            output_layouts=R, desired_output_layouts=Shard(1)), 1),
    ],
    "input_reshard": [
        ("columns, then rows", MLP, PAIR, None),
        ("the same, `input_reshard(net, mesh, 0)`", lambda: Resharded(0), PAIR, None),
        ("the same, `input_reshard(net, mesh, 1)`", lambda: Resharded(1), PAIR, None),
    ],
}  # fmt: skip


class Resharded(MLP):
    """An MLP that is to be resharded along `dim` when it has its plan."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def measured(case: Case, mesh: DeviceMesh) -> str:
    """One line of a table."""
    label, make, plan, cut = case
    with CommDebugMode() as init:
        net = parallelize_module(make(), mesh, plan)
    if isinstance(net, Resharded):
        input_reshard(net, mesh, net.dim)
    shape = (2, 8, 8) if isinstance(net, PackedAttention) else (2, 8, 16)
    x = ints(32, 2, 8) if isinstance(net, nn.Embedding) else rand(*shape)
    x = x if cut is None else x.chunk(4, cut)[mesh.get_local_rank()].contiguous()
    x = x.requires_grad_() if x.is_floating_point() else x
    with CommDebugMode() as forward:
        y = net(x)
    local = y.to_local() if isinstance(y, DTensor) else y
    with CommDebugMode() as backward:
        local.sum().backward()
    out = str(y._spec) if isinstance(y, DTensor) else f"plain {list(y.shape)}"
    grads = ", ".join(dict.fromkeys(_short(p.grad) for p in net.parameters())) or "none"
    cells = (label, list(x.shape), sent(init) or "nothing", _sent(forward), out, _sent(backward), grads)
    return "".join(f"| {c} " for c in cells) + "|\n"


def _short(grad: torch.Tensor | None) -> str:
    assert isinstance(grad, DTensor)
    p = grad.placements[0]
    if isinstance(p, StridedShard):
        return f"S({p.dim}) of {p.split_factor} parts"
    return f"S({p.dim})" if isinstance(p, Shard) else "R" if isinstance(p, Replicate) else "P"


def _sent(mode: CommDebugMode) -> str:
    total = sum(mode.get_comm_bytes().values())
    return f"{sent(mode)} ({total:,} B)" if sent(mode) else "nothing"


def table(page: str) -> str:
    head = (
        "| case | input of a rank | when parallelized | forward | output | backward | gradients of parameters |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    rows = on_ranks(lambda mesh: "".join(measured(case, mesh) for case in CASES[page]))
    return head + str(rows[0])


def with_table(page: str) -> str:
    """The page's text with its table measured anew."""
    text = (PAGES / f"{page}.md").read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table(page)}{END}{after}"


@pytest.mark.parametrize("page", CASES)
def test_tables_are_measured(page: str) -> None:
    """Bytes are those that rank 0 receives."""
    if page == "input_reshard" and not products._ABLE:
        pytest.skip("linear layers run whole from torch 2.13 on, as the table shows them")
    assert START in (PAGES / f"{page}.md").read_text()
    assert with_table(page) == (PAGES / f"{page}.md").read_text()


def examples() -> list[Any]:
    found = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append(pytest.param(match.group(1), id=f"{path.name}:{line}"))
    return found


@pytest.mark.parametrize("code", examples())
def test_examples_run(code: str) -> None:
    """With the inputs of all ranks compared."""
    parallel.set_check_inputs("first")
    try:
        exec(compile(code, "docs/styles", "exec"), {"__name__": "example"})
    finally:
        parallel.set_check_inputs(None)


def test_every_style_has_a_page_that_the_index_names() -> None:
    index = (PAGES / "README.md").read_text()
    pages = {p.name for p in PAGES.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", index))
    names = [n for n in parallel.__all__ if isinstance(getattr(parallel, n), type) or n == "input_reshard"]
    for name in set(names) - {"ParallelStyle"} - {"loss_parallel"}:
        assert f"# {name}\n" in "".join((PAGES / p).read_text() for p in pages), name
    assert issubclass(ColwiseParallel, ParallelStyle)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        (PAGES / f"{name}.md").write_text(with_table(name))
