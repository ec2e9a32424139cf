"""One trace of a program: run it on tensors without values, note what it computed and what it left changed.

A trace leaves no trace: DTensors get fake local tensors while it runs, and their own back afterwards; containers that
the program changed (the state of an optimizer, mostly) and gradients are put back as they were. What the program did
to them is kept as *effects*, which `Program.run` does again with real tensors at every call.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.distributed._functional_collectives  # noqa: F401 - the shapes of functional collectives
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from dtensor.dispatch import late
from dtensor.dispatch.materialized import MovedSpec, settled_spec
from dtensor.lowering.program import Known, Made, Program, Template, Value, as_function, drop_unused, simplify
from dtensor.lowering.reach import VALUES, Reach, Read, read
from dtensor.lowering.record import Recorder, recording, refuse

__all__ = ["trace"]


def is_dtensor(x: object) -> bool:
    """True for a DTensor."""
    return isinstance(x, late.DTensor)


@contextlib.contextmanager
def _compiling(reach: Reach) -> Iterator[None]:
    """Inside, optimizers keep their step counts in tensors, as they do when a compiler looks on."""
    groups = [g for o in reach.optimizers for g in o.param_groups if g.get("capturable") is False]
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    for g in groups:
        g["capturable"] = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        for g in groups:
            g["capturable"] = False


class _Tracer:
    def __init__(self, reach: Reach, objects: Sequence[Any], plain: Sequence[tuple[Any, torch.Tensor]]) -> None:
        self.reach, self.objects, self.plain = reach, objects, plain
        self.program = Program()
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.recorder = Recorder(self.fake)
        self.values: list[torch.fx.Node] = []
        self.made: dict[int, tuple[Any, Made]] = {}
        self.place = {id(x): i for i, x in enumerate(objects)}
        self.fakes: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.replaced: dict[int, torch.Tensor] = {}

    # ------------------------------------------------------------ inputs
    def placeholder(self, name: str, kind: str, at: Any, real: torch.Tensor, layout: str) -> torch.Tensor:
        """A fake tensor for `real`, and the graph's input for it."""
        made = self._without_values(real, name)
        safe = "".join(c if c.isalnum() else "_" for c in name)
        node = self.recorder.graph.placeholder(safe if safe[:1].isalpha() else f"v_{safe}")
        node.target = node.name  # names may recur, arguments may not
        node.meta["val"] = made
        self.recorder.know(made, node)
        self.program.inputs.append((kind, at))
        self.program.layouts[node.name] = layout
        return made

    def _without_values(self, real: torch.Tensor, name: str) -> torch.Tensor:
        """A fake tensor like `real`, in a memory of its own: which inputs share memory may be another at every call."""
        if real.is_conj() or real.is_neg():
            raise refuse(
                f"{name}, lazily conjugated or negated", str(list(real.shape)), "inputs are as they are", "clone it"
            )
        shape, stride, offset = real.shape, real.stride(), real.storage_offset()
        with self.fake:
            if not offset:
                return torch.empty_strided(shape, stride, dtype=real.dtype, device=real.device)
            span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if real.numel() else 0
            return torch.empty(offset + span, dtype=real.dtype, device=real.device).as_strided(shape, stride, offset)

    def put(self, x: Any, fake: torch.Tensor | None) -> None:
        """Let ops on `x` get `fake`."""
        assert fake is not None
        if is_dtensor(x):
            x._local_tensor = fake
        else:
            self.recorder.stand_ins[id(x)] = fake
            self.recorder.know(x, self.recorder.node_of(fake))

    # ------------------------------------------------------------ results
    def value(self, t: torch.Tensor) -> int:
        """The number of `t` among the graph's outputs."""
        if type(t).__name__ == "AsyncCollectiveTensor":
            t = t.wait()  # type: ignore[attr-defined]
        node = self.recorder.node_of(t)
        if node not in self.values:
            self.values.append(node)
        return self.values.index(node)

    def leaf(self, x: Any, what: str) -> Any:
        """`x` with a number in the place of a tensor."""
        if id(x) in self.place:
            return Known(self.place[id(x)])
        if is_dtensor(x):
            if id(x) not in self.made:
                spec = settled_spec(x, "lower")
                self.made[id(x)] = (x, Made(len(self.program.wrapped)))
                self.program.wrapped.append((self.value(x._local_tensor), spec))
            return self.made[id(x)][1]
        if isinstance(x, torch.Tensor):
            return Value(self.value(x))
        if isinstance(x, (torch.nn.Module, torch.optim.Optimizer)) or callable(x):
            raise refuse(what, repr(x)[:80], "a lowered program gives tensors and numbers", "return those")
        return x

    def template(self, x: Any, what: str) -> Template:
        """`x` as a template."""
        if isinstance(x, torch.Tensor) or isinstance(x, VALUES):
            return Template([self.leaf(x, what)], None)
        leaves, spec = pytree.tree_flatten(x)
        return Template([self.leaf(v, what) for v in leaves], spec)


