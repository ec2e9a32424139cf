"""From one mesh to another: the same ranks in another shape, a sub-mesh and its parent, meshes that share no rank.

    mesh (2, 4) -> mesh (8,)            the same ranks: each may hold what it wants already
    mesh["tp"]  -> mesh ("dp", "tp")    a slice is one of a kind; its tensor is taken to be the same on all of them
    ranks 0..3  -> ranks 4..7           everything moves

A slice of a mesh stands for the whole mesh, replicated along the axes that it leaves out. If then both meshes have the
same axes, this is a redistribution on one mesh. Otherwise what is pending is reduced on the first mesh, scattered
as far as possible, and one all-to-all over the ranks of both brings every element from one of the ranks that
hold it: from the rank itself where it does, else copies take turns. Where every rank has all, nothing is sent.

All ranks of both meshes must take part; a rank of neither has nothing to do. As everywhere, what is done follows from
the two specs alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dtensor.comm.world import kept
from dtensor.errors import LayoutError, MeshError, explain_error
from dtensor.intervals import Region, common, region_shape, region_size
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.layout import Axis, coalesce
from dtensor.placement import Partial, Replicate
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.executor.copies import Place
from dtensor.redistribute.executor.run import run_reshard
from dtensor.redistribute.executor.steps import exchange
from dtensor.redistribute.geometry import Coord, Parts, holdings
from dtensor.redistribute.plan import ReshardPlan, check_one_tensor, plan_reshard
from dtensor.redistribute.planner.candidates import scattered_to
from dtensor.redistribute.planner.layout_space import Space, is_sharded
from dtensor.redistribute.step import bytes_text
from dtensor.spec import Spec

__all__ = ["MeshPlan", "plan_between", "redistribute_between"]

_REPLICATE = Replicate()
_LOOK = 4096
"""Up to so many ranks are looked at to see whether all have what they want."""


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlan:
    """How to bring a tensor from the mesh and layout of `src` to those of `dst`; equal on all ranks.

    Attributes:
        src, dst: specs of one tensor, on two meshes.
        first: the steps on one mesh: all there is, or what comes before the exchange.
        goal: the layout on the other side of the exchange; None where there is none to come.
        exchange: False where every rank has what it wants after `first`.
    """

    src: Spec
    dst: Spec
    first: ReshardPlan
    goal: Spec | None
    exchange: bool
    bound: list[Callable[[torch.Tensor, bool], torch.Tensor]] = field(default_factory=list, repr=False)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kinds of the collectives, in order."""
        return self.first.collectives + (("all_to_all",) if self.exchange else ())

    def __str__(self) -> str:
        lines = [f"{self.src} on {self.src.mesh!r} -> {self.dst} on {self.dst.mesh!r}"]
        names = [self.first.src.mesh.axis_name(a) for a in range(self.first.src.mesh.ndim)]
        lines += [f"  {i}. {step.describe(names)}" for i, step in enumerate(self.first.steps, 1)]
        if self.goal is not None:
            what = "slice: every rank has what it wants"
            if self.exchange:
                lacking = bytes_text(_lacking(self.first.dst, self.goal))
                what = f"all_to_all over the ranks of both meshes, receives {lacking}"
            lines.append(f"  {len(self.first.steps) + 1}. {what}")
        return "\n".join(lines)


def redistribute_between(local: torch.Tensor, src: Spec, dst: Spec, *, async_op: bool = False) -> torch.Tensor:
    """This rank's part of `dst` from `local`, its part of `src`, where the meshes differ.

    All ranks of both meshes must call it. Raises MeshError where the devices differ or where a slice does not
    say which mesh it stands for, LayoutError where `dst` is pending.
    """
    if not src.shape:  # a number travels as a tensor of one element
        src, dst = (s.with_meta((1,), (1,), s.dtype) for s in (src, dst))
        got = redistribute_between(local.reshape(1), src, dst)
        return got.new_zeros(()) if dst.mesh.coord is None else got.reshape(())
    plan = plan_between(src, dst)
    if not plan.bound:
        plan.bound.append(_bind(plan))
    return plan.bound[0](local, async_op)


def plan_between(src: Spec, dst: Spec) -> MeshPlan:
    """The plan from `src` to `dst`, specs of one tensor on two meshes. Cached."""
    return _plan(src, dst, current_cost_model())


