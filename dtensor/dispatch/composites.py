"""Composites of torch that work on memory in C++: on DTensors, the same by ops.

Most composites are made of ops and need nothing here. These read a tensor's memory (the places of `tensor_split`) or
write into a plain tensor that they make themselves and return (`vander`, `pad_sequence`). Dispatch would see too
late what they do, so they are caught above autograd, by a kernel of the dispatch key `PythonTLSSnapshot`: it is asked
first, and only tensors of Python classes have it, so calls on plain tensors are never touched. What runs instead is
ordinary code on DTensors, with its gradients.

Lookups in tables are caught here as well, where a gradient is needed: the op that makes the gradient does not see the
table, and how the table lies decides what is cheapest. So a lookup is a step of autograd of its own, which tells it
(`Rows`), and bags of rows of a table that is sharded are made of lookups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import flat, is_dtensor, replicated_on
from dtensor.errors import MeshError, MixedTensorError, explain_error
from dtensor.placement import Placement, Replicate, Shard
from dtensor.torch_changes import library, undoing

__all__ = [
    "MAX", "MEAN", "SUM", "Rows", "bag_arguments", "bag_in_parts", "bags_of", "by_width_only", "catch",
    "instead_of", "picked_rows", "whole",
]  # fmt: skip

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)

_libraries: dict[str, torch.library.Library] = {}
_caught: dict[str, Callable[..., Any]] = {}


def instead_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function in place of the op `name`, as `aten::vander`, on calls that have a DTensor among the arguments.

    Where it returns NotImplemented the op runs after all.
    """

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(op: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = f(*args, **kwargs)
            return op() if out is NotImplemented else out

        catch(name, call)
        return f

    return register


def catch(name: str, call: Callable[..., Any]) -> None:
    """From now on `call(op, args, kwargs)` runs where `name` is called with a DTensor; `op()` is torch's own code."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        op: hot.Op = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")  # defined by now
        torchs = partial(op.redispatch, keys.remove(torch._C.DispatchKey.PythonTLSSnapshot), *args, **kwargs)
        return call(torchs, args, kwargs) if any(map(is_dtensor, flat(args, kwargs))) else torchs()

    _caught[name] = kernel
    if _libraries:
        _take(name)


def install() -> None:
    """Take the places of the ops that are caught."""
    undoing(_libraries.clear)
    for name in _caught:
        _take(name)


def _take(name: str) -> None:
    space, _, rest = name.partition("::")
    if space not in _libraries:
        _libraries[space] = library(space)
    _libraries[space].impl(rest, _caught[name], "PythonTLSSnapshot", with_keyset=True)


@instead_of("aten::tensor_split.tensor_indices_or_sections")
def _tensor_split(x: torch.Tensor, where: torch.Tensor, dim: int = 0) -> Any:
    return torch.tensor_split(x, where.tolist(), dim)


@instead_of("aten::vander")
def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    count = x.shape[0] if N is None else N
    if count < 0:
        raise RuntimeError("N must be non-negative.")
    if count > 1:
        powers = torch.linalg.vander(x, N=count)
    else:
        dtype = torch.promote_types(x.dtype, torch.int64)
        powers = torch.ones_like(x, dtype=dtype).unsqueeze(-1)[:, :count]
    return powers if increasing else powers.flip(-1)


@instead_of("aten::combinations")
def _combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """By their places, which follow from the size: torch selects them by a mask."""
    if x.ndim != 1 or r < 1:
        return NotImplemented
    pick = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    at = torch.tensor(list(itertools.chain.from_iterable(pick(range(x.shape[0]), r))), dtype=torch.int64)
    return aten.index_select(x, 0, replicated_on(x.device_mesh, at.to(x.device))).reshape(-1, r)


@instead_of("aten::dist")
def _dist(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> Any:
    """The largest difference: its gradient finds where that is by comparing, so the difference is made only once."""
    if p != math.inf:
        return NotImplemented
    d: Any = x - y
    if d._spec.has_partial():
        d = d.redistribute(placements=[Replicate() if q.is_partial() else q for q in d.placements])
    return torch.linalg.vector_norm(d, p)


@instead_of("aten::pad_sequence")
def _pad_sequence(
    sequences: Sequence[torch.Tensor], batch_first: bool = False, padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:  # fmt: skip
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    longest = max(s.shape[0] for s in sequences)
    padded = []
    for s in sequences:
        missing = longest - s.shape[0]
        ends = [0, missing] if padding_side == "right" else [missing, 0]
        padded.append(torch.nn.functional.pad(s, [0, 0] * (s.ndim - 1) + ends, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


@instead_of("aten::_pack_padded_sequence")
def _pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Any]:
    """The steps of all sequences that are long enough, one time after the other; sizes are read by Python."""
    counts = lengths.tolist()
    if any(a < b for a, b in zip(counts, counts[1:], strict=False)) or not counts or counts[-1] <= 0:
        raise RuntimeError("pack_padded_sequence: lengths must be positive and in decreasing order")
    steps = x.transpose(0, 1) if batch_first else x
    if len(counts) != steps.shape[1]:
        raise RuntimeError(f"pack_padded_sequence: {len(counts)} lengths for a batch of {steps.shape[1]}")
    sizes = [sum(n > t for n in counts) for t in range(counts[0])]
    return torch.cat([steps[t, :b] for t, b in enumerate(sizes)]), torch.tensor(sizes)


@instead_of("aten::_pad_packed_sequence")
def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(f"pad_packed_sequence: total_length={total_length} is less than the longest, {len(sizes)}")
    fill = lambda t, n: torch.nn.functional.pad(  # noqa: E731
        t, [0, 0] * (t.ndim - 1) + [0, n - t.shape[0]], value=padding_value
    )
    steps = fill(torch.stack([fill(part, sizes[0]) for part in data.split(sizes)]), max(len(sizes), total_length))
    lengths = torch.tensor([sum(b > i for b in sizes) for i in range(sizes[0])])
    return (steps.transpose(0, 1) if batch_first else steps), lengths


@instead_of("aten::fill_diagonal_")
def _fill_diagonal(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """By views of the diagonal: torch strides over the memory, which has gaps in a view."""
    torch.empty(x.shape, device="meta").fill_diagonal_(value, wrap)  # torch's own checks
    rows, columns = x.shape[:2]
    for start in range(0, rows, columns + 1) if wrap and x.ndim == 2 else (0,):
        part: torch.Tensor = x[start:] if start else x
        while part.ndim > 1:
            part = part.diagonal(0, 0, 1)
        part.fill_(value)
    return x


@instead_of("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _unchunked(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, ignore_index: int, *_: Any, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """torch saves memory by buffers that it makes itself, in its backward too; shards save that memory already."""
    logits = torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.cross_entropy(
        logits, target, class_weight, ignore_index=ignore_index, reduction="none"
    )  # fmt: skip


# ------------------------------------------------------------ lookups
class Rows(int):
    """The number of rows of a table, and how the table lies: part of the call that makes its gradient."""

    layout: tuple[Placement, ...]

    def __new__(cls, rows: int, layout: tuple[Placement, ...]) -> Rows:
        made = super().__new__(cls, rows)
        made.layout = layout
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and int(self) == int(other) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((int(self), self.layout))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Any, indices: Any, padding: int, scaled: bool) -> Any:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.options = Rows(table.shape[0], table._spec.placements), (padding, scaled)
        return aten.embedding.default(table, indices, padding, scaled)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        op, (indices,), rows = aten.embedding_dense_backward.default, ctx.saved_tensors, ctx.rows
        if torch.is_grad_enabled():  # autograd, which has the gradient's own gradient, takes plain numbers
            return op(grad, indices, int(rows), *ctx.options), None, None, None
        found = late.DTensor.__torch_dispatch__(op, (late.DTensor,), (grad, indices, rows, *ctx.options))
        return found, None, None, None


def _is_differentiated(table: Any) -> bool:
    """Whether autograd, and no transform of functions, wants the gradient of a table."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return is_dtensor(table) and torch.is_grad_enabled() and table.requires_grad and not transformed


@instead_of("aten::embedding")
def _lookup(table: Any, indices: Any, padding: int = -1, scaled: bool = False, sparse: bool = False) -> Any:
    ours = is_dtensor(indices) and not sparse and _is_differentiated(table)
    return _Lookup.apply(table, indices, padding, scaled) if ours else NotImplemented


def bag_arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, plain tensors made replicated ones; MeshError where the meshes differ."""
    named: dict[str, Any] = {a.name: a.default_value for a in op._schema.arguments}
    named |= dict(zip(named, args, strict=False)) | dict(kwargs)
    tensors = [t for t in named.values() if is_dtensor(t)]
    mesh = tensors[0].device_mesh
    if any(t.device_mesh != mesh for t in tensors):
        raise MeshError(f"embedding_bag: the tensors live on different meshes, {[str(t.device_mesh) for t in tensors]}")
    plain = {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and not is_dtensor(t)}
    for n, t in plain.items():
        if n != "offsets" and t.numel() > 1 and not hot.replicates_implicitly():
            raise MixedTensorError(
                explain_error(
                    "embedding_bag", ", ".join(f"{m}: {v._spec}" for m, v in named.items() if is_dtensor(v)),
                    f"got mixed torch.Tensor and DTensor; argument {n!r} is plain",
                    "distribute_tensor(x, mesh, placements) for the plain tensor",
                )
            )  # fmt: skip
    return named | {n: replicated_on(mesh, t) for n, t in plain.items()}


def whole(t: Any) -> torch.Tensor:
    """The whole of a DTensor, as a plain tensor of its local memory."""
    whole: torch.Tensor = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim).to_local()
    return whole


def bags_of(named: Mapping[str, Any]) -> tuple[Any, int]:
    """For every index the bag it is in, and the number of bags."""
    starts = whole(named["offsets"])
    bags = starts.numel() - bool(named.get("include_last_offset"))
    at = torch.arange(named["indices"].shape[0], device=starts.device, dtype=starts.dtype)
    of = torch.searchsorted(starts[:bags].contiguous(), at, right=True) - 1
    return replicated_on(named["indices"].device_mesh, of.to(torch.int64)), bags


@instead_of("aten::_embedding_bag")
def _differentiable(*args: Any, **kwargs: Any) -> Any:
    """Sums and means of a table that is sharded, where a gradient is needed."""
    table = args[0]
    if not _is_differentiated(table):
        return NotImplemented
    named = bag_arguments(aten._embedding_bag.default, args, kwargs)
    at_once = named["mode"] == MAX or named["sparse"] or named["scale_grad_by_freq"] or not named["indices"].numel()
    return NotImplemented if at_once or by_width_only(table) == table.placements else bag_in_parts(named)


def bag_in_parts(named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Lookup, weights, sum per bag."""
    table = named["weight"]
    of, bags = bags_of(named)
    rows = picked_rows(named)
    out = aten.index_add(table.new_zeros((bags, table.shape[1])), 0, of, rows)
    if named["mode"] == SUM:
        zeros = replicated_on(table.device_mesh, torch.zeros(bags, dtype=torch.int64, device=table.device))
        return out, of, zeros, zeros.clone()
    kept = (named["indices"] != named["padding_idx"]).to(torch.int64)
    sizes = aten.index_add(kept.new_zeros(bags), 0, of, kept)
    sizes = sizes.redistribute(placements=[Replicate()] * table.device_mesh.ndim)
    return out / sizes.clamp(min=1).to(out.dtype).unsqueeze(1), of, sizes, sizes.clone()


def picked_rows(named: Mapping[str, Any]) -> Any:
    """The rows looked up, weighted; zeros for the padding."""
    rows = aten.embedding(named["weight"], named["indices"])
    weights = named.get("per_sample_weights")
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    if named["padding_idx"] >= 0:
        rows = rows * (named["indices"] != named["padding_idx"]).to(rows.dtype).unsqueeze(1)
    return rows


def by_width_only(table: Any) -> tuple[Placement, ...]:
    """The table's layout with all but one sharded by width undone."""
    mesh, width = table.device_mesh, table.shape[1]
    kept: list[Placement] = [
        p if isinstance(p, Shard) and p.dim == 1 and k <= width else Replicate()
        for p, k in zip(table.placements, mesh.shape, strict=True)
    ]
    return tuple(kept) if sum(isinstance(p, Shard) for p in kept) <= 1 else (Replicate(),) * mesh.ndim


_INTO = (
    "inverse linalg_cholesky linalg_det linalg_eigvalsh linalg_inv linalg_matrix_rank linalg_solve linalg_svdvals "
    "matmul msort nll_loss"
).split()
"""Composites whose forms with `out=` write into a view of it that C++ takes, or into tensors made beside it."""


def _takes(op: hot.Op) -> list[tuple[str, str]]:
    """Names and types of what an op takes but for `out`."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


def _into(function: hot.Op, out_name: str, form: str) -> None:
    """Let the form of a composite with `out=` be the composite itself, whose result is written."""

    @instead_of(form)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = kwargs.pop(out_name)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*filter(is_dtensor, flat(args, kwargs)), out)):
            raise RuntimeError(
                f"{form}: out= takes no part in autograd, but an argument requires grad; leave out= away, or call it "
                "inside torch.no_grad()"
            )
        result = function(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"{form}: the result's {result.dtype} can't be cast to {out.dtype}, the dtype of out=")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)


for _packet in (getattr(torch.ops.aten, name) for name in _INTO):
    _forms = [getattr(_packet, overload) for overload in _packet.overloads()]
    for _form in _forms:
        _out = [a.name for a in _form._schema.arguments if a.is_out]
        for _function in _forms if len(_out) == 1 else ():
            if _takes(_function) == _takes(_form) and not any(a.is_out for a in _function._schema.arguments):
                _into(_function, _out[0], _form.name())
