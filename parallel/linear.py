"""Column- and row-wise parallel Linear and Embedding.

Over an axis of k ranks, y = x W^T + b with W of shape [out, in]:

    Colwise   W cut on out: each rank computes its columns of y           x whole, y cut on the last dim
    Rowwise   W cut on in:  each rank computes a summand of y             x cut on the last dim, y reduced

A Colwise layer hands over to a Rowwise one with no communication between them; plain tensors in between
need not be even, because the Rowwise layer knows how many features it has in all.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from dtensor import DeviceMesh, DTensor, Placement, Replicate, Shard
from parallel.style import (
    ParallelStyle,
    check_fresh,
    check_placement,
    lay_out,
    on_input,
    on_output,
    one_axis_mesh,
    relayout,
    wrap,
)  # fmt: skip

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _WeightStyle(ParallelStyle):
    """What the two styles share. `cuts[kind]` says which dim of each parameter is cut (None: replicated)."""

    lays_out_parameters = True
    cuts: ClassVar[dict[type[nn.Module], dict[str, int | None]]]

    def __init__(self, input_layout: Placement, output_layout: Placement, use_local_output: bool) -> None:
        call = type(self).__name__
        self.input_layout = check_placement(call, "input_layouts", input_layout)
        self.output_layout = check_placement(call, "output_layouts", output_layout)
        self.use_local_output = use_local_output

    def _kind(self, module: nn.Module) -> type[nn.Module]:
        for kind in self.cuts:
            if isinstance(module, kind):
                return kind
        raise NotImplementedError(
            f"{type(self).__name__}: knows {' and '.join(k.__name__ for k in self.cuts)} only\n"
            f"  got: {type(module).__name__}\n"
            "  fix: name the Linear or Embedding inside it, or write a ParallelStyle of your own"
        )

    def _desired(self, kind: type[nn.Module]) -> Placement:
        """Layout that the module's input must have."""
        raise NotImplementedError

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self._kind(module)
        one_axis_mesh(self, device_mesh)
        check_fresh(self, module)

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        cuts = self.cuts[self._kind(module)]
        names = [n for n, _ in module.named_parameters(recurse=False)]
        return {n: Replicate() if (d := cuts.get(n)) is None else Shard(d) for n in names}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check(module, device_mesh)
        mesh, kind = one_axis_mesh(self, device_mesh), self._kind(module)
        features = module.in_features if isinstance(module, nn.Linear) else None
        given, desired, out, local = self.input_layout, self._desired(kind), self.output_layout, self.use_local_output
        call = f"{type(self).__name__} of {type(module).__name__}"

        def prepare(x: object) -> object:
            return relayout(wrap(x, mesh, given, call, features), desired)

        def finish(y: object) -> object:
            if not isinstance(y, DTensor):
                raise TypeError(f"{call}: forward must return a DTensor, it returned {type(y).__name__}")
            y = relayout(y, out)
            return y.to_local() if local else y

        lay_out(module, mesh, self._layouts(module), self.src_data_rank)
        on_input(module, prepare)
        on_output(module, finish)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layout!r}, output_layouts={self.output_layout!r}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_WeightStyle):
    """Cut a Linear's weight and bias on dim 0, or an Embedding's weight on dim 1.

    Args:
        input_layouts: layout of the input when it is a plain tensor; Replicate() by default. Whatever layout
            the input has, it is brought to Replicate().
        output_layouts: layout of the output; Shard(-1) by default, which is free.
        use_local_output: give back this rank's plain tensor instead of a DTensor.

    Communication for (input S(1)) one all-gather, else none; backward: one all-reduce (a reduce-scatter
    for S(1)) when the input needs a gradient.
    """

    cuts: ClassVar[dict[type[nn.Module], dict[str, int | None]]] = {
        nn.Linear: {"weight": 0, "bias": 0},
        nn.Embedding: {"weight": 1},
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            Replicate() if input_layouts is None else input_layouts,
            Shard(-1) if output_layouts is None else output_layouts,
            use_local_output,
        )

    def _desired(self, kind: type[nn.Module]) -> Placement:
        return Replicate()


class RowwiseParallel(_WeightStyle):
    """Cut a Linear's weight on dim 1 (its bias is replicated), or an Embedding's weight on dim 0.

    Args:
        input_layouts: layout of the input when it is a plain tensor; Shard(-1) by default. Whatever layout the
            input has, it is brought to Shard(-1) for a Linear and to Replicate() for an Embedding.
        output_layouts: layout of the output; Replicate() by default: one all-reduce. Shard(d): one
            reduce-scatter.
        use_local_output: give back this rank's plain tensor instead of a DTensor.
    """

    cuts: ClassVar[dict[type[nn.Module], dict[str, int | None]]] = {
        nn.Linear: {"weight": 1, "bias": None},
        nn.Embedding: {"weight": 0},
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            Shard(-1) if input_layouts is None else input_layouts,
            Replicate() if output_layouts is None else output_layouts,
            use_local_output,
        )

    def _desired(self, kind: type[nn.Module]) -> Placement:
        return Replicate() if issubclass(kind, nn.Embedding) else Shard(-1)
