"""Column- and row-wise parallel Linear, Embedding and convolution.

Over an axis of k ranks, y = x W^T + b with W of shape [out, in]:

    Colwise   W sharded on out: each rank computes its columns of y     x replicated, y sharded on the last dim
    Rowwise   W sharded on in:  each rank computes a summand of y       x sharded on the last dim, y reduced

A Colwise layer hands over to a Rowwise one with no communication between them; plain tensors in between
need not be even, because the Rowwise layer knows how many features it has in all. `parallel.styles.kinds` says what the
two words mean for other modules than Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.tensor import DTensor

from .axis import StyleAxis
from .kinds import Kind, kind_of
from .steps import WeightSteps, replaced
from .style import (
    ParallelStyle,
    arranged,
    check_fresh,
    check_placement,
    lay_out,
    on_input,
    on_output,
    relayout,
)  # fmt: skip

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _WeightStyle(WeightSteps, ParallelStyle):
    """What the two styles share: parameters sharded as the module's kind says, input and output brought to a layout.

    Attributes:
        input_layouts, output_layouts: (placement,); where none was given, a Linear's, and other modules have their own.
        desired_input_layouts: (placement,), the layout that the parameters need, known when the style is applied.
    """

    lays_out_parameters = True
    default_input: ClassVar[Placement] = Replicate()
    default_output: ClassVar[Placement] = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        weight_dims: tuple[int, int] | None = None,
    ) -> None:
        call = type(self).__name__
        given = None if input_layouts is None else check_placement(call, "input_layouts", input_layouts)
        wanted = None if output_layouts is None else check_placement(call, "output_layouts", output_layouts)
        self.input_layouts = (given or self.default_input,)
        self.output_layouts = (wanted or self.default_output,)
        self._told = (given is not None, wanted is not None)
        self.use_local_output = use_local_output
        self.weight_dims = None if weight_dims is None else (weight_dims[0], weight_dims[1])

    def _kind(self, module: nn.Module) -> Kind:
        kind = kind_of(module, self.weight_dims)
        if kind is not None:
            return kind
        if self.weight_dims is not None:
            raise ValueError(
                f"{type(self).__name__}: weight_dims={self.weight_dims} names the output and the input dim of a weight "
                f"of two dims, which this {type(module).__name__} does not have\n  fix: (1, 0) for a weight [in, out]"
            )
        raise NotImplementedError(
            f"{type(self).__name__}: knows Linear and Embedding only, and convolutions\n"
            f"  got: {self.of(module).partition(' of ')[2]}\n"
            "  fix: name the Linear or Embedding inside it, pass weight_dims=(output dim, input dim) if it "
            "multiplies by its `weight`, or write a ParallelStyle of your own"
        )

    def _sharded_dims(self, kind: Kind) -> Mapping[str, int]:
        """Dim of each parameter that is sharded."""
        raise NotImplementedError

    def _desired(self, kind: Kind, ranks: int) -> Placement:
        """Layout that the module's input must have."""
        raise NotImplementedError

    def _given(self, kind: Kind) -> Placement:
        """Layout of a plain input."""
        return self._told_input or Replicate()

    def _wanted(self, kind: Kind) -> Placement:
        """Layout of the output."""
        return self._told_output or Replicate()

    @property
    def _told_input(self) -> Placement | None:
        """The input's layout, if it was given or set later."""
        return self.input_layouts[0] if self._told[0] or self.input_layouts[0] != self.default_input else None

    @property
    def _told_output(self) -> Placement | None:
        """Likewise the output's."""
        return self.output_layouts[0] if self._told[1] or self.output_layouts[0] != self.default_output else None

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self._kind(module)
        check_fresh(self, module, device_mesh)

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        dims = self._sharded_dims(self._kind(module))
        names = [n for n, _ in module.named_parameters(recurse=False)]
        return {n: Shard(dims[n]) if n in dims else Replicate() for n in names}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check(module, device_mesh)
        over, kind = self.over(device_mesh), self._kind(module)
        self.desired_input_layouts = (self._desired(kind, over.size),)
        if replaced(self, WeightSteps):
            return self._apply_steps(module, device_mesh)
        lay_out(module, over, self._layouts(module), self.src_data_rank)
        self._prepare(module, over, kind)
        self._finish(module, over, kind)
        return module

    def _prepare(self, module: nn.Module, over: StyleAxis, kind: Kind) -> None:
        """The hook before forward."""
        given, desired = self._given(kind), self._desired(kind, over.size)
        known = None if kind.inputs is None else (kind.dim, kind.inputs)
        call = self.of(module)
        on_input(module, lambda x: arranged(x, over, given, desired, call, known))

    def _finish(self, module: nn.Module, over: StyleAxis, kind: Kind) -> None:
        """The hook after forward."""
        out, local = self._wanted(kind), self.use_local_output
        call = self.of(module)

        def finish(y: object) -> object:
            if not isinstance(y, DTensor):
                raise TypeError(f"{call}: forward must return a DTensor, it returned {type(y).__name__}")
            y = relayout(y, over, out, call)
            return y.to_local() if local else y

        on_output(module, finish)

    def __repr__(self) -> str:
        told = [f"input_layouts={p!r}" for p in (self._told_input,) if p is not None]
        told += [f"output_layouts={p!r}" for p in (self._told_output,) if p is not None]
        told += [] if self.use_local_output else ["use_local_output=False"]
        told += [] if self.weight_dims is None else [f"weight_dims={self.weight_dims}"]
        return f"{type(self).__name__}({', '.join(told)})"


