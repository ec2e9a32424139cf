"""visualize_sharding: draw which ranks hold which part of a tensor of one or two dims."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import product

from dtensor.intervals import Interval
from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["sharding_grid", "visualize_sharding"]

Grid = list[list[str]]


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print a grid of index ranges with the ranks that hold them, on the mesh's first rank only.

    Args:
        dtensor: of at most 2 dims; one without elements prints nothing.
        header: printed above.
        use_rich: draw with colours; needs `rich`. Otherwise `tabulate` draws, or plain text where it is missing.

    Raises RuntimeError for more than 2 dims, TypeError for no DTensor, ValueError for `use_rich` without rich.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"visualize_sharding: expected a DTensor, got {type(dtensor).__name__}\n  fix: print it")
    if dtensor.numel() == 0:
        return
    if dtensor.ndim > 2:
        raise RuntimeError(
            f"visualize_sharding: draws tensors of 1 or 2 dims, got {dtensor.ndim}\n"
            "  fix: draw a slice, or print(dtensor.placements)"
        )
    coord = dtensor.device_mesh.get_coordinate()
    if coord is None or any(coord):
        return
    columns, rows, cells = sharding_grid(dtensor._spec)
    if header:
        print(header)
    if use_rich:
        _print_rich(columns, rows, cells)
    else:
        print(_text(columns, rows, cells))


def sharding_grid(spec: Spec) -> tuple[list[str], list[str], Grid]:
    """(column heads, row heads, cells): the index ranges of both dims, and the ranks that hold each block."""
    coords = list(product(*(range(k) for k in spec.mesh.shape)))
    held = {c: spec.intervals_of(c) for c in coords}
    row_runs = _cut_points([held[c][0] for c in coords]) if spec.ndim == 2 else [(0, 1)]
    col_runs = _cut_points([held[c][-1] if spec.ndim else ((0, 1),) for c in coords])
    ranks = spec.mesh.mesh

    def who(row: Interval, col: Interval) -> str:
        names = []
        for c in coords:
            inside_row = spec.ndim < 2 or _holds(held[c][0], row)
            if inside_row and (spec.ndim == 0 or _holds(held[c][-1], col)):
                names.append(str(int(ranks[c])))
        return f"{spec.mesh.device_type}: {', '.join(names)}" if names else ""

    cells = [[who(r, c) for c in col_runs] for r in row_runs]
    heads = [f"Col {a}-{a + n - 1}" for a, n in col_runs]
    return heads, [f"Row {a}-{a + n - 1}" for a, n in row_runs], cells


def _cut_points(many: Sequence[Sequence[Interval]]) -> list[Interval]:
    """The coarsest runs that every interval is made of."""
    points = sorted({p for runs in many for a, n in runs for p in (a, a + n)})
    return [(a, b - a) for a, b in zip(points, points[1:])]


def _holds(runs: Sequence[Interval], block: Interval) -> bool:
    start, length = block
    return any(a <= start and start + length <= a + n for a, n in runs)


def _text(columns: list[str], rows: list[str], cells: Grid) -> str:
    if importlib.util.find_spec("tabulate") is not None:
        from tabulate import tabulate

        return str(tabulate(cells, headers=columns, showindex=rows))
    lines = [["", *columns], *([head, *cell] for head, cell in zip(rows, cells))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths)).rstrip() for line in lines)


def _colours() -> Iterator[str]:
    while True:
        yield from ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


def _print_rich(columns: list[str], rows: list[str], cells: Grid) -> None:
    if importlib.util.find_spec("rich") is None:
        raise ValueError("visualize_sharding(use_rich=True) needs rich: pip install rich, or use_rich=False")
    from rich.console import Console
    from rich.table import Table

    colour = dict(zip(dict.fromkeys(c for row in cells for c in row), _colours()))
    drawn = Table("", *columns)
    for head, row in zip(rows, cells):
        drawn.add_row(head, *(f"[{colour[c]}]{c}[/]" for c in row))
    Console().print(drawn)
