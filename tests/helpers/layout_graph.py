"""The graph of layouts: every layout of a tensor on its mesh, and every single step between two of them.

The reference that the planner is held against: it knows which steps are legal and what each costs, and nothing of the
planner's reasons, orders and short cuts. Its shortest path is the cheapest plan. The graph grows with the
number of layouts to the power of the axes, so it is for tests, for looking at and for drawing, not for planning.

    >>> graph = layout_graph(spec)                       # f32[16,16,16] on a mesh (2, 4)
    >>> shortest(graph, (Shard(0), Partial()), (Replicate(), Shard(0)))
    [Step(...), Step(...)]
    >>> draw(graph, "layouts.png", src, dst)             # needs matplotlib
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.planner.balanced_reduction import spread
from dtensor.redistribute.planner.layout_space import Facts, Path, Space, is_sharded
from dtensor.redistribute.planner.single_collective import alike, moving_axes
from dtensor.redistribute.step import Layout, Step
from dtensor.spec import Spec

__all__ = ["between", "draw", "layout_graph", "legal_steps", "shortest"]

_REPLICATE = Replicate()


def layout_graph(spec: Spec, placements: Sequence[Placement] = (), model: CostModel | None = None) -> Any:
    """A networkx DiGraph of the layouts of `spec`'s tensor that use `placements` (default: R, P and S of every dim).

    Nodes are layouts. An edge has `step` (the cheapest single step between its layouts), `seconds`, `nbytes` (received
    by the rank that receives most) and `launches`.
    """
    import networkx

    kinds = list(placements) or [_REPLICATE, Partial(), *(Shard(d) for d in range(spec.ndim))]
    space = Space(spec.mesh.shape, spec.shape, spec.dtype.itemsize, model or current_cost_model())
    graph = networkx.DiGraph()
    layouts = [tuple(each) for each in itertools.product(kinds, repeat=spec.mesh.ndim)]
    graph.add_nodes_from(layouts)
    for src, dst in itertools.permutations(layouts, 2):
        for cost, (step,) in legal_steps(space, src, dst):
            nbytes, launches = (step.nbytes, step.launches) if step.is_collective else (0, 0)
            known = graph.get_edge_data(src, dst)
            if known is None or (nbytes, cost) < (known["nbytes"], known["seconds"]):
                graph.add_edge(src, dst, step=step, seconds=cost, nbytes=nbytes, launches=launches)
    return graph


def legal_steps(space: Space, src: Layout, dst: Layout) -> list[Path]:
    """Every single step from `src` to `dst`."""
    pending = tuple(a for a, (p, q) in enumerate(zip(src, dst)) if p is not q and isinstance(p, Partial))
    if any(isinstance(q, Partial) and p is not q for p, q in zip(src, dst)):
        return []
    have, want = space.facts(src), space.facts(dst)
    if pending:
        return _reductions(space, have, want, pending)
    axes, pure = moving_axes(space, have, want)
    if not axes:
        kind = "keep" if alike(space, have, want) else "slice"
        return [space.step(kind, (), have, want)]
    changed = tuple(a for a, (p, q) in enumerate(zip(src, dst)) if p is not q)
    if pure and changed == axes and not any(is_sharded(dst[a]) for a in axes):
        return [space.step("all_gather", axes, have, want)]
    return [space.step("all_to_all", axes, have, want)]


def _reductions(space: Space, src: Facts, dst: Facts, pending: tuple[int, ...]) -> list[Path]:
    """Steps that reduce `pending`: whole, each to its own part, or by the receivers."""
    if any(src.layout[a] is not src.layout[pending[0]] for a in pending):
        return []
    whole = space.put(src, pending, _REPLICATE)
    axes, _ = moving_axes(space, whole, dst)
    over = tuple(sorted({*axes, *pending}))
    steps = [space.step("all_to_all_reduce", over, src, dst)]
    spread_out = spread(space, src, dst, over, pending)
    steps += [] if spread_out is None else [spread_out]
    if whole is dst:
        steps.append(space.step("all_reduce", pending, src, dst))
    elif not axes and all(dst.dim_of[a] >= 0 for a in pending):
        steps.append(space.step("reduce_scatter", pending, src, dst))
    return steps


def between(graph: Any, src: Layout, dst: Layout) -> Any:
    """The part of the graph that a plan may use: an axis that is replicated in `src` and `dst` stays so.

    (Copies could share the work of a reduction and then gather; a plan lets each do its own, in fewer collectives.)
    """
    copies = [a for a, (p, q) in enumerate(zip(src, dst)) if p is q is _REPLICATE]
    return graph.subgraph([n for n in graph if all(n[a] is _REPLICATE for a in copies)])


def shortest(graph: Any, src: Layout, dst: Layout, by: str = "seconds") -> list[Step]:
    """The steps of the path with the least `by`: "seconds", or "nbytes" (then launches, then seconds)."""
    import networkx

    if by == "seconds":
        weight: Any = "seconds"
    else:
        weight = lambda u, v, e: e[by] * 1e6 + e["launches"] + min(e["seconds"], 1.0) / 1e3  # noqa: E731
    path = networkx.shortest_path(between(graph, src, dst), src, dst, weight=weight)
    return [graph.edges[u, v]["step"] for u, v in itertools.pairwise(path)]


def draw(graph: Any, file: str, src: Layout, dst: Layout, by: str = "seconds") -> None:
    """Write a picture of the layouts on the paths from `src` to `dst` of at most two steps, the shortest in red."""
    import matplotlib
    import networkx

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = [src, *(s.dst for s in shortest(graph, src, dst, by))]
    inner = [n for n in graph if n in best or (graph.has_edge(src, n) and graph.has_edge(n, dst))]
    part = graph.subgraph(inner)
    spots = {n: (0.5, math.cos(i) * len(inner)) for i, n in enumerate(inner)}
    spots.update({n: (0.35 + 0.3 * (i % 2), float(i)) for i, n in enumerate(inner)})
    spots[src], spots[dst] = (0.0, len(inner) / 2), (1.0, len(inner) / 2)
    red = set(itertools.pairwise(best))
    text = lambda layout: ",".join(str(p).replace("P(sum)", "P") for p in layout)  # noqa: E731
    figure, axes = pyplot.subplots(figsize=(11, 2 + 0.6 * len(inner)))
    edges = [e for e in part.edges if e in red or e[0] == src or e[1] == dst]
    networkx.draw_networkx(
        part, spots, ax=axes, labels={n: text(n) for n in part}, edgelist=edges, node_color="#dde6f2",
        node_size=1800, font_size=8, edge_color=["red" if e in red else "#bbbbbb" for e in edges],
    )  # fmt: skip
    labels = {e: f"{part.edges[e]['step'].kind}\n{part.edges[e]['nbytes']} B" for e in edges if e in red}
    networkx.draw_networkx_edge_labels(part, spots, ax=axes, edge_labels=labels, font_size=7)
    axes.axis("off")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
