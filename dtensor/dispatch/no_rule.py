"""An op without a rule: what it costs to run it all the same, said once; a mode that refuses it instead.

    composite in C++                       taken apart, always: its ops have rules
    torch has a Python decomposition       taken apart where that costs no more than gathering the inputs
    anything else of torch                 runs on gathered inputs, which is right, with one notice per op
    an op of another library               refused: nothing is known about what it does
    an op whose results have no shapes     as the two before, whatever rules it has: it has no meta kernel and cannot be
    before it runs                         run for them; what depends on data by its nature needs no notice

`strict_rules()` refuses the third kind with the call that registers a rule, and the second as well if asked; so does
the environment variable `DTENSOR_STRICT_RULES=1` (`=all`: the second too) for a whole program. Calls that move
nothing, because all inputs are replicated, are never refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch import random as rng
from dtensor.dispatch.call import (
    flat,
    is_dtensor,
    layouts,
    make_call,
    map_args,
    map_named,
    plain_wrapper,
    put_back,
    replicated_on,
)
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.materialized import note_written, settled_spec
from dtensor.dispatch.views import whole, write_local
from dtensor.errors import WITHOUT_SWAP, LayoutError, NoRuleError, explain_error, refuse_layout
from dtensor.folders import users_line
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.redistribute.plan import plan_reshard
from dtensor.rules.call import Call
from dtensor.rules.faults import depends_on_data
from dtensor.rules.rule import Rule

__all__ = [
    "guarded", "is_of_torch", "no_rule", "notice", "on_each_rank", "refuse_strict", "replicated_rule",
    "rule_to_gather", "run_gathered", "run_on_copies", "strict_rules", "strictness", "unshaped",
]  # fmt: skip

ENVIRONMENT = "DTENSOR_STRICT_RULES"
_LEVELS = {"": 0, "0": 0, "1": 1, "all": 2}

log = logging.getLogger("dtensor")
_noticed: set[str] = set()
_level: ContextVar[int | None] = ContextVar("strict_rules", default=None)


@contextlib.contextmanager
def strict_rules(*, decompositions: bool = False) -> Iterator[None]:
    """Inside, an op without a sharding rule that would gather its inputs raises NoRuleError instead.

    With `decompositions`, so does one that torch's Python decomposition would run; composites of torch's C++ are
    taken apart all the same. The error names the op, its layouts and the call that registers a rule. Nests; holds
    for the threads of `simulate` that start inside.

    Example:
        >>> with dtensor.strict_rules():
        ...     model(batch)
    """
    token = _level.set(2 if decompositions else 1)
    try:
        yield
    finally:
        _level.reset(token)


def strictness() -> int:
    """0: anything runs; 1: nothing that gathers for want of a rule; 2: no decomposition in Python either."""
    level = _level.get()
    if level is not None:
        return level
    text = os.environ.get(ENVIRONMENT, "")
    if text not in _LEVELS:
        raise ValueError(f"{ENVIRONMENT}={text!r}: must be 0, 1 or all")
    return _LEVELS[text]


def is_of_torch(name: str) -> bool:
    """True for the ops of torch itself, which do nothing but compute their results."""
    return name.startswith(("aten.", "prims.", "torch_nn."))


def replicated_rule(call: Call) -> Rule:
    """The rule of an op about which nothing is known: all inputs and outputs replicated."""
    return Rule(
        tuple(((),) * s.ndim for s in call.inputs),
        tuple(() if m is None else ((),) * len(m.shape) for m in call.outputs),
        (),
    )


def rule_to_gather(info: OpInfo, call: Call) -> Rule:
    """The rule of a call that runs on gathered inputs for want of one: said once, or refused."""
    if not is_of_torch(info.name):
        raise no_rule(info, call, NO_RULE)
    refuse_strict(info, call, 1)
    notice(info, call)
    return replicated_rule(call)


NO_RULE = "the operator has no sharding rule"


def unshaped(info: OpInfo) -> str:
    """What to say of an op whose results have no shapes before it runs, and that does not depend on data by nature."""
    has = "its sharding rule cannot be used" if info.entry is not None else NO_RULE
    return f"{has}, and its output cannot be predicted, as it has no fake (meta) kernel"


def no_rule(info: OpInfo, call: Call, why: str) -> NoRuleError:
    """The error for an op without a rule that can be used, with a call to paste."""
    got = ", ".join(f"{name}={_shown(a)}" for name, a in call.arguments.items())
    return NoRuleError(explain_error(info.name, got[:1000], why, how_to_register(info, call, why)))


def _shown(a: Any) -> str:
    return f"[{', '.join(map(_shown, a))}]" if isinstance(a, (list, tuple)) else str(a)


def how_to_register(info: OpInfo, call: Call, why: str = NO_RULE) -> str:
    """The call that registers a rule: as it stands it says that nothing may be sharded, which is always right."""
    name = info.name.rpartition(".")[0]
    if why.startswith(unshaped(info)):
        fake = f"torch.library.register_fake({name.replace('.', '::')!r})(f): f makes empty results from the arguments"
        rule = f"dtensor.experimental.register_sharding(torch.ops.{info.name})(f): f lists what may be sharded how"
        return fake if info.entry is not None else f"{fake}; then {rule}"
    if info.name.startswith("fsdp."):
        return WITHOUT_SWAP.partition("fix: ")[2]
    if info.name.startswith(("c10d.", "_c10d_functional.")):
        return "collectives take this process's tensors: x.to_local(); or use x.redistribute or x.full_tensor()"
    if not call.outputs or any("." in n for n in call.names):
        return f"dtensor.experimental.register_sharding(torch.ops.{info.name})(f): f lists what may be sharded how"
    letters = iter("abcdefghijklmnopqrstuvwxyz" * 8)
    sizes: dict[int, str] = {}

    def dims(shape: Sequence[int]) -> str:
        return " ".join("1" if n == 1 else sizes.setdefault(n, f"[{next(letters)}]") for n in shape)

    ins = ", ".join(dims(s.shape) for s in call.inputs)
    outs = ", ".join("" if m is None else dims(m.shape) for m in call.outputs)
    return (
        f"dtensor.rules.register({name!r}, dtensor.rules.pattern({f'{ins} -> {outs}'!r})), without the brackets "
        "around dims whose parts can be computed by themselves; letters stand for sizes, see dtensor.rules.patterns; "
        f"or dtensor.experimental.register_sharding(torch.ops.{info.name})"
    )


def refuse_strict(info: OpInfo, call: Call, level: int, why: str = NO_RULE) -> None:
    """NoRuleError where the strictness in force is at least `level` and the call would move something."""
    if strictness() >= level and not all(s.is_replicated() for s in call.inputs):
        how = "its decomposition in Python is refused too" if level == 2 else "it would run on gathered inputs"
        raise no_rule(info, call, f"{why}; under strict_rules {how}")


def guarded(execute: Callable[..., Any], info: OpInfo, call: Call, level: int) -> Callable[..., Any]:
    """`execute` of a plan that exists for want of a rule: cached, it is refused under `strict_rules` all the same."""

    def run(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if strictness() >= level:
            refuse_strict(info, call, level)
        return execute(local, named, args)

    return run


def notice(info: OpInfo, call: Call, why: str = "") -> None:
    """Say once per op that it runs on gathered inputs, when that moves anything: what, how much, from where."""
    if info.name in _noticed or all(s.is_replicated() for s in call.inputs):
        return
    _noticed.add(info.name)
    received, kinds = 0, list[str]()
    for s in call.inputs:
        plan = plan_reshard(s, s.replicated())
        kinds += plan.collectives
        received += plan.received_elements * s.dtype.itemsize
    log.warning(
        "%s %s and runs replicated: %s, %d bytes received by this rank for each call\n"
        "  layouts: %s\n  called at: %s\n  rule: %s",
        info.name, f"({why})" if why else "has no sharding rule", " + ".join(kinds) or "nothing sent", received,
        ", ".join(map(str, call.inputs)), users_line(),
        how_to_register(info, call, why),
    )  # fmt: skip


# ------------------------------------------------------------ gathered
def _gathered(a: Any, call: str) -> Any:
    """The whole of a DTensor, as a plain tensor; anything else as it is."""
    if not is_dtensor(a):
        return a
    spec = settled_spec(a, call)
    return redistribute_local(a._local_tensor, spec, spec.replicated())


def run_gathered(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output cannot be known before: every rank gathers the inputs and computes the same."""
    first = next(a for a in flat(args, kwargs) if is_dtensor(a))
    mesh = first._spec.mesh
    call, why = make_call(info.func, args, kwargs, ()), unshaped(info)
    if not is_of_torch(info.name):
        raise no_rule(info, call, why)
    if not depends_on_data(info.func):
        refuse_strict(info, call, 1, why)
        notice(info, call, why)
    if info.written and not all(s.is_replicated() for s in call.inputs):
        return run_on_copies(info, args, kwargs, everything=True)

    largs, lkwargs = map_args(lambda a: _gathered(a, info.name), args, kwargs)
    got = info.run(*largs, **lkwargs)

    def wrap(t: Any) -> Any:
        if isinstance(t, (list, tuple)):
            return type(t)(map(wrap, t))
        if not isinstance(t, torch.Tensor):
            return t
        if t.is_nested or t.layout not in (torch.strided, torch.sparse_coo):
            refuse_layout(f"{info.name}, the result", t)
        return replicated_on(mesh, t)

    note_written(args, info.written_at)
    if info.gives_target:
        return args[0]
    return wrap(got)


