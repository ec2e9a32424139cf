"""PackedColwiseParallel: a column-wise layer whose outputs are several projections side by side (qkv, gate and up).

Ordinary shards of the output features would give one rank all of q and another all of v. Here every part is sharded, so
that each rank holds its own features of each part, packed in the same order:

    features      q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3        sizes=(4, 4, 4), 2 ranks
    rank 0        q0 q1         k0 k1         v0 v1
    rank 1              q2 q3         k2 k3         v2 v3

Parts of equal size are one parameter, laid out StridedShard(dim, split_factor=number of parts), the placement that
means just this. No placement means it for parts of several sizes (grouped queries), so there the module keeps one
parameter a part, each an ordinary shard, and puts the local ones together when it runs: nothing is sent. Outside of
forward `module.weight` is the joined tensor in its true order, and `state_dict` reads and writes that under the
old keys; `named_parameters` shows the parts, as `weight_0`, `weight_1`...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dtensor.errors import expect, short
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Shard, StridedShard
from dtensor.tensor import DTensor

from .joined import keep_parts, put_together, running_order, split_output
from .kinds import Kind
from .linear import ColwiseParallel
from .style import lay_out, on_output, relayout

__all__ = ["PackedColwiseParallel"]


class PackedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for a layer that packs several projections.

    Args:
        sizes: output features of each part, in order; their sum is all of them.
        unit: features that must stay together, e.g. the width of a head. Shards then hold whole units.
        input_layouts, use_local_output, weight_dims: as for ColwiseParallel.
        output_layouts: layout of the output; by default every part is sharded, which is free. The local output then is
            this rank's features of each part, one after the other.

    Raises ValueError, before anything is changed, where the sizes are not those of the module, where shards would not
    hold whole units, and where parts of several sizes do not divide by the number of ranks.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        unit: int = 1,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        weight_dims: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output,
            weight_dims=weight_dims,
        )  # fmt: skip
        call, fix = "PackedColwiseParallel", "PackedColwiseParallel((64, 64, 64))"
        expect(call, "sizes", sizes, Sequence, "a tuple of ints, one for each part", fix)
        for n in (*sizes, unit):
            expect(call, "a size or unit", n, int, "an int", fix)
        self.sizes, self.unit = tuple(sizes), unit
        if not self.sizes or min(self.sizes) < 1 or self.unit < 1:
            got = f"{short(self.sizes)}, unit={unit}"
            raise ValueError(f"{call}: sizes and unit must be positive, got {got}\n  fix: {fix}")
        self.equal = len(set(self.sizes)) == 1
        self.keeps_ties = self.equal

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        super()._check(module, device_mesh)
        kind, ranks, call = self._kind(module), self.over(device_mesh).size, f"PackedColwiseParallel{self.sizes}"
        outputs = module.get_parameter("weight").shape[kind.column["weight"]]
        if sum(self.sizes) != outputs or kind.inputs is None or kind.groups > 1:
            raise ValueError(
                f"{call}: the sizes must add up to the output features of a module that multiplies by its weight\n"
                f"  got: {sum(self.sizes)} for {type(module).__name__} with {outputs}"
            )
        for size in self.sizes:
            shard = -(-size // ranks)
            if size % ranks and (not self.equal or shard % self.unit) or size % self.unit or shard % self.unit:
                raise ValueError(
                    f"{call}: a part of {size} features in units of {self.unit} does not go over {ranks} ranks\n"
                    "  rule: shards hold whole units, and parts of several sizes must divide evenly\n"
                    "  fix: fewer ranks; for grouped queries the number of key and value heads must divide by them"
                )

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        packed = {n: StridedShard(d, split_factor=len(self.sizes)) for n, d in self._kind(module).column.items()}
        return {n: packed.get(n, p) for n, p in super()._layouts(module).items()}

    def _wanted(self, kind: Kind) -> Placement:
        return self._told_output or StridedShard(kind.dim, split_factor=len(self.sizes))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.equal:
            return super()._apply(module, device_mesh)
        self._check(module, device_mesh)
        over, kind = self.over(device_mesh), self._kind(module)
        local, out = self.use_local_output, self._told_output
        call = self.of(module)
        keep_parts(module, {n: d for n, d in kind.column.items() if module._parameters.get(n) is not None}, self.sizes)
        parts = {n: Shard(kind.column[n.rpartition("_")[0]]) for n in running_order(module)}
        lay_out(module, over, dict(parts), self.src_data_rank)

        def finish(y: object) -> object:
            if not isinstance(y, DTensor):
                raise TypeError(f"{call}: forward must return a DTensor, it returned {type(y).__name__}")
            y = relayout(y, over, Shard(kind.dim), call)
            if local and out is None:
                return y.to_local()
            whole = torch.cat(split_output(y, self.sizes, over, kind.dim), kind.dim)
            assert isinstance(whole, DTensor)
            whole = whole if out is None else relayout(whole, over, out, call)
            return whole.to_local() if local else whole

        self._prepare(module, over, kind)
        on_output(module, finish)
        return module

    def _undo(self, module: nn.Module) -> None:
        put_together(module)

    def __repr__(self) -> str:
        rest = super().__repr__().partition("(")[2]
        told = [f"{self.sizes}", *([f"unit={self.unit}"] if self.unit != 1 else []), *([rest] if rest != ")" else [])]
        return f"{type(self).__name__}({', '.join(told)}" + (")" if rest == ")" else "")
