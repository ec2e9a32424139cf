"""`dtensor.lower`: values that code reads through modules, imports, made-up names, references and the environment."""

from __future__ import annotations

import collections
import contextvars
import functools
import importlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import dtensor
from dtensor import Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.lowering import LowerError
from dtensor.lowering import guards as lower_guards
from dtensor.lowering import reach as lower_reach

G = 2.0
Case = tuple[str, Callable[[Any], Any], Callable[[], Any]]


def module(name: str, **values: Any) -> Any:
    made = types.ModuleType(name)
    made.__dict__.update(values)
    sys.modules[name] = made
    return made


conf, other = module("reached_conf", scale=2.0), module("reached_other", scale=5.0)
pkg, lazy = module("reached_pkg", inner=conf), module("reached_lazy", S=2.0)
exec("def __getattr__(n):\n    if n == 'scale':\n        return S\n    raise AttributeError(n)", lazy.__dict__)
makes_up = module("reached_makes_up", G=2.0, H=2.0)
exec("def ask(text):\n    return eval(text)\ndef get(name):\n    return globals()[name]", makes_up.__dict__)


def reset() -> None:
    global G
    G, conf.scale, pkg.inner, lazy.S = 2.0, 2.0, conf, 2.0


def set_g() -> None:
    global G
    G = 5.0


def set_scale() -> None:
    conf.scale = 5.0


def of(m: Any) -> Any:
    return m.scale


def named(m: Any, name: str) -> Any:
    return getattr(m, name)


def through_modules() -> Iterator[Case]:
    held = types.SimpleNamespace(m=conf)

    def local(x: Any) -> Any:
        import reached_conf  # type: ignore[import-not-found]

        return x * reached_conf.scale

    def local_from(x: Any) -> Any:
        from reached_conf import scale

        return x * scale

    def local_handed_on(x: Any) -> Any:
        import reached_conf as c

        return x * of(c)

    def late(x: Any) -> Any:
        import reached_late  # type: ignore[import-not-found]

        return x * reached_late.scale

    yield "import inside", local, set_scale
    yield "from import inside", local_from, set_scale
    yield "import inside, handed on", local_handed_on, set_scale
    yield "first import", late, lambda: setattr(sys.modules["reached_late"], "scale", 5.0)
    yield "inner module", lambda x: x * pkg.inner.scale, set_scale
    yield "inner module replaced", lambda x: x * pkg.inner.scale, lambda: setattr(pkg, "inner", other)
    yield "inner module's global", lambda x: x * conf.scale, set_scale
    yield "getattr", lambda x: x * getattr(conf, "scale"), set_scale  # noqa: B009
    yield "getattr, made up", lambda x: x * getattr(conf, "".join(["sc", "ale"])), set_scale
    yield "getattr elsewhere", lambda x: x * named(conf, "_scale"[1:]), set_scale
    yield "hasattr", lambda x: x * (5.0 if hasattr(conf, "new") else 2.0), lambda: setattr(conf, "new", 1)
    yield "held", lambda x: x * held.m.scale, set_scale
    yield "handed on", lambda x: x * of(conf), set_scale
    yield "vars", lambda x: x * vars(conf)["sca" + "le"], set_scale
    yield "__dict__", lambda x: x * conf.__dict__["scale"], set_scale
    yield "sys.modules", lambda x: x * sys.modules["reached_conf"].scale, set_scale
    yield "import_module", lambda x: x * importlib.import_module("reached_conf").scale, set_scale
    yield "module's __getattr__", lambda x: x * lazy.scale, lambda: setattr(lazy, "S", 5.0)
    yield "eval", lambda x: x * makes_up.ask("G"), lambda: setattr(makes_up, "G", 5.0)
    yield "globals(), made up", lambda x: x * makes_up.get("H"), lambda: setattr(makes_up, "H", 5.0)


class Attributed(dict[str, float]):
    v = 2.0

    def get_g(self) -> float:
        return self["k"] * G


class Named(collections.namedtuple("Named", "a")):
    def get_g(self) -> Any:
        return self.a * G


class Chosen(set[int]):
    v = 2.0