def on_each_rank(
    info: OpInfo, args: tuple[Any, ...], rest: dict[str, Any], given: dict[str, Any], like: Any
) -> list[Any]:  # fmt: skip
    """The results of an op that has no form without `out=`, such as a factory: every rank computes them whole."""
    mesh = like._spec.mesh
    spec = like._spec.replicated()
    call = make_call(info.func, args, rest, ())
    refuse_strict(info, call, 1)
    notice(info, call)

    def empty(t: Any) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device=like._local_tensor.device)

    made = map_args(empty, (), given)[1]
    args, rest = map_args(lambda a: _gathered(a, info.name), args, rest)
    run = lambda: info.func(*args, **rest, **made)  # noqa: E731
    if torch.Tag.nondeterministic_seeded in info.func.tags:
        rng.run_seeded(run, spec, rest.get("generator"), like._local_tensor.device)
    else:
        run()
    return [replicated_on(mesh, t) for t in flat((), made)]


DRAWS = frozenset("bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split())
"""Ops that draw numbers and do not read what they write."""


def run_on_copies(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], everything: bool = False) -> Any:
    """Run an op on replicated copies of the tensors it writes (of all its tensors, if asked), and write back."""
    written: list[tuple[Any, Any]] = []

    def copied(t: Any) -> Any:
        if not is_dtensor(t):
            return t
        spec = t._spec.replicated()
        if info.name.split(".")[1] in DRAWS:
            local = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=t._local_tensor.device)
        else:
            local = whole(t)
        made = plain_wrapper(local, spec)
        written.append((t, made))
        return made

    def replicated(t: Any) -> Any:
        return plain_wrapper(whole(t), t._spec.replicated()) if everything and is_dtensor(t) else t

    def convert(name: str, a: Any) -> Any:
        f = copied if name in info.written else replicated
        return [f(x) for x in a] if isinstance(a, (list, tuple)) else f(a)

    new_args, new_kwargs = map_named(convert, info.func, args, kwargs)
    if all(t._spec is made._spec for t, made in written) and not everything:
        raise _cannot_keep(info, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    for t, made in written:
        write_local(t, made)
    return put_back(result, written)


def _cannot_keep(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LayoutError:
    """The error for an in-place op none of whose strategies leaves its target where it is."""
    functional = info.name.split(".")[1].rstrip("_")
    return LayoutError(
        explain_error(
            info.name, layouts(args, kwargs),
            "an in-place op cannot change the layout of the tensor it writes, and none of its strategies keeps it",
            f"x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) first, or use {functional}",
        )
    )  # fmt: skip