def trace(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], reach: Reach, objects: Sequence[Any],
    plain: Sequence[tuple[Any, torch.Tensor]], names: Sequence[str], plain_names: Sequence[str],
    reads: dict[tuple[int, str], Read],
) -> Program:  # fmt: skip
    """Trace `fn(*args, **kwargs)`.

    `objects`: every DTensor that it may use, and every plain leaf that requires grad; `plain`: every other plain tensor
    and the place that holds it, or None for arguments, which are taken out of `args` and `kwargs` by identity. `names`,
    `plain_names`: what to call them. Objects stay the same ones while the program runs: DTensors with other local
    tensors, plain leaves with a stand-in that the recorder gives to the ops on them. `reads`: where what is read of
    modules is noted.
    """
    t = _Tracer(reach, objects, plain)
    t.recorder.reads = reads
    before = [(box, dict(box) if isinstance(box, dict) else list(box)) for box in reach.boxes]
    local = [(x, local_of(x), x.grad if x.is_leaf else None) for x in objects]
    own_grads: list[tuple[Any, torch.Tensor]] = [(g, local_of(g)) for _, _, g in local if is_dtensor(g)]
    replaced = t.replaced
    try:
        for i, (x, real, grad) in enumerate(local):
            _check_object(x, grad, names[i])
            fake = t.placeholder(names[i], "local" if is_dtensor(x) else "own", i, real, layout_of(x))
            t.fakes.append((fake, None))
            if grad is not None:
                kind = "grad" if is_dtensor(grad) else "own grad"
                t.fakes[-1] = fake, t.placeholder(f"{names[i]}_grad", kind, i, local_of(grad), layout_of(grad))
        for i, (_, real) in enumerate(plain):
            replaced[id(real)] = t.placeholder(plain_names[i], "plain", i, real, "plain")
        for (x, _, grad), (fake, fake_grad) in zip(local, t.fakes, strict=True):
            t.put(x, fake)
            if grad is not None:
                t.put(grad, fake_grad)
        for place, real in plain:
            if place is not None:
                place[0][place[1]] = replaced[id(real)]
        swap = lambda a: replaced.get(id(a), a)  # noqa: E731
        args, kwargs = pytree.tree_map(swap, args), pytree.tree_map(swap, kwargs)
        with _compiling(reach):
            start = [(box, dict(box) if isinstance(box, dict) else list(box)) for box, _ in before]
            own = [(x, fake, grad, fake_grad) for (x, _, grad), (fake, fake_grad) in zip(local, t.fakes, strict=True)]
            with recording(t.recorder), t.fake, t.recorder:
                result = _call(fn, args, kwargs)
                _finish(t, result, start, own)
    finally:
        for box, old in before:
            if isinstance(box, dict):
                if isinstance(old, dict) and (len(box) != len(old) or any(box.get(k) is not v for k, v in old.items())):
                    box.clear()
                    box.update(old)
            else:
                box[:] = old
        for place, real in plain:
            if place is not None and read(place) is not real:
                place[0][place[1]] = real
        for g, real in own_grads:
            g._local_tensor = real
        for x, real, grad in local:
            if is_dtensor(x):
                x._local_tensor = real
            if x.is_leaf and x.grad is not grad:
                x.grad = grad
    return t.program


def local_of(x: Any) -> torch.Tensor:
    """The tensor of this rank: a DTensor's local one, a plain tensor itself."""
    local: torch.Tensor = x._local_tensor if is_dtensor(x) else x
    return local


def layout_of(x: Any) -> str:
    """A DTensor's spec, as text."""
    return str(x._spec) if is_dtensor(x) else "plain"