@kept
@lru_cache(maxsize=1024)
def _plan(src: Spec, dst: Spec, model: CostModel) -> MeshPlan:
    _check(src, dst)
    have, want = _widened(src), _widened(dst)
    same = _on_axes_of(have, want.mesh)
    if same is not None:
        return MeshPlan(src, dst, plan_reshard(same, want), None, False)
    if want.has_partial():
        raise LayoutError(
            explain_error(
                f"redistribute {src} -> {dst}",
                f"{list(dst.placements)} on another mesh",
                "a pending reduction cannot be asked for",
                "use Replicate() or Shard(dim)",
            )
        )
    pending = tuple(a for a, p in enumerate(have.placements) if isinstance(p, Partial))
    space = Space(have.mesh.shape, have.shape, have.dtype.itemsize, model)
    here = space.facts(have.placements)
    middle = (scattered_to(space, here, None, pending) if pending else None) or space.put(here, pending, _REPLICATE)
    first = plan_reshard(have, have.with_placements(middle.layout))
    return MeshPlan(src, dst, first, want, not _settled(first.dst, want))


def _check(src: Spec, dst: Spec) -> None:
    if src.mesh.device_type != dst.mesh.device_type:
        raise MeshError(
            explain_error(
                f"redistribute {src} -> {dst}",
                f"a {src.mesh.device_type} mesh and a {dst.mesh.device_type} mesh",
                "both meshes must be of one kind of device",
                "make the other mesh of the same device type, move the result afterwards",
            )
        )
    check_one_tensor(src, dst, "the same shape and dtype on both meshes")


# ------------------------------------------------------------ slices
def _widened(spec: Spec) -> Spec:
    """`spec` on the whole mesh that its mesh is a slice of: replicated along the axes that the slice leaves out."""
    mesh = spec.mesh
    rest = _left_out(mesh._axes, mesh._map.size)
    if not rest:
        return spec
    wide = mesh._derive((*mesh._axes, *rest), None)
    return Spec.make(wide, spec.placements + (_REPLICATE,) * len(rest), spec.shape, spec.stride, spec.dtype)


