"""PrepareModule*: bring a module's inputs and outputs into other layouts; the parameters are left alone.

Layouts are given per input (or output), one placement each, None for one that is to be left as it is:

    PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import nn

from dtensor.errors import expect
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement

from .axis import StyleAxis
from .style import ParallelStyle, arranged, check_placement, wrap

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = Placement | Sequence[Placement | None] | None


def _as_tuple(call: str, name: str, given: Layouts) -> tuple[Placement | None, ...] | None:
    if given is None:
        return None
    items = (given,) if isinstance(given, Placement) else given
    expect(call, name, items, (tuple, list), "a placement, or a tuple of them and None", f"{name}=(Shard(0), None)")
    return tuple(None if p is None else check_placement(call, name, p) for p in items)


def _same_length(call: str, a: str, b: str, left: Sequence[object] | None, right: Sequence[object] | None) -> None:
    if left is None and right is None:
        return
    if left is None or right is None or len(left) != len(right):
        raise ValueError(
            f"{call}: {a} and {b} go together, one pair for each value\n"
            f"  got: {a}={left!r}, {b}={right!r}\n  fix: give both, of the same length"
        )


def _like(output: object, values: list[object]) -> object:
    """`values` in a container of `output`'s kind: a list, a named tuple or a tuple."""
    if isinstance(output, list):
        return values
    return type(output)(*values) if hasattr(output, "_fields") else tuple(values)


class _Prepare(ParallelStyle):
    """What the styles share that bring values into other layouts and change no parameters."""

    use_local_output: bool
    _applied: tuple[StyleAxis, str] | None = None

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self.over(device_mesh)

    def _for(self, module: nn.Module, device_mesh: DeviceMesh) -> Self:
        """A copy for the hooks of one module, which knows its mesh axis and what an error calls it."""
        own = copy(self)
        own._applied = self.over(device_mesh), self.of(module)
        return own

    def _here(self, mesh: DeviceMesh) -> tuple[StyleAxis, str]:
        return self._applied or (self.over(mesh), type(self).__name__)

    def _convert(self, x: object, mesh: DeviceMesh, given: Placement | None, desired: Placement | None) -> object:
        """One value: laid out as `given`, brought to `desired`; untouched when `given` is None."""
        if given is None or x is None:
            return x
        over, call = self._here(mesh)
        if not isinstance(x, torch.Tensor):
            raise ValueError(
                f"{call}: a layout ({given}) was given for a value that is no tensor\n  got: {type(x).__name__}\n"
                "  fix: None in its place"
            )
        dt = wrap(x, over, given, call) if desired is None else arranged(x, over, given, desired, call)
        return dt.to_local() if self.use_local_output else dt