class ColwiseParallel(_WeightStyle):
    """Shard a module's parameters along its output features: a Linear's weight and bias on dim 0, an Embedding's on 1.

    Args:
        input_layouts: layout of the input when it is a plain tensor; Replicate() by default. Whatever layout
            the input has, it is brought to Replicate(). (A convolution with groups, if they divide by the number of
            ranks, takes its channels sharded: by default and by need.)
        output_layouts: layout of the output; by default sharded along its features, which is free: Shard(-1), or the
            channels of a convolution.
        use_local_output: give back this rank's plain tensor instead of a DTensor.
        weight_dims: (dim of the output features, dim of the input features) of `weight`, for a module that
            multiplies by it but is no Linear; (1, 0) for a weight [in, out].

    Communication for (input S(1)) one all-gather, else none; backward: one all-reduce (a reduce-scatter
    for S(1)) when the input needs a gradient.
    """

    default_output = Shard(-1)

    def _sharded_dims(self, kind: Kind) -> Mapping[str, int]:
        return kind.column

    @property
    def gives_pieces(self) -> bool:
        return self.use_local_output and not isinstance(self._told_output, Replicate)

    def _desired(self, kind: Kind, ranks: int) -> Placement:
        return Shard(kind.dim) if kind.groups > 1 and kind.groups % ranks == 0 else Replicate()

    def _wanted(self, kind: Kind) -> Placement:
        return self._told_output or Shard(kind.dim)


class RowwiseParallel(_WeightStyle):
    """Shard a module's weight along its input features (dim 1 of a Linear's); an Embedding's along its rows, dim 0.

    A bias is replicated.

    Args:
        input_layouts: layout of the input when it is a plain tensor; Shard(-1) by default (a convolution: its
            channels). Whatever layout the input has, it is brought to that for a Linear and to Replicate() for an
            Embedding.
        output_layouts: layout of the output; Replicate() by default: one all-reduce. Shard(d): one
            reduce-scatter.
        use_local_output: give back this rank's plain tensor instead of a DTensor.
        weight_dims: as for ColwiseParallel.
    """

    default_input = Shard(-1)

    def _sharded_dims(self, kind: Kind) -> Mapping[str, int]:
        return kind.row

    def _desired(self, kind: Kind, ranks: int) -> Placement:
        return Replicate() if kind.inputs is None else Shard(kind.dim)

    def _given(self, kind: Kind) -> Placement:
        return self._told_input or Shard(kind.dim)
