"""Mistakes in a program's rules: refused when a rule is registered, built or run, with the op, the rule and the place.

    registered    the op exists, `values` are arguments of it, a pattern fits its schema
    built         the builder gives a Rule (or None), and that fits the call
    run           what computes in the op's place gives as many tensors as the op does

The engine's own rules are held to numbers by the tests, and pass none of this when they run.
"""

from __future__ import annotations

import difflib
import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.errors import CollectiveError, LayoutError, NoRuleError, RuleError, explain_error
from dtensor.folders import NOT_A_PROGRAMS, users_line
from dtensor.placement import Partial
from dtensor.redistribute.cost_model import CostModel
from dtensor.rules.call import Call
from dtensor.rules.deferred import Deferral
from dtensor.rules.kernel import KernelContext
from dtensor.rules.rule import ANY, Dims, Entry, Kernel, LocalPart, Rule

__all__ = [
    "check_reduction", "checked_rule", "depends_on_data", "overloads", "place_of", "unknown_values",
]  # fmt: skip

Op = torch._ops.OpOverload

_THEIRS = (LayoutError, CollectiveError, NoRuleError, RuleError, torch.OutOfMemoryError)
"""Errors that say by themselves what is wrong, with a call or with a group."""
_PYTHONS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Errors whose words say less than the line of code that raised them."""


# ------------------------------------------------------------ places in a program
def place_of(f: object) -> str:
    """`file:line` where a function of a program is defined; for anything else, the line that registers it."""
    code = getattr(f, "__code__", None)
    if code is None or code.co_filename.startswith(NOT_A_PROGRAMS):
        return users_line()
    return f"{code.co_filename}:{code.co_firstlineno}"


def _raised(error: Exception) -> str:
    """What a program's function raised, and where: the innermost line that is neither this package's nor torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(NOT_A_PROGRAMS)]
    at = theirs[-1] if theirs else None
    own = at is not None and at is frames[-1] and (at.line or "raise").startswith("raise")  # the program's words
    said = f"raised {type(error).__name__}"
    said += "" if isinstance(error, _PYTHONS) and theirs and not own else f": {error}"[:600]
    return said if at is None else f"{said}\n  at {at.filename}:{at.lineno}: {(at.line or '')[:200]}"


# ------------------------------------------------------------ when a rule is registered
def overloads(name: str) -> tuple[Op, ...]:
    """The overloads that a rule registered under `name` is for. ValueError where there are none."""
    space, packet, *overload = name.split(".")
    found = getattr(getattr(torch.ops, space), packet, None)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise ValueError(f"there is no operator {name!r}{_like(name)}; import what defines it first")
    known = found.overloads()
    if overload and overload[0] not in known:
        raise ValueError(f"{space}.{packet} has no overload {overload[0]!r}, it has {', '.join(known)}")
    ops = tuple(getattr(found, o) for o in overload or known)
    rest = tuple(op for op in ops if not any(a.is_out for a in op._schema.arguments))
    if all(torch.Tag.inplace_view in op.tags for op in rest):
        raise ValueError(f"{name} runs as the form that writes nothing: register a rule for that one")
    if all(depends_on_data(op) for op in rest):
        raise ValueError(f"the shape of {name}'s result depends on data, so that it always runs on gathered inputs")
    return rest


def depends_on_data(op: Op) -> bool:
    """True where the shapes of the results, or results that are no tensors, depend on what tensors hold."""
    return torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags


def _like(name: str) -> str:
    space, packet = name.split(".")[:2]
    every = (str(n).partition(".")[0].replace("::", ".") for n in torch._C._dispatch_get_all_op_names())
    near = difflib.get_close_matches(f"{space}.{packet}", sorted(set(every)), n=3, cutoff=0.75)
    return f" (is it {' or '.join(near)}?)" if near else ""


def unknown_values(values: Iterable[str], ops: Sequence[Op]) -> str:
    """What is wrong with the names in `values`, in a few words; empty where nothing is."""
    names = list(dict.fromkeys(a.name for op in ops for a in op._schema.arguments))
    for value in values:
        if not isinstance(value, str) or value not in (*names, "*"):
            near = difflib.get_close_matches(str(value), names, n=1)
            is_it = f" (is it {near[0]}?)" if near else ""
            return f"values names {value!r}{is_it}, which is no argument of it; its arguments: {', '.join(names)}"
    return ""