def _check_object(x: Any, grad: Any, name: str) -> None:
    spec = x._spec if is_dtensor(x) else f"plain {list(x.shape)}"
    if isinstance(spec, MovedSpec):
        raise refuse(
            f"{name}, a view that had to move data", str(spec), "it is a copy that follows its base", "clone it"
        )
    if not x.is_leaf and torch.is_grad_enabled():
        raise refuse(
            f"{name}, the result of ops that autograd recorded", str(spec),
            "a backward inside the program would go on outside of it", "pass x.detach().requires_grad_()",
        )  # fmt: skip
    if grad is not None and is_dtensor(x) and not is_dtensor(grad):
        raise refuse(
            f"the gradient of {name}", f"a plain tensor for {spec}", "it must be a DTensor", "set x.grad = None"
        )


def _call(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    states = random.getstate(), str(numpy.random.get_state())
    try:
        result = fn(*args, **kwargs)
        if states != (random.getstate(), str(numpy.random.get_state())):
            random.setstate(states[0])
            raise refuse(
                "a program that draws numbers from Python or numpy", "their generators have gone on",
                "they would be baked in as constants", "draw them outside and pass them, or draw with torch",
            )  # fmt: skip
        return result
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise refuse(
            "a program that looks at values", str(e), "a lowered program runs the same ops whatever the values are",
            "keep item(), float(), tolist() and `if` on tensors outside of the function, or return the tensor",
        ) from e  # fmt: skip


def _finish(
    t: _Tracer, result: Any, start: Sequence[tuple[Any, Any]], own: Sequence[tuple[Any, Any, Any, Any]]
) -> None:
    p, recorder = t.program, t.recorder
    p.result = t.template(result, "the result")
    for i, (x, fake, grad, fake_grad) in enumerate(own):
        if is_dtensor(x) and x._local_tensor is not fake:
            if isinstance(x._spec, MovedSpec) or x._spec.local_shape != fake.shape:
                raise refuse(
                    "a program that changes an input's layout or shape", str(x._spec), "inputs keep theirs", ""
                )
            p.locals.append((i, t.value(x._local_tensor)))
        now = x.grad if x.is_leaf else None
        if now is not grad:
            p.grads.append((i, None if now is None else t.template(now, "a gradient")))
        elif is_dtensor(grad) and local_of(grad) is not fake_grad:
            raise refuse("a program that gives a gradient other memory", layout_of(grad), "gradients keep theirs", "")
    for box, old in start:
        _changes(t, box, old)
    outputs = tuple(t.values)
    recorder.graph.output(outputs)
    _own_constants(recorder)
    simplify(recorder.graph)
    drop_unused(recorder.graph)
    for i, (_, fake, _, _) in enumerate(own):
        if fake.untyped_storage()._cdata in recorder.storages:
            p.written.append(i)
    memory = {i: t.replaced[id(real)].untyped_storage()._cdata for i, (_, real) in enumerate(t.plain)}
    p.plain_written = [i for i, at in memory.items() if at in recorder.storages]
    p.graph, p.constants = recorder.graph, recorder.constants
    users = [bool(n.users) for n in p.graph.nodes if n.op == "placeholder"]
    p.used = [i for i, u in zip(p.inputs, users, strict=True) if u]
    p.function = as_function(p.graph, p.constants)


def _changes(t: _Tracer, box: Any, old: Any) -> None:
    """Effects of the program on one container."""
    if isinstance(box, list):
        if len(box) != len(old):
            raise refuse("a program that makes a list longer or shorter", repr(old)[:80], "lists keep their length", "")
        pairs = [(i, old[i], box[i]) for i in range(len(box))]
    else:
        pairs = [(k, old.get(k, _GONE), box.get(k, _GONE)) for k in {**old, **box}]
    for key, was, now in pairs:
        if now is was or (isinstance(now, VALUES) and type(now) is type(was) and now == was):
            continue
        if now is _GONE:
            t.program.boxes.append((box, key, None))
            continue
        if isinstance(was, VALUES) and isinstance(now, VALUES) and was is not _GONE:
            raise refuse(
                f"a program that changes the Python value {key!r}", f"{was!r}, then {now!r}",
                "only tensors change inside a lowered program", "change it outside, or make it a tensor",
            )  # fmt: skip
        t.program.boxes.append((box, key, t.template(now, f"what is kept under {str(key)[:40]!r}")))


_GONE: Any = object()


def _own_constants(recorder: Recorder) -> None:
    """Constants that the program writes to are copied first."""
    for node in list(recorder.graph.nodes):
        if node.op == "get_attr" and node.meta["val"].untyped_storage()._cdata in recorder.storages:
            users = list(node.users)
            with recorder.graph.inserting_after(node):
                copy = recorder.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            for u in users:
                u.replace_input_with(node, copy)