class PrepareModuleInput(_Prepare):
    """Bring a module's inputs into the layouts it wants.

    A subclass may replace what is done to one input (`_prepare_input_arg`), to those by position (`_prepare_input_fn`)
    or to all (`_prepare_input_kwarg_fn`).

    Args:
        input_layouts: layouts of plain inputs, one for each positional input; None: positional inputs are left alone,
            whatever is desired.
        desired_input_layouts: the layouts that forward sees.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword inputs, by name.
        use_local_output: forward sees plain tensors instead of DTensors.

    Raises ValueError when input layouts are not each paired with a desired one and, at the call, when the number of
    inputs differs.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        call = "PrepareModuleInput"
        self.input_layouts = _as_tuple(call, "input_layouts", input_layouts)
        self.desired_input_layouts = _as_tuple(call, "desired_input_layouts", desired_input_layouts)
        self.with_kwargs = input_kwarg_layouts is not None
        for name, given in (
            ("input_kwarg_layouts", input_kwarg_layouts), ("desired_input_kwarg_layouts", desired_input_kwarg_layouts),
        ):  # fmt: skip
            if given is not None:
                expect(call, name, given, Mapping, "a mapping from names to placements", f'{name}={{"x": Shard(0)}}')
                for value in given.values():
                    if value is not None:
                        check_placement(call, name, value)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            _same_length(call, "input_layouts", "desired_input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.with_kwargs and set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"{call}: input_kwarg_layouts and desired_input_kwarg_layouts must name the same inputs\n"
                f"  got: {sorted(self.input_kwarg_layouts)} and {sorted(self.desired_input_kwarg_layouts)}\n"
                "  fix: the same names in both"
            )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> object:
        """One input in its layout."""
        return self._convert(input, mesh, input_layout, desired_layout)

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        """All inputs that come by position."""
        given, desired = self.input_layouts, self.desired_input_layouts
        if given is None or desired is None:
            return inputs
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        if len(inputs) != len(given):
            raise ValueError(
                f"{self._here(device_mesh)[1]}: got {len(inputs)} positional inputs for {len(given)} input_layouts\n"
                "  rule: one layout for each positional input, None for one to leave alone\n"
                "  fix: lengthen input_layouts, or use input_kwarg_layouts for inputs passed by name"
            )
        pairs = zip(inputs, given, desired, strict=True)
        return tuple(self._prepare_input_arg(x, device_mesh, g, d) for x, g, d in pairs)

    def _prepare_input_kwarg_fn(self, inputs: Any, kwarg_inputs: Any, device_mesh: DeviceMesh) -> Any:
        """All inputs."""
        args, named = self._prepare_input_fn(inputs, device_mesh), dict(kwarg_inputs)
        for n in named.keys() & self.input_kwarg_layouts.keys():
            own, (over, call) = copy(self), self._here(device_mesh)
            own._applied = over, f"{call}, input {n!r}"
            given, desired = self.input_kwarg_layouts[n], self.desired_input_kwarg_layouts.get(n)
            named[n] = own._prepare_input_arg(named[n], device_mesh, given, desired)
        return args, named

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = self._for(module, device_mesh)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: own._prepare_input_kwarg_fn(args, kwargs, device_mesh), with_kwargs=True
        )
        return module

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts!r}, "
            f"desired_input_layouts={self.desired_input_layouts!r}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts!r}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts!r}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(_Prepare):
    """Bring a module's outputs into the layouts its callers want; a subclass may replace `_prepare_out_fn`, which does.

    Args:
        output_layouts: layouts of plain outputs, one for each output.
        desired_output_layouts: the layouts that the caller sees.
        use_local_output: the caller sees plain tensors instead of DTensors.

    Raises ValueError when the layouts do not come in pairs and, at the call, when the number of outputs differs.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        call = "PrepareModuleOutput"
        self.output_layouts = _as_tuple(call, "output_layouts", output_layouts) or ()
        self.desired_output_layouts = _as_tuple(call, "desired_output_layouts", desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _same_length(call, "output_layouts", "desired_output_layouts", self.output_layouts, self.desired_output_layouts)

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> object:
        """All outputs in their layouts."""
        several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        given, desired = self.output_layouts, self.desired_output_layouts
        if len(several) != len(given):
            raise ValueError(
                f"{self._here(device_mesh)[1]}: forward returned {len(several)} outputs for {len(given)} "
                "output_layouts\n  rule: one layout for each output, None for one to leave alone"
            )
        done = [self._convert(x, device_mesh, g, d) for x, g, d in zip(several, given, desired, strict=True)]
        return _like(outputs, done) if several is outputs else done[0]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = self._for(module, device_mesh)
        module.register_forward_hook(lambda _, args, output: own._prepare_out_fn(output, device_mesh))
        return module

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts!r}, "
            f"desired_output_layouts={self.desired_output_layouts!r}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; `use_local_input` is the former's `use_local_output`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self.over(device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in (self.prepare_module_input, self.prepare_module_output):
            part.axis, part.others, part.check_inputs = self.axis, self.others, self.check_inputs
            part.path = self.path
            part._apply(module, device_mesh)
        return module

    def __repr__(self) -> str:
        given, back = self.prepare_module_input, self.prepare_module_output
        return (
            f"PrepareModuleInputOutput(input_layouts={given.input_layouts!r}, "
            f"desired_input_layouts={given.desired_input_layouts!r}, "
            f"input_kwarg_layouts={given.input_kwarg_layouts!r}, "
            f"desired_input_kwarg_layouts={given.desired_input_kwarg_layouts!r}, "
            f"use_local_input={given.use_local_output}, output_layouts={back.output_layouts!r}, "
            f"desired_output_layouts={back.desired_output_layouts!r}, use_local_output={back.use_local_output})"
        )