def check_reduction(name: object) -> None:
    """ValueError unless `name` is a reduction that a placement can be pending in."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no reduction")
    Partial(name)


# ------------------------------------------------------------ when it is built
def checked_rule(entry: Entry, call: Call) -> Rule | None:
    """The rule that a program's builder gives for a call. RuleError where it fails, or cannot be meant."""
    try:
        rule = entry.build(call)
    except _THEIRS:
        raise
    except Exception as error:
        raise _fault(entry, call, f"the builder {_raised(error)}") from error
    if rule is None:
        return None
    wrong = f"the builder gave {_short(rule)}, not a Rule or None" if not isinstance(rule, Rule) else misfit(rule, call)
    if wrong:
        raise _fault(entry, call, wrong)
    kernels = tuple(replace(k, run=_guarded(entry, call, f"the kernel {k.name!r}", k.run)) for k in rule.kernels)
    return replace(
        rule, kernels=kernels, bind=_bind(entry, call, rule), local=_local(entry, call, rule),
        localize=_localize(entry, call, rule),
    )  # fmt: skip


def _fault(entry: Entry, call: Call, what: str) -> RuleError:
    return RuleError(
        explain_error(
            f"{call.op}, rule {entry.text[:300]!r} of {entry.where}", ", ".join(map(str, call.inputs))[:500], what,
            "correct the rule; dtensor.rules.pattern('m k, k n -> m n') shows what a right one looks like",
        )
    )  # fmt: skip


def _short(x: object) -> str:
    text = repr(x)
    return f"{text[:80]}..." if len(text) > 80 else text


def misfit(rule: Rule, call: Call) -> str:
    """Why a rule cannot be meant for a call, in a few words; empty where it can."""
    try:
        return _misfit(rule, call)
    except ValueError as error:
        return str(error)
    except _PYTHONS as error:
        return f"a field of it is of the wrong type, or holds what is: {type(error).__name__}"


def _misfit(rule: Rule, call: Call) -> str:
    n = len(rule.sizes)
    shapes = [tuple(s.shape) for s in call.inputs], [None if m is None else tuple(m.shape) for m in call.outputs]
    for kind, tensors, given in (("input", rule.inputs, shapes[0]), ("output", rule.outputs, shapes[1])):
        if len(tensors) != len(given):
            return f"it has {len(tensors)} {kind}s, the call {len(given)}"
        for i, (dims, shape) in enumerate(zip(tensors, given, strict=True)):
            wrong = "" if shape is None else _dims_misfit(rule, dims, shape)
            if wrong:
                return f"{kind} {i}: {wrong}"
    marked = rule.whole
    sets = {"whole": rule.whole, "nonempty": rule.nonempty, "reduce": frozenset(rule.reduce)}
    sets |= {f"kernel {k.name!r}": k.factors for k in rule.kernels}
    for name, factors in sets.items():
        if not all(isinstance(f, int) and 0 <= f < n for f in factors):
            return f"{name} has factors {sorted(factors)}, there are {n}"
    groups = {"addends": rule.addends, "stays": rule.stays} | {"linear": frozenset[int]().union(*_groups(rule))}
    for name, inputs in groups.items():
        if not all(isinstance(i, int) and 0 <= i < len(rule.inputs) for i in inputs):
            return f"{name} names inputs {sorted(inputs)}, there are {len(rule.inputs)}"
    if rule.localize is None and rule.bind is None and rule.local is None:
        known = {f for dims in rule.inputs for d in dims for f in d}
        new = {f for dims in rule.outputs for d in dims for f in d} - known - marked
        if new:
            return f"factors {sorted(new)} of the outputs are in no input; those that are gathered belong to `whole`"
    for op in (*rule.reduce.values(), *(out for g in rule.linear for _, out in g.ops if out != ANY)):
        check_reduction(op)
    return next((wrong for k in rule.kernels if (wrong := _kernel_misfit(k, len(call.outputs)))), "")


def _groups(rule: Rule) -> list[frozenset[int]]:
    return [g.inputs for g in rule.linear]


