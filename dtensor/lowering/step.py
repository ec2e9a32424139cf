"""`dtensor.lower`: a step as one program of local ops and collectives, with no per-op cost of the engine.

    step = dtensor.lower(train_step, model, optimizer, x, y)      # traces; computes, sends and changes nothing
    for x, y in batches:
        loss = step(model, optimizer, x, y)                       # runs
    print(step)                                                   # inputs with layouts, ops, collectives with bytes
    step.graph_module                                             # the same as an fx.GraphModule of local tensors

The function may do what a step does: forward, `backward()`, an optimizer's step, writes in place. It runs once, through
autograd and the engine, on tensors without values; the ops on local tensors that come of it are the program
(`dtensor.lowering.record`). What the step changes is changed at every call: parameters and optimizer state in place, as
the step does it; `.grad` of leaves, and what an optimizer's first step puts into its state, as the trace left them
(`dtensor.lowering.trace`). Results come without autograd history: a backward belongs inside.

**Never stale.** A call runs a program only if all this is as it was in the trace, and traces again where it is not:

- DTensors: layout, mesh, global shape, stride, dtype, local stride and offset, requires_grad, hooks, `.grad`;
- plain tensors: shape, stride, dtype, device; equal tensors in equal places; other arguments: value and type;
- whatever the function can reach (`dtensor.lowering.reach`): every module, parameter, buffer, hook, optimizer,
  container, method, class attribute and Python number in its arguments, closure, defaults and globals is the same
  object, or an equal number (`module.training`, `group["lr"]`, `config.scale`, ...); so are the code of functions, what
  weak references and context variables lead to, whatever the trace has read of Python modules, by whatever name, and
  the environment where code names it;
- grad mode, inference mode, autocast, the default dtype, `implicit_replication`, the cost model.

**Not seen** are changes of files and of the clock, of what code in C keeps to itself (a `functools` cache that is
cleared), and of rules registered after the trace. A value that comes from there is baked in as a constant: pass it as
an argument.

What is compared is the same on all ranks of a program that is, so all ranks trace again together. A function that
cannot be traced raises `LowerError`: one that looks at values, has a random generator of its own, uses a tensor from
elsewhere, draws from Python's or numpy's generators, or changes Python numbers. Of more than `MAX_PROGRAMS` variants
those used last are kept, with a warning that names what changes.

Optimizers count their steps in tensors here, as they do under `torch.compile`, so Adam's bias corrections are computed
in float32. A learning rate that changes at every step should be a tensor.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dtensor.errors import expect
from dtensor.lowering.capture import Captured
from dtensor.lowering.guards import Variant, flatten, surroundings, traced
from dtensor.lowering.program import totals
from dtensor.lowering.record import LowerError

__all__ = ["LowerError", "Lowered", "lower"]

MAX_PROGRAMS = 32
"""Variants of one function that are kept."""


def lower(fn: Callable[..., Any], /, *example_args: Any, **example_kwargs: Any) -> Lowered:
    """`fn` as a program of local ops and collectives, traced for these arguments; see the module's text.

    Args:
        fn: a function on DTensors, plain tensors, modules, optimizers, numbers and containers of them.
        example_args, example_kwargs: arguments of a call. Nothing is computed with them and nothing is changed.

    Returns:
        A callable with the arguments of `fn`. It traces again for arguments that need another program.

    Raises:
        LowerError: the function cannot be traced; the message says what stands in the way.

    Later calls do not see what the function would read from files, from the clock and from code in C that keeps values:
    pass such values as arguments.
    """
    expect("lower", "fn", fn, Callable, "a function", "lower(train_step, model, inputs)")
    made = Lowered(fn)
    made._traced(example_args, example_kwargs)
    return made


class Lowered:
    """What `lower` gives: call it, print it, look at its `graph_module`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._variants: list[Variant] = []
        self._warned = False
        name = inspect.getattr_static(fn, "__name__", None)
        self._name: str = name if isinstance(name, str) else fn.__name__ if inspect.isroutine(fn) else type(fn).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten(args, kwargs)
        now = surroundings()
        for i, variant in enumerate(self._variants):
            if variant.suits(leaves, structure, now):
                if i:
                    self._variants.insert(0, self._variants.pop(i))
                return variant.run(leaves)
        return self._traced(args, kwargs).run(leaves)

    def capture(self, /, *args: Any, warmup: int = 3, **kwargs: Any) -> Captured:
        """The program for these arguments as a CUDA graph (`dtensor.lowering.capture`); all ranks must call it.

        It runs `warmup` times on copies, then is captured; nothing is changed. Raises LowerError for a program whose
        replay would not be what a call is: inputs that are not on one CUDA device, draws that seed a generator,
        containers or memory that the step renews, collectives of other groups than NCCL's.
        """
        leaves, structure = flatten(args, kwargs)
        now = surroundings()
        found = next((v for v in self._variants if v.suits(leaves, structure, now)), None)
        return Captured(self._name, found or self._traced(args, kwargs), leaves, warmup)

    def _traced(self, args: Any, kwargs: dict[str, Any]) -> Variant:
        if len(self._variants) >= MAX_PROGRAMS:
            if not self._warned:
                changed = self._variants[0].difference(*flatten(args, kwargs))
                warnings.warn(
                    f"dtensor.lower: {self._name} was traced {MAX_PROGRAMS} times and is traced again, as something "
                    f"that it depends on keeps changing ({changed}); a trace costs as much as many steps",
                    stacklevel=3,
                )
                self._warned = True
            self._variants.pop()
        made = traced(self._fn, args, kwargs)
        self._variants.insert(0, made)
        return made

    @property
    def programs(self) -> int:
        """How many variants were traced so far."""
        return len(self._variants)

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The last program as an `fx.GraphModule`: a function of the local tensors that it uses, to local tensors."""
        program = self._variants[0].program
        root = torch.nn.Module()
        for name, value in program.constants.items():
            root.register_buffer(name, value)
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        made = torch.fx.GraphModule(root, graph, class_name=f"Lowered_{self._name}")
        for node in list(made.graph.nodes):
            if node.op == "placeholder" and not node.users:
                made.graph.erase_node(node)
        made.recompile()
        return made

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Kind -> number of collectives of the last program, and the bytes that this rank receives in them."""
        return totals(self._variants[0].program.graph)

    def __str__(self) -> str:
        return self._variants[0].text(self._name)

    def __repr__(self) -> str:
        return f"<lowered {self._name}: {self.programs} program{'s' * (self.programs != 1)}>"
