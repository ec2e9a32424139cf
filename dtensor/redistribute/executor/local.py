"""Taking regions out of local tensors and putting local tensors together: what a rank does around a collective.

All is decided once, from the regions, and then only run: `Take` gives parts of a tensor (views wherever a view can do
it), `Join` makes one tensor of parts, `Embed` one of a part and zeros. The common cases, parts that lie side by side
along one dim, are a single `split` or `cat`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import torch

from dtensor.comm.wire import packed
from dtensor.redistribute.geometry import Region, Runs, region_shape, region_size
from dtensor.spec import contiguous_stride

__all__ = ["Boxes", "Embed", "Join", "Take", "side_by_side"]

_MANY = 8
"""From this many runs on, one indexed copy is cheaper than one copy a run."""


def side_by_side(regions: Sequence[Region], shape: Sequence[int]) -> int | None:
    """The dim along which `regions` lie side by side, in order, and are all of `shape`; None where they do not."""
    if not shape:
        return None
    columns = list(zip(*regions)) or [()] * len(shape)
    differ = [d for d, (runs, n) in enumerate(zip(columns, shape)) if runs.count(((0, n),)) < len(runs)]
    if len(differ) > 1:
        return None
    dim, at = differ[0] if differ else 0, 0
    for runs in columns[dim]:
        if len(runs) > 1 or (runs and runs[0][0] != at):
            return None
        at += runs[0][1] if runs else 0
    return dim if at == shape[dim] else None


def _even(dim: int | None, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Parts of one shape side by side along `dim`: the whole seen with that dim as two, and the order by parts."""
    if dim is None or len({*shapes}) != 1:
        return None
    shape = shapes[0]
    split = (*shape[:dim], len(shapes), *shape[dim:])
    return split, (dim, *[d for d in range(len(split)) if d != dim])


class _Index:
    """An index tensor of the elements of some runs, kept for the devices that it was used on."""

    __slots__ = ("_made", "_runs")

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._made: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        under_mode = torch._C._len_torch_dispatch_stack()  # what is made here may be of the mode's own kind
        found = None if under_mode else self._made.get(device)
        if found is None:
            flat = [i for start, n in self._runs for i in range(start, start + n)]
            found = torch.tensor(flat, device=device)
            if not under_mode:
                self._made[device] = found
        return found


