"""A decision bound to this rank, and the function that runs it: which inputs move and how, which local op or kernel
runs with which arguments, the specs of the outputs.

`Plan.execute(local, named, args)` is what the cache holds: `local` and `named` are the arguments with local tensors in
the DTensors' places, `args` the call's own positional arguments. Where nothing moves and the op runs as it is, it is
one of the short functions below; else the general one, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtensor.comm.communicator import traced
from dtensor.dispatch import late
from dtensor.dispatch import materialized as moved_views
from dtensor.dispatch import random as rng
from dtensor.dispatch.hit import Op, OpInfo
from dtensor.dispatch.materialized import MovedSpec, ViewCall, note_written
from dtensor.redistribute.executor.coalescing import may_meet, redistribute_together
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.call import Call
from dtensor.rules.decision import Decision
from dtensor.rules.deferred import Deferral
from dtensor.rules.kernel import KernelContext
from dtensor.rules.rule import Kernel
from dtensor.spec import Spec, in_order

__all__ = ["Execute", "Plan", "aliasing"]

Execute = Callable[[list[Any], dict[str, Any], tuple[Any, ...]], Any]
"""What runs a call: its local arguments, those by name, and the positional arguments as they were given."""


class Plan:
    """A decision bound to this rank. `execute(local, kwargs, args)` runs it."""

    __slots__ = (
        "call", "decision", "execute", "inplace", "kernel", "moves", "out", "overrides", "places", "reorder", "run",
        "seed", "together", "written",
    )  # fmt: skip

    def __init__(self, info: OpInfo, call: Call, decision: Decision, structure: str, arg_names: Sequence[str]) -> None:
        bound = decision.rule.bind(decision.inputs, decision.outputs) if decision.rule.bind else None
        self.call, self.decision, self.run = call, decision, bound or info.run
        self.kernel = decision.kernel
        if self.kernel is None and decision.rule.local is not None:
            part = decision.rule.local(decision.inputs, decision.outputs)
            self.kernel = None if part is None else Kernel("local", frozenset(), (), part)
        self.moves = tuple(
            (i, s, d) for i, (s, d) in enumerate(zip(call.inputs, decision.inputs, strict=True)) if s is not d
        )
        self.together = may_meet([src for _, src, _ in self.moves])
        self.places = _places(call, arg_names)
        given = decision.rule.localize(decision.inputs, decision.outputs) if decision.rule.localize else {}
        self.overrides = tuple((_position(call.op, name), name, value) for name, value in given.items())
        outs = decision.outputs
        self.out: Any = outs[0] if structure == "one" else outs
        self.inplace = bool(info.written) and (info.gives_target or not info.func._schema.returns)
        self.written = info.written_at
        self.seed = info.entry is not None and info.entry.random and bound is None
        outside = call.inputs[0].mesh.coord is None
        simple = not (self.moves or self.overrides or self.kernel or self.written or self.seed or outside)
        # What was moved or made otherwise than by the op may lie in memory in another order than the spec says.
        own_order = bound is None or getattr(bound, "in_order", False)
        self.reorder = bool(self.moves or (not info.is_view and (self.kernel or not own_order)))
        simple = simple and not self.reorder
        if outside:
            self.execute = self._outside
        elif simple and structure == "one":
            self.execute = (
                _simple_view(self.run, outs[0], info.func) if info.is_view else _simple_one(self.run, outs[0])
            )
        elif simple and structure != "none":
            self.execute = _simple_many(self.run, outs, list if structure == "list" else tuple)
        elif self.inplace and not (self.moves or self.overrides or self.kernel or self.seed) and structure == "one":
            self.execute = _simple_inplace(self.run, self.written)
        else:
            self.execute = self._general(structure)
        if info.is_view:
            if not (simple and structure == "one"):
                self.execute = _as_base(self.execute, info.func)
        elif any(s is not None and s.dtype.is_complex for s in (*decision.inputs, *outs)):
            self.execute = _with_lazy_values(self.execute)

    def local_inputs(self, local: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The local arguments after the moves and with static arguments made local."""
        if self.moves or self.overrides:
            local, named = [list(x) if isinstance(x, list) else x for x in local], dict(named)
            self.move(local, named)
            for at, name, value in self.overrides:
                if at < len(local):
                    local[at] = value
                else:
                    named[name] = value
        return local, named

    def move(self, local: list[Any], named: dict[str, Any]) -> None:
        """Put the moved tensors in their places; on an accelerator several collectives may be one launch."""
        boxes: list[tuple[Any, Any]] = []
        for i, _, _ in self.moves:
            at, sub = self.places[i]
            box: Any = local if isinstance(at, int) else named
            boxes.append((box, at) if sub is None else (box[at], sub))
        jobs = [(box[at], src, dst) for (box, at), (_, src, dst) in zip(boxes, self.moves, strict=True)]
        moved = redistribute_together(jobs) if self.together else (redistribute_local(*job) for job in jobs)
        for (box, at), tensor in zip(boxes, moved, strict=True):
            box[at] = tensor

    def compute(self, local: list[Any], named: dict[str, Any]) -> Any:
        """Moves, then the local op or kernel: local results."""
        local, named = self.local_inputs(local, named)
        if self.kernel is not None:
            run: Callable[[], Any] = lambda: self.kernel.run(self._context(local, named))  # type: ignore[union-attr]  # noqa: E731
        else:
            run = lambda: self.run(*local, **named)  # noqa: E731
        if not self.seed:
            return run()
        spec = next((s for s in self.decision.outputs if s is not None), self.decision.inputs[0])
        at, sub = self.places[0]
        box: Any = local[at] if isinstance(at, int) else named[at]
        first = box if sub is None else box[sub]
        generator = named.get("generator")
        if isinstance(generator, torch.Generator):
            return rng.run_seeded(run, spec, generator, first.device)
        generator = next((a for a in local if isinstance(a, torch.Generator)), None)
        return rng.run_seeded(run, spec, generator, first.device)

    def _context(self, local: list[Any], named: dict[str, Any]) -> KernelContext:
        arguments: dict[str, Any] = {a.name: a.default_value for a in self.call.op._schema.arguments}
        arguments.update(zip((a.name for a in self.call.op._schema.arguments), local, strict=False))
        arguments.update(named)
        inputs = []
        for at, sub in self.places:
            box = local[at] if isinstance(at, int) else named[at]
            inputs.append(box if sub is None else box[sub])
        d = self.decision
        return KernelContext(self.call, d.kernel_axes, d.kernel_factors, inputs, d.inputs, d.outputs, arguments)

    def _general(self, structure: str) -> Callable[..., Any]:
        outs = self.decision.outputs
        view = _aliases(self.call.op)
        moved_view = view and bool(self.moves or self.kernel)  # a kernel's result is memory of its own

        def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
            got = self.compute(local, named)
            if self.written:
                note_written(args, self.written)
            if self.inplace:
                if self.kernel is not None and structure == "one":
                    args[0]._local_tensor.copy_(got)
                return args[0] if structure == "one" else None
            if structure == "none":
                return got
            if type(got) is Deferral:
                waiting = got.specs(outs, self.decision.kernel_axes)
                return tuple(_wrap(g, s) for g, s in zip(got.parts, waiting, strict=True))
            if self.reorder:
                got = _in_order(got, outs)
            if moved_view:
                return self._moved_view(got, structure, args, named)
            if structure == "one":
                return _wrap(got, outs[0])
            made = [_wrap(g, s) for g, s in zip(got, outs, strict=True)]
            return made if structure == "list" else tuple(made)

        return execute

    def _moved_view(self, got: Any, structure: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Views of `args[0]`, which had to move: each with the call that takes it again."""
        many = [got] if structure == "one" else got
        made = []
        for i, (t, spec) in enumerate(zip(many, self.decision.outputs, strict=True)):
            view = ViewCall(self.call.op, args[1:], dict(named), None if structure == "one" else i)
            made.append(_wrap(t, None if spec is None else MovedSpec.of(spec, t, args[0], view)))
        return made[0] if structure == "one" else made if structure == "list" else tuple(made)

    def _outside(self, local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """A rank outside the mesh computes nothing and gets empty shards."""
        if self.inplace:
            return args[0]
        leaves = pytree.tree_leaves([local, named])
        device = named.get("device") or next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        empty = lambda s: torch.zeros(s.local_shape, dtype=s.dtype, device=device)  # noqa: E731
        made = [None if s is None else _wrap(empty(s), s) for s in self.decision.outputs]
        return made[0] if isinstance(self.out, Spec) else made


def _simple_one(run: Callable[..., Any], spec: Spec | None) -> Callable[..., Any]:
    new, D = late.new, late.DTensor

    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        return new(D, run(*local, **named) if named else run(*local), spec, requires_grad=False)

    return execute


def _simple_view(run: Callable[..., Any], spec: Spec | None, func: Op) -> Callable[..., Any]:
    """`_as_base` of `_simple_one`, in one call."""
    new, D, inference, plain = late.new, late.DTensor, torch.is_inference_mode_enabled, torch.Tensor

    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if inference() and not args[0].is_inference():
            with torch.inference_mode(False):
                return new(D, run(*local, **named), spec, requires_grad=False)
        made = new(D, run(*local, **named) if named else run(*local), spec, requires_grad=False)
        return made if type(local[0]) is plain else aliasing(made, args[0], func, args, named)

    return execute


def _as_base(execute: Callable[..., Any], func: Op) -> Callable[..., Any]:
    """In inference mode a view of an ordinary tensor is an ordinary tensor, as in torch."""
    inference, plain = torch.is_inference_mode_enabled, torch.Tensor

    def view(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if inference() and not args[0].is_inference():
            with torch.inference_mode(False):
                return execute(local, named, args)
        made = execute(local, named, args)
        return made if type(local[0]) is plain else aliasing(made, args[0], func, args, named)

    return view


def aliasing(views: Any, base: Any, func: Op, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Views of `base`, one or several, as `func` gave them; in a trace a compiler has to see what they are views of."""
    if traced(base._local_tensor):
        several = isinstance(views, (list, tuple))
        for i, view in enumerate(views if several else (views,)):
            moved_views.note_view(view, base, ViewCall(func, args[1:], dict(named), i if several else None))
    return views


def _with_lazy_values(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Let local ops see conjugations and negations that torch keeps as a bit, and hides where it dispatches to us."""
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

    def run(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        before = [excluded(k) for k in keys]
        for k in keys:
            exclude(k, False)
        try:
            return execute(local, named, args)
        finally:
            for k, was in zip(keys, before, strict=True):
                exclude(k, was)

    return run


def _simple_many(run: Callable[..., Any], specs: Sequence[Spec | None], kind: type) -> Callable[..., Any]:
    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        got = run(*local, **named)
        return kind([
            _wrap(g, s) for g, s in zip(got, specs, strict=True)
        ])  # fmt: skip

    return execute


def _simple_inplace(run: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        run(*local, **named)
        if moved_views._alive:
            note_written(args, written)
        return args[0]

    return execute


def _in_order(got: Any, outs: Sequence[Spec | None]) -> Any:
    if isinstance(got, torch.Tensor):
        return got if outs[0] is None else in_order(got, outs[0].stride)
    return [
        in_order(g, s.stride) if s is not None and isinstance(g, torch.Tensor) else g
        for g, s in zip(got, outs, strict=True)
    ]


def _wrap(local: Any, spec: Spec | None) -> Any:
    """A result as a DTensor."""
    if spec is None or local is None:
        return None if isinstance(local, torch.Tensor) else local
    return late.new(late.DTensor, local, spec, requires_grad=False)


def _aliases(op: Op) -> bool:
    returns = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _position(op: Op, name: str) -> int:
    """Position of argument `name` in the schema; beyond all for one that is given by name only."""
    return next((i for i, a in enumerate(op._schema.arguments) if a.name == name and not a.kwarg_only), 1 << 30)


def _places(call: Call, arg_names: Sequence[str]) -> tuple[tuple[Any, int | None], ...]:
    """Per input where it sits among the arguments: position (or name) and position in a list."""
    out: list[tuple[Any, int | None]] = []
    for name in call.names:
        base, _, sub = name.partition(".")
        at: Any = arg_names.index(base) if base in arg_names else base
        out.append((at, int(sub) if sub else None))
    return tuple(out)