class Raises:
    __slots__ = ("__dict__", "__p")

    def __init__(self) -> None:
        self.__p = 2.0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def shown(self) -> float:
        return self.__p

    def change(self) -> None:
        self.__p = 5.0


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._config = types.SimpleNamespace(k=2.0)

    def forward(self, x: Any) -> Any:
        return x * self._config.k


class Descent(torch.optim.SGD):
    scale = 2.0


def through_objects() -> Iterator[Case]:
    table, chosen, point, raises, net = Attributed(k=2.0), Chosen({1}), Named(2.0), Raises(), Configured()
    table.v = chosen.v = 2.0
    opt, default = Descent([nn.Parameter(torch.ones(1))], lr=1.0), collections.defaultdict[str, Any](lambda: G)
    opt.scale = 2.0
    yield "private attribute of a module", net, lambda: setattr(net._config, "k", 5.0)
    yield "attribute of a dict", lambda x: x * table.v, lambda: setattr(table, "v", 5.0)
    yield "attribute of a set", lambda x: x * chosen.v, lambda: setattr(chosen, "v", 5.0)
    yield "method of a dict", lambda x: x * table.get_g(), set_g
    yield "method of a tuple", lambda x: x * point.get_g(), set_g
    yield "attribute of an optimizer", lambda x: x * opt.scale, lambda: setattr(opt, "scale", 5.0)
    yield "private slot", lambda x: x * raises.shown(), raises.change
    yield "default factory", lambda x: x * (default.default_factory or float)(), set_g


class Target:
    k = 2.0


def through_references() -> Iterator[Case]:
    one, two, three, local = Target(), Target(), Target(), threading.local()
    one.k = two.k = three.k = local.k = 2.0
    ref, proxy, context = weakref.ref(one), weakref.proxy(two), contextvars.ContextVar("k", default=2.0)
    by_key, by_value = weakref.WeakKeyDictionary({one: [2.0]}), weakref.WeakValueDictionary({1: three})
    yield "weak reference", lambda x: x * ref().k, lambda: setattr(one, "k", 5.0)  # type: ignore[union-attr]
    yield "proxy", lambda x: x * proxy.k, lambda: setattr(two, "k", 5.0)
    yield "weak keys", lambda x: x * by_key[one][0], lambda: by_key[one].__setitem__(0, 5.0)
    yield "weak values", lambda x: x * by_value[1].k, lambda: setattr(three, "k", 5.0)
    yield "thread's own", lambda x: x * local.k, lambda: setattr(local, "k", 5.0)
    yield "context variable", lambda x: x * context.get(), lambda: context.set(5.0)
    yield "environment", lambda x: x * float(os.environ.get("LOWER_K", "2")), lambda: os.environ.update(LOWER_K="5")
    yield "getenv", lambda x: x * float(os.getenv("LOWER_L", "2")), lambda: os.environ.update(LOWER_L="5")


def through_functions() -> Iterator[Case]:
    def default(x: Any, k: list[float] = [2.0]) -> Any:  # noqa: B006
        return x * k[0]

    def keyword(x: Any, *, k: float = 2.0) -> Any:
        return x * k

    def attributed(x: Any) -> Any:
        return x * attributed.k  # type: ignore[attr-defined]

    def twice(x: Any) -> Any:
        return x * 2.0

    attributed.k = 2.0  # type: ignore[attr-defined]

    class Chosen:
        @functools.singledispatchmethod
        def chosen(self, k: Any) -> float:
            return 2.0

    chosen, pick = Chosen(), functools.singledispatch(lambda k: 2.0)

    def fresh() -> None:
        set_g()
        cached.cache_clear()

    cached = functools.lru_cache(maxsize=None)(lambda: G)
    yield "default replaced", default, lambda: setattr(default, "__defaults__", ([5.0],))
    yield "keyword replaced", lambda x: keyword(x), lambda: setattr(keyword, "__kwdefaults__", {"k": 5.0})
    yield "keyword changed", lambda x: keyword(x), lambda: cast(Any, keyword).__kwdefaults__.update(k=7.0)
    yield "attribute", attributed, lambda: setattr(attributed, "k", 5.0)
    yield "other code", lambda x: twice(x), lambda: setattr(twice, "__code__", (lambda x: x * 5.0).__code__)
    yield "chosen by type", lambda x: x * pick(1), lambda: pick.register(int, lambda k: 5.0)
    yield (
        "method by type",
        lambda x: x * chosen.chosen(1),
        lambda: cast(Any, Chosen.chosen).register(int, lambda s, k: 5.0),
    )
    yield "cached function", lambda x: x * cached(), fresh