def _dims_misfit(rule: Rule, dims: Dims, shape: tuple[int, ...]) -> str:
    if len(dims) != len(shape):
        return f"{len(dims)} dims for a tensor of {len(shape)}"
    seen: set[int] = set()
    for d, (factors, size) in enumerate(zip(dims, shape, strict=True)):
        if not all(isinstance(f, int) and 0 <= f < len(rule.sizes) for f in factors):
            return f"dim {d} has factors {factors}, there are {len(rule.sizes)}"
        whole = any(f in rule.whole for f in factors)
        if factors and not whole and math.prod(rule.sizes[f] for f in factors) != size:
            return f"dim {d} has size {size}, its factors have sizes {[rule.sizes[f] for f in factors]}"
        if any(f in seen for f in factors if f not in rule.whole):
            return f"a factor of dim {d} is also in another dim, so that it cannot be sharded: it belongs to `whole`"
        seen.update(factors)
    return ""


def _kernel_misfit(kernel: Kernel, outputs: int) -> str:
    if len(kernel.outputs) != outputs:
        return f"the kernel {kernel.name!r} says {len(kernel.outputs)} outputs, the call has {outputs}"
    for how in kernel.outputs:
        if how not in ("shard", "replicate"):
            check_reduction(how)
    if not callable(kernel.run):
        return f"the kernel {kernel.name!r} runs {_short(kernel.run)}, which is no function"
    if not callable(getattr(CostModel, kernel.moves, None)):
        return f"the kernel {kernel.name!r} moves {kernel.moves!r}, of which the cost model knows nothing"
    return ""


# ------------------------------------------------------------ when it runs
def _bind(entry: Entry, call: Call, rule: Rule) -> Callable[..., Any] | None:
    if rule.bind is None:
        return None
    made = _guarded(entry, call, "bind", rule.bind, _function)

    def bind(ins: Any, outs: Any) -> Callable[..., object] | None:
        f: Any = made(ins, outs)
        if f is None:
            return None
        run = _guarded(entry, call, "what bind gave", f)
        if getattr(f, "in_order", False):
            run.in_order = True  # type: ignore[attr-defined]
        return run

    return bind


def _local(entry: Entry, call: Call, rule: Rule) -> LocalPart | None:
    if rule.local is None:
        return None
    made = _guarded(entry, call, "local", rule.local, _function)

    def local(ins: Any, outs: Any) -> Callable[[KernelContext], object] | None:
        f: Any = made(ins, outs)
        return None if f is None else _guarded(entry, call, "what local gave", f)

    return local


def _localize(entry: Entry, call: Call, rule: Rule) -> Callable[..., Any] | None:
    names = {a.name for a in call.op._schema.arguments}

    def arguments(got: object) -> str:
        if not isinstance(got, Mapping):
            return f"gave {_short(got)}, not values by argument name"
        return "".join(f"gave {n!r}, which is no argument" for n in list(got)[:1] if not names >= set(got))

    return None if rule.localize is None else _guarded(entry, call, "localize", rule.localize, arguments)


def _function(got: object) -> str:
    return "" if got is None or callable(got) else f"gave {_short(got)}, not a function or None"


def _guarded(
    entry: Entry, call: Call, what: str, f: Callable[..., Any], misfits: Callable[[object], str] | None = None
) -> Callable[..., Any]:
    """`f` of a program's rule: an error names the rule; what it gives is checked, as the op's results if not told."""
    check = misfits or functools.partial(_results_misfit, call)

    @functools.wraps(f, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            got = f(*args, **kwargs)
        except _THEIRS:
            raise
        except Exception as error:
            raise _fault(entry, call, f"{what} {_raised(error)}") from error
        wrong = check(got)
        if wrong:
            raise _fault(entry, call, f"{what}, of {place_of(f)}, {wrong}")
        return got

    return run


def _results_misfit(call: Call, got: object) -> str:
    """Why results are not those of the op, in a few words; shapes and dtypes are checked by dispatch."""
    returns = call.op._schema.returns
    if isinstance(got, Deferral) or not returns:
        return ""
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return "" if isinstance(got, torch.Tensor) else f"gave {_short(got)} for a tensor"
    if not isinstance(got, (list, tuple)) or len(got) != len(call.outputs):
        return f"gave {_short(got)} for {len(call.outputs)} results"
    for i, (t, meta) in enumerate(zip(got, call.outputs, strict=True)):
        if meta is not None and not isinstance(t, torch.Tensor):
            return f"gave {_short(t)} for result {i}, a tensor"
    return ""
