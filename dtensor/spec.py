"""Spec: everything an operation needs to know about a distributed tensor, as one interned value.

    Spec = mesh + placements + global shape, stride, dtype

`Spec.make` returns the one object of a value, so that equality is identity and a tuple of specs is a
cheap cache key. The geometry of a shard is computed dim by dim as *intervals* of the global dim:

    dim of 10 over an axis of 4         position 0 1 2 3 holds [0,3) [3,6) [6,9) [9,10)
    dim of 8, split factor 2, axis of 2  position 0 holds [0,2)+[4,6), position 1 [2,4)+[6,8)

A local shard is the product of its dims' intervals, in order. Placements on the same dim compose left to
right: each shards what the ones before it left.

Example:
    >>> spec = Spec.make(mesh, (Shard(0), Partial()), (8, 16), (16, 1), torch.float32)   # mesh ("dp", "tp")
    >>> str(spec)
    'f32[8@dp,16]{P:tp}'
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtensor.errors import LayoutError, expect, explain_error, short
from dtensor.intervals import Interval, Split, dim_intervals, local_sizes, share_of
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard, as_placement

__all__ = [
    "Distributed", "LateSpec", "Spec", "TensorMeta", "contiguous_stride", "dense", "in_order",
    "is_even", "may_be_empty", "normalize_placements", "stride_like",
]  # fmt: skip

SHORT_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
WEIGHTED = "weighted avg"
"""The reduction of results that wait for their collective (`dtensor.rules.deferred`)."""
_LONG = {short: dtype for dtype, short in SHORT_DTYPES.items()}


class TensorMeta(NamedTuple):
    """Global shape, stride and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`, as torch gives them (empty dims count as 1)."""
    stride, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)


def normalize_placements(
    placements: Iterable[object] | None, mesh: DeviceMesh, ndim: int, call: str
) -> tuple[Placement, ...]:
    """Placements as a checked tuple: one per mesh axis, dims in range and not negative, one kind of Partial.

    None means replicated on every axis. Raises ValueError (count, reductions), IndexError (dim) or
    TypeError (no placement), each naming `call`.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if isinstance(placements, (str, bytes)) or not isinstance(placements, Iterable):
        raise TypeError(
            f"{call}: placements must be a sequence of placements, one for each mesh axis\n  got: {short(placements)}\n"
            f"  fix: placements={[Replicate()] * mesh.ndim}"
        )
    out: list[Placement] = []
    for given in placements:
        p = as_placement(given)
        if isinstance(p, (Shard, StridedShard)):
            d = p.dim + ndim if p.dim < 0 else p.dim
            if not 0 <= d < ndim:
                raise ShardDimError(
                    f"{call}: {p!r} names dim {p.dim} of a tensor of {ndim} dims; use a dim in [{-ndim}, {ndim - 1}]"
                    if ndim
                    else f"{call}: {p!r} on a tensor of 0 dims, which has nothing to shard; use Replicate()"
                )
            if d != p.dim:
                p = Shard(d) if isinstance(p, Shard) else StridedShard(d, split_factor=p.split_factor)
        out.append(p)
    if len(out) != mesh.ndim:
        raise ValueError(
            f"{call}: {len(out)} placements for a mesh of {mesh.ndim} axes, got {short(out)}\n"
            "  fix: give one placement per mesh axis, e.g. Replicate() for the axes that do nothing"
        )
    check_partials(out, call)
    return tuple(out)


class ShardDimError(LayoutError, IndexError, ValueError):
    """A shard dim that the tensor does not have."""


def check_partials(placements: Sequence[Placement], call: str) -> None:
    """One kind of pending reduction per tensor (sum and avg are one kind); ValueError otherwise."""
    kinds = {"sum" if p.reduce_op == "avg" else p.reduce_op for p in placements if isinstance(p, Partial)}
    if WEIGHTED in kinds:
        raise ValueError(
            f"{call}: the weights of Partial({WEIGHTED}) are known to the one result that has it, no other tensor can "
            "be laid out like that; use Replicate()"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"{call}: a tensor can be pending in one kind of reduction only, got {list(placements)}; "
            "redistribute one of the axes to Replicate() first"
        )


def _bad_spec(*given: object) -> TypeError:
    return TypeError(
        explain_error(
            "Spec.make(mesh, placements, shape, stride, dtype)", ", ".join(short(x, 80) for x in given),
            "it takes a DeviceMesh, a tuple with one placement for each of its axes, shape and stride of one length, "
            "and a dtype",
            "Spec.make(mesh, (Shard(0),), (8, 16), (16, 1), torch.float32) on a mesh of one axis",
        )
    )  # fmt: skip


class Spec:
    """Mesh, placements and global metadata of a distributed tensor. Made by `Spec.make`; immutable, interned.

    Attributes:
        mesh: the `DeviceMesh`; it knows this rank's coord.
        placements: one per mesh axis.
        shape, stride, dtype: of the global tensor (elements).
        tensor_meta: the last three as a `TensorMeta`.
        local_shape: this rank's shard ([0] for a rank outside the mesh).
    """

    __slots__ = (
        "__weakref__",
        "_bound",
        "dtype",
        "local_shape",
        "mesh",
        "placements",
        "shape",
        "stride",
        "tensor_meta",
    )
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    tensor_meta: TensorMeta
    local_shape: torch.Size
    _bound: int

    def __new__(cls, mesh: DeviceMesh, placements: Iterable[object], tensor_meta: TensorMeta | None = None) -> Spec:
        """The arguments of torch's `DTensorSpec`; gives what `Spec.make` gives. TypeError without `tensor_meta`."""
        if tensor_meta is None:
            raise TypeError(
                "Spec(mesh, placements, tensor_meta): a spec here always knows shape, stride and dtype\n"
                "  fix: TensorMeta((4, 2), (2, 1), torch.float)"
            )
        whole = tensor_meta if isinstance(tensor_meta, tuple) and len(tensor_meta) == 3 else None
        expect("Spec", "tensor_meta", whole, tuple, "(shape, stride, dtype)", "TensorMeta((4, 2), (2, 1), torch.float)")
        expect("Spec", "mesh", mesh, DeviceMesh, "a DeviceMesh", 'init_device_mesh("cpu", (2,))')
        shape, stride, dtype = tensor_meta
        return Spec.make(mesh, normalize_placements(placements, mesh, len(shape), "Spec"), shape, stride, dtype)

    @staticmethod
    def make(
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> Spec:
        """The spec of this value. Placements must be normalised (`normalize_placements`)."""
        try:
            key = (mesh, placements, tuple(shape), tuple(stride), dtype)
            spec = _specs.get(key)
        except TypeError:
            raise _bad_spec(mesh, placements, shape, stride, dtype) from None
        if spec is None:
            spec = _specs[key] = Spec._new(*key)
        return spec

    @classmethod
    def _new(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Spec:
        if (
            not isinstance(mesh, DeviceMesh) or type(placements) is not tuple or len(placements) != mesh.ndim
            or len(shape) != len(stride) or not isinstance(dtype, torch.dtype)
            or not all(isinstance(n, int | torch.SymInt) for n in (*shape, *stride))
            or not all(isinstance(p, Placement) and 0 <= getattr(p, "dim", 0) < max(len(shape), 1) for p in placements)
        ):  # fmt: skip
            raise _bad_spec(mesh, placements, shape, stride, dtype)
        spec = object.__new__(cls)
        spec.mesh, spec.placements, spec.dtype = mesh, placements, dtype
        spec.shape, spec.stride = torch.Size(shape), tuple(stride)
        spec.tensor_meta = TensorMeta(spec.shape, spec.stride, dtype)
        spec._bound = -1
        spec.local_shape = torch.Size([0] if shape else []) if mesh.coord is None else spec.local_shape_of(mesh.coord)
        return spec

    # ------------------------------------------------------------ derived facts
    @property
    def ndim(self) -> int:
        """Dims of the tensor."""
        return len(self.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.mesh

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Elements of this rank's shard."""
        return math.prod(self.local_shape)

    @property
    def local_numel_bound(self) -> int:
        """Elements of the largest shard: the same on every rank."""
        if self._bound < 0:
            self._bound = math.prod(self.local_shape_of((0,) * self.mesh.ndim))
        return self._bound

    @property
    def num_shards_map(self) -> list[int]:
        """Per dim of the tensor, into how many shards it is sharded."""
        counts = [1] * len(self.shape)
        for p, k in zip(self.placements, self.mesh.shape, strict=True):
            if isinstance(p, (Shard, StridedShard)):
                counts[p.dim] *= k
        return counts

    @property
    def num_shards(self) -> int:
        """Into how many shards the tensor is sharded."""
        return math.prod(self.num_shards_map)

    def is_replicated(self) -> bool:
        """True when every axis replicates."""
        return all(isinstance(p, Replicate) for p in self.placements)

    def has_partial(self) -> bool:
        """True when a reduction is pending on some axis."""
        return any(isinstance(p, Partial) for p in self.placements)

    def is_sharded_on(self, dim: int) -> bool:
        """True when some axis shards `dim` (plain or split-factor)."""
        return any(isinstance(p, (Shard, StridedShard)) and p.dim == dim for p in self.placements)

    def with_placements(self, placements: tuple[Placement, ...]) -> Spec:
        """The same tensor in another layout."""
        return Spec.make(self.mesh, placements, self.shape, self.stride, self.dtype)

    def replicated(self) -> Spec:
        """The same tensor, replicated on every axis."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    def with_meta(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Spec:
        """The same layout with other metadata."""
        return Spec.make(self.mesh, self.placements, shape, stride, dtype)

    # ------------------------------------------------------------ geometry
    def intervals_of(self, coord: Sequence[int]) -> tuple[tuple[Interval, ...], ...]:
        """Per dim, the intervals of the global dim that the rank at `coord` holds."""
        splits: list[list[Split]] = [[] for _ in self.shape]
        for p, k, r in zip(self.placements, self.mesh.shape, coord, strict=True):
            if isinstance(p, Shard):
                splits[p.dim].append((k, r, 0))
            elif isinstance(p, StridedShard):
                splits[p.dim].append((k, r, p.split_factor))
        return tuple(dim_intervals(n, tuple(c)) for n, c in zip(self.shape, splits, strict=True))

    def local_shape_of(self, coord: Sequence[int]) -> torch.Size:
        """Shape of the shard at `coord`."""
        sizes = [*self.shape]
        for p, k, r in zip(self.placements, self.mesh.shape, coord, strict=True):
            if isinstance(p, Shard):
                sizes[p.dim] = share_of(sizes[p.dim], k, r)
            elif isinstance(p, StridedShard):
                sizes[p.dim] = share_of(sizes[p.dim], k, r, p.split_factor)
        return torch.Size(sizes)

    def local_offset_of(self, coord: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element of the shard at `coord`; the dim's size where the shard is empty.

        For a split-factor shard this is where its first interval starts; see `intervals_of` for all.
        """
        return tuple(runs[0][0] if runs else n for n, runs in zip(self.shape, self.intervals_of(coord), strict=True))

    # ------------------------------------------------------------ text
    def __str__(self) -> str:
        dims, pending = [str(n) for n in self.shape], []
        for axis, p in enumerate(self.placements):
            name = self.mesh.axis_name(axis)
            if isinstance(p, (Shard, StridedShard)):
                dims[p.dim] += ("+" if "@" in dims[p.dim] else "@") + name
                dims[p.dim] += f":{p.split_factor}" if isinstance(p, StridedShard) else ""
            elif isinstance(p, Partial):
                pending.append(f"{'P' if p.reduce_op == 'sum' else p}:{name}")
        short = SHORT_DTYPES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{short}[{','.join(dims)}]" + (f"{{{','.join(pending)}}}" if pending else "")

    def __repr__(self) -> str:
        return f"Spec.parse({str(self)!r}, {self.mesh!r})"

    @staticmethod
    def parse(text: str, mesh: DeviceMesh) -> Spec:
        """The spec that prints as `text` on `mesh`, with contiguous strides. Raises ValueError on bad text."""
        m = re.fullmatch(r"\s*(\w+)\[([^\]]*)\](?:\{([^}]*)\})?\s*", text)
        if m is None:
            raise ValueError(f"Spec.parse({text!r}): expected dtype[dims]{{pending}}, e.g. f32[8@dp,16]{{P:tp}}")
        name, dims, pending = m.groups()
        dtype = _LONG.get(name) or getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"Spec.parse({text!r}): {name!r} is no dtype")
        placements: list[Placement] = [Replicate()] * mesh.ndim
        shape: list[int] = []
        for d, item in enumerate(dims.split(",")) if dims.strip() else ():
            size, _, axes = item.strip().partition("@")
            shape.append(int(size))
            for part in axes.split("+") if axes else ():
                axis, _, factor = part.partition(":")
                placements[mesh.axis_of(int(axis) if axis.isdigit() else axis)] = (
                    StridedShard(d, split_factor=int(factor)) if factor else Shard(d)
                )
        for item in pending.split(",") if pending else ():
            op, _, axis = item.strip().partition(":")
            reduce_op = "sum" if op == "P" else op.removeprefix("P(").removesuffix(")")
            placements[mesh.axis_of(int(axis) if axis.isdigit() else axis)] = Partial(reduce_op)
        return Spec.make(mesh, tuple(placements), shape, contiguous_stride(shape), dtype)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (make_spec, (self.mesh, self.placements, tuple(self.shape), self.stride, self.dtype))

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: object) -> Spec:
        return self


def may_be_empty(specs: Sequence[Spec]) -> bool:
    """True when some rank's shard of some tensor of these specs, of one mesh, has no elements.

    There a rule may run something else than elsewhere.
    """
    return any(0 in _sizes_along(s, d) for s in specs for d in range(s.ndim))


def _sizes_along(spec: Spec, dim: int) -> set[int]:
    """The sizes that shards have along `dim`."""
    sizes = {spec.shape[dim]}
    for p, k in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(p, (Shard, StridedShard)) and p.dim == dim:
            split = p.split_factor if isinstance(p, StridedShard) else 1
            sizes = {part for n in sizes for part in local_sizes(n, k, split)}
    return sizes


def is_even(spec: Spec) -> bool:
    """True where all ranks hold parts of one shape, whichever dims are sharded, and as often as they are."""
    splits: dict[int, int] = {}
    for p, k in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(p, (Shard, StridedShard)):
            splits[p.dim] = splits.get(p.dim, 1) * k
    return all(spec.shape[d] % k == 0 for d, k in splits.items())


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Spec:  # fmt: skip
    """`Spec.make` as a function, so that `torch.load(weights_only=True)` can be told to trust it."""
    return Spec.make(mesh, placements, shape, stride, dtype)


_specs: weakref.WeakValueDictionary[tuple[object, ...], Spec] = weakref.WeakValueDictionary()


class Distributed(Protocol):
    """What a DTensor is made of, for functions that are its methods: this rank's part and the layout."""

    _local_tensor: torch.Tensor
    _spec: Spec


class LateSpec(Spec):
    """Spec of a DTensor whose local tensor may have to be brought up to date before it is read. Never interned."""

    __slots__ = ()

    def settle(self, x: Any, call: str) -> Spec:
        """Bring `x`, which has this spec, up to date for `call`; gives the ordinary spec of its value."""
        raise NotImplementedError


# ------------------------------------------------------------ the order of dims in memory
def in_order(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`local` itself where its dims lie in memory in the order of `stride`, else a copy that does.

    Views are decided by the global strides, so the local ones must agree with them.
    """
    if len(stride) != local.ndim:
        return local
    dims = [d for d in range(local.ndim) if local.shape[d] > 1]
    asked = [local.stride(d) for d in sorted(dims, key=lambda d: -stride[d])]
    if asked == sorted(asked, reverse=True):
        return local
    order = sorted(range(local.ndim), key=lambda d: (-stride[d], d))
    back = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


def dense(t: torch.Tensor) -> bool:
    """True when the elements fill one block of memory, in some order of the dims."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return t.numel() == 0
        step *= size
    return True


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense global tensor whose dims lie in memory in the order of `local`'s."""
    stride, step = [0] * local.ndim, 1
    for d in sorted(range(local.ndim), key=lambda d: (local.stride(d), -d)):
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)