@pytest.mark.parametrize("cases", [through_modules, through_objects, through_references, through_functions])
def test_what_code_reads_is_seen(
    cases: Callable[[], Iterator[Case]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed value is another program; an unchanged one is the same."""
    (tmp_path / "reached_late.py").write_text("scale = 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def f() -> None:
        x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        value = lambda out: out.to_local()[0].item()  # noqa: E731
        for name, look, change in cases():
            reset()
            run = dtensor.lower(look, x)
            assert value(run(x)) == value(run(x)) == value(look(x)), name
            assert run.programs == 1, name
            before = value(look(x))
            change()
            assert value(run(x)) == value(look(x)) != before, name
            assert run.programs == 2, name

    try:
        simulate(1)(f)
    finally:
        reset()
        for name in ("LOWER_K", "LOWER_L"):
            os.environ.pop(name, None)
        sys.modules.pop("reached_late", None)


def test_hooks_of_all_modules_are_seen() -> None:
    def f() -> None:
        x, net = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)]), nn.Identity()
        run = dtensor.lower(net, x)
        handle = nn.modules.module.register_module_forward_hook(lambda m, given, out: out * 5.0)
        try:
            assert run(x).to_local().tolist() == [5.0, 5.0]
        finally:
            handle.remove()
        assert run(x).to_local().tolist() == [1.0, 1.0]

    simulate(1)(f)


def test_hooks_of_an_optimizer_are_seen() -> None:
    def f() -> None:
        w = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        opt = torch.optim.SGD([w], lr=1.0)

        def hook(*_: Any) -> None:
            cast(Any, w.grad).mul_(5.0)

        def step(opt: torch.optim.Optimizer) -> None:
            w.sum().backward()
            opt.step()
            opt.zero_grad()

        run = dtensor.lower(step, opt)
        run(opt)
        opt.register_step_pre_hook(hook)
        run(opt)
        assert w.to_local().tolist() == [-5.0, -5.0]

    simulate(1)(f)


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that reaches more than can be watched is not lowered with part of it unwatched."""
    monkeypatch.setattr(lower_reach, "MAX_PLACES", 50)
    many = [[i] for i in range(100)]

    def f() -> None:
        x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(LowerError, match="too much to be watched"):
            dtensor.lower(lambda x: x * many[0][0], x)

    simulate(1)(f)


def test_what_a_namespace_holds_that_cannot_be_watched_is_refused() -> None:
    """Code that reads globals it does not name depends on all of them."""
    made = module("reached_by_eval", lines=iter("ab"))
    exec("def ask(text):\n    return eval(text)", made.__dict__)

    def f() -> None:
        x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(LowerError, match="an iterator goes on"):
            dtensor.lower(lambda x: x * made.ask("2.0"), x)

    simulate(1)(f)


def test_what_is_read_of_modules_is_noted_in_a_trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are of their own class before and after; an attribute that a program never reads costs no new trace."""
    traces, trace = [], lower_guards.trace

    def counted(*args: Any) -> Any:
        traces.append(1)
        return trace(*args)

    def look(x: Any) -> Any:
        return x * getattr(conf, "".join(["sc", "ale"]))

    monkeypatch.setattr(lower_guards, "trace", counted)

    def f() -> None:
        x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        run = dtensor.lower(look, x)
        assert type(conf) is types.ModuleType and len(traces) == 2  # the second with `scale` watched from its start
        conf.unread = 1
        run(x)
        assert len(traces) == 2
        conf.scale = 5.0
        assert run(x).to_local().tolist() == [5.0, 5.0]

    try:
        simulate(1)(f)
    finally:
        reset()
