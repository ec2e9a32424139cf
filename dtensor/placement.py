"""Placements: what one mesh axis does to a tensor.

A layout is a tuple of placements, one per mesh axis, composed left to right: axis 0 shards the global
tensor, axis 1 shards what axis 0 left, and so on.

    Replicate()                        every position of the axis holds the same value
    Shard(d)                           dim d is sharded into ceil(n/k)-sized chunks, as torch.chunk does
    StridedShard(d, split_factor=s)    dim d is seen as s chunks, each of which is sharded
    Partial(op)                        the value is the reduction (op) of what the positions hold

Placements are interned, so equality is identity; they are immutable, and print as torch's do.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch

from dtensor.intervals import chunk, split_tensor

__all__ = ["Partial", "Placement", "Replicate", "Shard", "StridedShard", "_StridedShard", "as_placement"]

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
_NORM = re.compile(r"norm(\d+(\.\d+)?)$")


def _metaclass() -> type[type]:
    """What `torch.compile` of torch 2.11 asks of classes whose objects are constants
    (`dtensor.tensor_methods.compiled`), or `type`.

    It makes `isinstance` slower, so newer versions, which ask for nothing, get none.
    """
    if torch.__version__ >= "2.12":
        return type
    from torch._opaque_base import OpaqueBaseMeta

    return OpaqueBaseMeta


ConstantMeta: type[type] = _metaclass()


class Placement(metaclass=ConstantMeta):  # type: ignore[metaclass]
    """Base of all placements. Its predicates answer False; subclasses answer for themselves."""

    __slots__ = ("__weakref__",)

    def is_shard(self, dim: int | None = None) -> bool:
        """True for `Shard` (of `dim`, when given). As in torch, False for split-factor shards."""
        return False

    def is_replicate(self) -> bool:
        """True for `Replicate`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for `Partial` (of `reduce_op`, when given)."""
        return False

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: object) -> Placement:
        return self


class Shard(Placement):
    """Sharded tensor dim `dim` over the axis, `torch.chunk` boundaries.

    `dim` may be negative; functions that know the tensor's ndim normalise it. Raises TypeError when
    `dim` is no integer.
    """

    __slots__ = ("dim",)
    __match_args__ = ("dim",)
    dim: int
    _made: ClassVar[dict[int, Shard]] = {}

    def __new__(cls, dim: int) -> Shard:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"Shard(dim) takes an int, got {repr(dim)[:200]}\n  fix: Shard(0)")
        made = cls._made.get(dim) if cls is Shard else None
        if made is None:
            made = object.__new__(cls)
            object.__setattr__(made, "dim", dim)
            if cls is Shard:
                made = cls._made.setdefault(dim, made)
        return made

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Size and start of chunk `rank` of `num_chunks` of a dim of `curr_local_size` elements.

        An empty chunk starts at the dim's end.
        """
        start, size = chunk(curr_local_size, num_chunks, rank)
        return size, start

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The parts of a whole tensor: `dtensor.intervals`."""
        return split_tensor(tensor, self.dim, 1, num_chunks, with_padding, contiguous)

    def __reduce__(self) -> tuple[type[Shard], tuple[int]]:
        return (type(self), (self.dim,))

    def __hash__(self) -> int:
        return hash(self.dim)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Shard) and type(self) is type(other) and self.dim == other.dim)

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


class StridedShard(Placement):
    """Split-factor shard: see `dim` as `split_factor` chunks, split each over the axis, keep the r-th of each.

    What a view makes of a sharded minor dim (`[4, 8@x]` flattened is `32@x:4`), and what FSDP over TP
    needs. Like torch's `_StridedShard` (the same name is exported) it is not a `Shard` and
    `is_shard()` is False. Raises TypeError or ValueError on a bad argument.
    """

    __slots__ = ("dim", "split_factor")
    __match_args__ = ("dim", "split_factor")
    dim: int
    split_factor: int
    _made: ClassVar[dict[tuple[int, int], StridedShard]] = {}

    def __new__(cls, dim: int, *, split_factor: int | None = None, sf: int | None = None) -> StridedShard:
        if split_factor is not None and sf is not None:
            raise TypeError("StridedShard takes split_factor or its short form sf, not both")
        factor = split_factor if split_factor is not None else 1 if sf is None else sf
        if not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(factor, int):
            raise TypeError(
                f"StridedShard(dim, split_factor=) takes ints, got {repr(dim)[:200]}, {repr(factor)[:200]}\n"
                "  fix: StridedShard(0, split_factor=2)"
            )
        if factor < 1:
            raise ValueError(f"StridedShard: split_factor must be at least 1, got {factor}\n  fix: 2")
        made = cls._made.get((dim, factor))
        if made is None:
            made = object.__new__(cls)
            object.__setattr__(made, "dim", dim)
            object.__setattr__(made, "split_factor", factor)
            made = cls._made.setdefault((dim, factor), made)
        return made

    def local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Size of what position `rank` of `num_chunks` holds of a dim of `curr_local_size` elements, and its start.

        It is a chunk of each of `split_factor` chunks, so it goes on elsewhere. -1 stands for the start of nothing.
        """
        size, first = 0, -1
        for i in range(self.split_factor):
            whole, start = Shard.local_shard_size_and_offset(curr_local_size, self.split_factor, i)
            mine, offset = Shard.local_shard_size_and_offset(whole, num_chunks, rank)
            first = start + offset if mine and first < 0 else first
            size += mine
        return size, first

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The parts of a whole tensor: `dtensor.intervals`."""
        return split_tensor(tensor, self.dim, self.split_factor, num_chunks, with_padding, contiguous)

    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        return (strided, (self.dim, self.split_factor))

    def __hash__(self) -> int:
        return hash((self.dim, self.split_factor))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, split_factor={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


def strided(dim: int, split_factor: int) -> StridedShard:
    return StridedShard(dim, split_factor=split_factor)


_StridedShard = StridedShard


class Replicate(Placement):
    """Every position of the axis holds the same value."""

    __slots__ = ()
    _made: ClassVar[list[Replicate]] = []

    def __new__(cls) -> Replicate:
        if not cls._made:
            cls._made.append(object.__new__(cls))
        return cls._made[0]

    def is_replicate(self) -> bool:
        return True

    def __reduce__(self) -> tuple[type[Replicate], tuple[()]]:
        return (Replicate, ())

    def __hash__(self) -> int:
        return -1

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


class Partial(Placement):
    """A pending reduction: the value is `reduce_op` over what the positions of the axis hold.

    `reduce_op` is one of sum, avg, min, max, product, band, bor, bxor, or `norm<p>` (the p-norm of the
    positions' values, which must not be negative). `None` means sum. Raises ValueError on another.
    """

    __slots__ = ("reduce_op",)
    __match_args__ = ("reduce_op",)
    reduce_op: str
    _made: ClassVar[dict[str, Partial]] = {}

    def __new__(cls, reduce_op: str | None = "sum") -> Partial:
        op = "sum" if reduce_op is None else reduce_op
        made = cls._made.get(op) if isinstance(op, str) else None
        if made is None:
            if not isinstance(op, str) or (op not in REDUCE_OPS and not _NORM.match(op)):
                raise ValueError(
                    f"Partial({repr(op)[:200]}): unknown reduction, known are {', '.join(REDUCE_OPS)} and norm<p>\n"
                    "  fix: Partial()"
                )
            made = object.__new__(cls)
            object.__setattr__(made, "reduce_op", op)
            made = cls._made.setdefault(op, made)
        return made

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    @property
    def norm(self) -> float | None:
        """p for `norm<p>`, else None."""
        m = _NORM.match(self.reduce_op)
        return float(m.group(1)) if m else None

    def __reduce__(self) -> tuple[type[Partial], tuple[str]]:
        return (Partial, (self.reduce_op,))

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"  # as torch prints it

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def as_placement(p: object) -> Placement:
    """`p` itself, or our placement for a torch one of the same kind. Raises TypeError for anything else."""
    if isinstance(p, Placement):
        return p
    name = type(p).__name__
    if getattr(type(p), "__module__", "").startswith("torch."):
        if name == "Shard":
            return Shard(p.dim)  # type: ignore[attr-defined]
        if name == "Replicate":
            return Replicate()
        if name == "Partial":
            return Partial(p.reduce_op)  # type: ignore[attr-defined]
        if name == "_StridedShard":
            return StridedShard(p.dim, split_factor=p.split_factor)  # type: ignore[attr-defined]
    raise TypeError(f"{repr(p)[:200]} is no placement\n  fix: use Shard(dim), Replicate() or Partial(op)")