class _TakeOne:
    """One region of a tensor of `shape`: a view where every dim has one run, else a new tensor."""

    __slots__ = ("_index", "_narrow", "_slices", "_views")

    def __init__(self, region: Region, shape: Sequence[int]) -> None:
        one = [runs[0] if runs else (0, 0) for runs in region]
        self._slices = tuple(
            slice(None) if len(runs) > 1 or run == (0, n) else slice(run[0], run[0] + run[1])
            for runs, run, n in zip(region, one, shape)
        )
        cut = [d for d, s in enumerate(self._slices) if s != slice(None)]
        self._narrow = (cut[0], *one[cut[0]]) if len(cut) == 1 else None
        if len(cut) < 2:
            self._slices = ()
        self._views = [(d, runs) for d, runs in enumerate(region) if 1 < len(runs) < _MANY]
        self._index = [(d, _Index(runs)) for d, runs in enumerate(region) if len(runs) >= _MANY]

    @property
    def copies(self) -> bool:
        """True where the result is new memory."""
        return bool(self._views or self._index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._narrow is not None:
            x = x.narrow(*self._narrow)
        elif self._slices:
            x = x[self._slices]
        for d, runs in self._views:
            x = torch.cat([x.narrow(d, start, n) for start, n in runs], d)
        for d, index in self._index:
            x = x.index_select(d, index.on(x.device))
        return x


class Take:
    """Parts of a tensor of `shape`, one for each of `regions`. Called with the tensor it gives the parts.

    Where some are new memory all of several follow each other in one buffer, ready to be sent.
    """

    def __init__(self, regions: Sequence[Region], shape: Sequence[int]) -> None:
        self._regions, self._whole = regions, shape
        self._dim = side_by_side(regions, shape)
        self._in_order = self._dim is not None and all(n == 1 for n in shape[: self._dim])

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """This and what follows is made when first needed, which it may never be."""
        return [*map(region_shape, self._regions)]

    @cached_property
    def _along(self) -> list[int]:
        """What of `_dim` each part has."""
        return [shape[self._dim or 0] for shape in self._shapes]

    @cached_property
    def _each(self) -> list[_TakeOne]:
        return [] if self._dim is not None else [_TakeOne(region, self._whole) for region in self._regions]

    @cached_property
    def _blocks(self) -> list[list[_Block]]:
        some = len(self._regions) > 1 and any(one.copies for one in self._each)
        return [*map(_blocks, self._regions)] if some else []

    @cached_property
    def _even(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return _even(self._dim, self._shapes)

    @property
    def in_order(self) -> bool:
        """True where the parts of a contiguous tensor follow each other in memory and are all of it."""
        return self._in_order

    @property
    def copies(self) -> bool:
        """True where all parts are new memory."""
        return bool(self._each) and all(one.copies for one in self._each)

    @property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [math.prod(shape) for shape in self._shapes]

    def flat(self, x: torch.Tensor, private: bool = False) -> torch.Tensor:
        """The parts, one after the other, in one contiguous 1-D tensor: a view where they lie so already.

        With `private` it is new memory in any case.
        """
        if self._in_order:
            return (x.clone(memory_format=torch.contiguous_format) if private else x.contiguous()).view(-1)
        if self._even is not None:
            split, order = self._even
            parts = x.view(split).permute(order)
            return (parts.clone(memory_format=torch.contiguous_format) if private else parts.contiguous()).view(-1)
        return packed(self(x.clone(memory_format=torch.contiguous_format) if private else x))

    def __call__(self, x: torch.Tensor, apart: int = -1) -> list[torch.Tensor]:
        """The parts; the one numbered `apart` is in no buffer with others."""
        if self._dim is not None:
            return list(torch.split(x, self._along, self._dim))
        if not self._blocks:
            return [one(x) for one in self._each]
        numels = [0 if i == apart else math.prod(shape) for i, shape in enumerate(self._shapes)]
        pieces = torch.split(torch.empty(sum(numels), dtype=x.dtype, device=x.device), numels)
        parts = []
        for i, (piece, shape, blocks) in enumerate(zip(pieces, self._shapes, self._blocks)):
            parts.append(self._each[i](x) if i == apart else piece.view(shape))
            for block in blocks if i != apart else ():
                block.get(x, parts[i])
        return parts


class Boxes:
    """Views of a contiguous tensor of `shape`, one for each of `regions`, of which every dim has one run."""

    __slots__ = ("_places",)

    def __init__(self, regions: Sequence[Region], shape: Sequence[int]) -> None:
        stride = contiguous_stride(shape)
        self._places = [
            (region_shape(region), stride, sum([runs[0][0] * s for runs, s in zip(region, stride) if runs]))
            for region in regions
        ]

    def __call__(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.as_strided(*place) for place in self._places]


class Join:
    """A tensor of `shape` from parts, the i-th of which is to lie at `regions[i]`; together they fill it.

    Parts without elements are passed over. Where one part is all there is it is returned as it is, and `single`
    is its number; else the result is no view of memory that a caller owns. `in_order` is True where parts that follow
    each other in one buffer are the result as they lie.
    """

    def __init__(self, regions: Sequence[Region], shape: Sequence[int]) -> None:
        self._regions, self._shape = regions, tuple(shape)
        self._shapes = [*map(region_shape, regions)]
        self._sizes = [*map(math.prod, self._shapes)]
        filled = [i for i, n in enumerate(self._sizes) if n]
        self._order = sorted(filled, key=regions.__getitem__)
        self._dim = side_by_side([regions[i] for i in self._order], shape) if filled else None
        self.single = filled[0] if len(filled) == 1 else None
        self.in_order = self._dim is not None and self._order == filled and all(n == 1 for n in shape[: self._dim])

    @cached_property
    def _even(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """For parts of one shape, in order: sizes of the buffer's dims, and their order in the whole."""
        even = _even(self._dim, self._shapes) if self._order == [*range(len(self._sizes))] else None
        if even is None:
            return None
        split, order = even
        return tuple([split[d] for d in order]), tuple([order.index(d) for d in range(len(order))])

    @cached_property
    def _blocks(self) -> list[tuple[int, list[_Block]]]:
        return [(i, _blocks(self._regions[i])) for i, n in enumerate(self._sizes) if n]

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.single is not None:
            return parts[self.single]
        if self._dim is not None:
            some = [parts[i] for i in self._order]
            whole = _adjacent(some, self._shape) if self.in_order else None
            return torch.cat(some, self._dim) if whole is None else whole
        out = parts[0].new_empty(self._shape)
        for i, blocks in self._blocks:
            for block in blocks:
                block.put(out, parts[i])
        return out

    def of_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """As called with the parts, which are given one after the other in a 1-D tensor that nobody else uses."""
        if self.in_order or self.single is not None:
            return flat.view(self._shape)
        if self._even is not None:
            split, order = self._even
            return flat.view(split).permute(order).reshape(self._shape).contiguous()  # reshape may give a view
        return self([part.view(shape) for part, shape in zip(torch.split(flat, self._sizes), self._shapes)])


class Embed:
    """A tensor of `shape` that is zero but for `region`, which is what it is called with."""

    __slots__ = ("_blocks", "_shape")

    def __init__(self, region: Region, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._blocks = _blocks(region) if region_size(region) else []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(self._shape)
        self.into(out, x)
        return out

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Put `x` into the region of a tensor of the shape, which stays as it is elsewhere."""
        for block in self._blocks:
            block.put(out, x)


def _adjacent(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """The tensor that `parts` already are, where they follow each other in one buffer of just this size."""
    first = parts[0]
    base = first._base
    if base is None or base.dim() != 1 or not base.is_contiguous():
        return None
    at = first.storage_offset()
    for p in parts:
        if p._base is not base or p.storage_offset() != at or not p.is_contiguous():
            return None
        at += p.numel()
    if at - first.storage_offset() != base.numel() or base.dtype != first.dtype:
        return None
    return base.view(shape)


class _Block:
    """A box of a part and where it lies in the whole, for either direction; `index` for one dim of many runs."""

    __slots__ = ("_dim", "_from", "_index", "_to")

    def __init__(self, to: tuple[slice, ...], of: tuple[slice, ...] | None, dim: int, index: _Index | None) -> None:
        self._to, self._from, self._dim, self._index = to, of, dim, index

    def put(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this box of `part` into `out`."""
        if self._from is not None:
            part = part[self._from]
        if self._index is None:
            out[self._to].copy_(part)
        else:
            out[self._to].index_copy_(self._dim, self._index.on(out.device), part)

    def get(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this box of `whole` into `part`."""
        if self._from is not None:
            part = part[self._from]
        box = whole[self._to]
        part.copy_(box if self._index is None else box.index_select(self._dim, self._index.on(whole.device)))


def _blocks(region: Region) -> list[_Block]:
    most = max(range(len(region)), key=lambda d: len(region[d]))
    index = _Index(region[most]) if len(region[most]) >= _MANY else None
    choices: list[list[tuple[slice, slice]]] = []
    for d, runs in enumerate(region):
        if index is not None and d == most:
            choices.append([(slice(None), slice(None))])
            continue
        at, some = 0, []
        for start, n in runs:
            some.append((slice(start, start + n), slice(at, at + n)))
            at += n
        choices.append(some)
    whole = all(len(some) == 1 for some in choices)
    return [
        _Block(tuple(to for to, _ in box), None if whole else tuple(of for _, of in box), most, index)
        for box in itertools.product(*choices)
    ]