def _left_out(axes: Sequence[Axis], count: int) -> list[Axis]:
    """The axes over `count` positions that `axes` leave out."""
    rest: list[Axis] = []
    at = 1
    for size, stride in sorted((pair for axis in axes for pair in axis if pair[0] > 1), key=lambda pair: pair[1]):
        if stride > at:
            rest.append(((stride // at, at),))
        at = stride * size
    if count > at:
        rest.append(((count // at, at),))
    return rest


def _on_axes_of(spec: Spec, mesh: DeviceMesh) -> Spec | None:
    """`spec` on `mesh`, where that has the same axes over the same ranks, perhaps in another order; else None."""
    if spec.mesh._key != mesh._key:
        return None
    long = lambda m: [coalesce(axis) for axis, k in zip(m._axes, m.shape) if k > 1]  # noqa: E731
    own, others = long(spec.mesh), long(mesh)
    if sorted(own) != sorted(others):
        return None
    placed = dict(zip(own, [p for p, k in zip(spec.placements, spec.mesh.shape) if k > 1]))
    cut = [axis for axis in own if is_sharded(placed[axis])]
    if [axis for axis in others if axis in cut] != cut:
        return None  # splits of one dim would change their order
    placements = tuple(placed[coalesce(axis)] if k > 1 else _REPLICATE for axis, k in zip(mesh._axes, mesh.shape))
    return Spec.make(mesh, placements, spec.shape, spec.stride, spec.dtype)


# ------------------------------------------------------------ who has what
def _coords(mesh: DeviceMesh) -> Iterator[tuple[int, Coord]]:
    """Every global rank of a mesh and its coord."""
    return zip(mesh.ranks.reshape(-1).tolist(), itertools.product(*map(range, mesh.shape)))


def _settled(have: Spec, want: Spec) -> bool:
    """True where every rank of `want` holds in `have` all that it wants."""
    if math.prod(want.mesh.shape) > _LOOK:
        return False
    held = dict(_coords(have.mesh))
    for rank, coord in _coords(want.mesh):
        wanted = holdings(want, want.placements, coord)
        if not region_size(wanted):
            continue
        if rank not in held:
            return False
        if region_size(common(holdings(have, have.placements, held[rank]), wanted)[1]) != region_size(wanted):
            return False
    return True


def _lacking(have: Spec, want: Spec) -> int:
    """Bytes of what the rank of `want` that lacks most does not hold in `have`; of the first ranks on large meshes."""
    held = dict(_coords(have.mesh))
    most = 0
    for rank, coord in itertools.islice(_coords(want.mesh), _LOOK):
        wanted = holdings(want, want.placements, coord)
        own = region_size(common(holdings(have, have.placements, held[rank]), wanted)[1]) if rank in held else 0
        most = max(most, region_size(wanted) - own)
    return most * want.dtype.itemsize


class _Sources:
    """From which rank of `have` the rank at position `i` of the union takes the shard at given coords."""

    def __init__(self, have: Spec) -> None:
        mesh = have.mesh
        self.axes = [a for a, p in enumerate(have.placements) if is_sharded(p)]
        self.copies = [a for a in range(mesh.ndim) if a not in self.axes]
        self.shape, self.grid = mesh.shape, mesh.ranks
        self.coord = dict(_coords(mesh))

    def shard_of(self, rank: int) -> Coord | None:
        """Which shard a rank holds; None outside the mesh."""
        coord = self.coord.get(rank)
        return None if coord is None else tuple(coord[a] for a in self.axes)

    def shards(self) -> Iterator[Coord]:
        """All shards."""
        return itertools.product(*(range(self.shape[a]) for a in self.axes))

    def source(self, cut: Coord, position: int, rank: int) -> int:
        """Who sends the shard at `split` to `rank`, the `position`-th of all ranks."""
        if self.shard_of(rank) == cut:
            return rank
        at, coord = position, [0] * len(self.shape)
        for a, c in zip(self.axes, cut):
            coord[a] = c
        for a in reversed(self.copies):
            at, coord[a] = divmod(at, self.shape[a])
        return int(self.grid[tuple(coord)])

    def at(self, cut: Coord) -> Coord:
        """A coord that holds the shard at `split`."""
        coord = [0] * len(self.shape)
        for a, c in zip(self.axes, cut):
            coord[a] = c
        return tuple(coord)


# ------------------------------------------------------------ carrying out
def _bind(plan: MeshPlan) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    first, goal = plan.first, plan.goal
    if goal is None:
        return lambda x, async_op: run_reshard(first, x, async_op=async_op)
    move = _exchange(first.dst, goal) if plan.exchange else _keep(first.dst, goal)
    if first.src.mesh.coord is None:
        return move
    return lambda x, async_op: move(run_reshard(first, x), async_op)


def _keep(have: Spec, want: Spec) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """Every rank has what it wants: it takes that."""
    own, coord = have.mesh.coord, want.mesh.coord
    if own is None or coord is None:
        outside = want.local_shape
        return lambda x, _: x.new_zeros(outside)
    held, wanted = holdings(have, have.placements, own), holdings(want, want.placements, coord)
    if held == wanted:
        return lambda x, _: x
    if not region_size(wanted):
        shape = region_shape(wanted)
        return lambda x, _: x.new_empty(shape)
    place = Place(common(held, wanted)[0])
    return lambda x, _: place.get(x).clone(memory_format=torch.contiguous_format)


def _exchange(have: Spec, want: Spec) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """One all-to-all over the ranks of both meshes; a rank's own part does not go through it."""
    sources, wanting = _Sources(have), dict(_coords(want.mesh))
    ranks = sorted({*sources.coord, *wanting})
    me = have.mesh.get_rank()
    out_shape = want.local_shape
    if me not in ranks:
        return lambda x, _: x.new_zeros(out_shape)
    comm = DeviceMesh(have.mesh.device_type, ranks).comm()
    nothing: Region = tuple(() for _ in have.shape)
    own = sources.shard_of(me)
    held = holdings(have, have.placements, sources.coord[me]) if own is not None else nothing
    out = [nothing] * len(ranks)
    for i, rank in enumerate(ranks):
        if own is not None and rank in wanting and sources.source(own, i, rank) == me:
            part = common(held, holdings(want, want.placements, wanting[rank]))[0]
            out[i] = part if region_size(part) else nothing
    into = [nothing] * len(ranks)
    wanted = nothing
    if me in wanting:
        wanted = holdings(want, want.placements, wanting[me])
        for cut in sources.shards():
            sender = ranks.index(sources.source(cut, ranks.index(me), me))
            part = common(holdings(have, have.placements, sources.at(cut)), wanted)[1]
            if region_size(part):
                into[sender] = part
    shape = region_shape(held)
    move = exchange(
        comm, Parts(shape, len(ranks), lambda: out), Parts(region_shape(wanted), len(ranks), lambda: into),
        ranks.index(me),
    )  # fmt: skip

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        got = move(x if own is not None else x.new_empty(shape), async_op and me in wanting)
        return got if me in wanting else got.new_zeros(out_shape)

    return run
