"""Where do the microseconds of one cached op go? Parts of a call, each timed by itself, for a few ops.

    plain       the op on the local tensors, as torch's own function
    into Python what torch takes to hand a call on tensors of a subclass to Python: an empty `__torch_dispatch__`
                (views: that of `neg`, as torch wants a view from a view)
    key         arguments to cache key and look-up
    local op    the same op as the plan calls it
    wrapper     the DTensor around the result
    rest        what the parts do not explain: the plan's own steps, views, writes, Python calls
    in all      the call as a program makes it

`python benchmarks/profile_dispatch.py --stacks OP` prints a profile by function instead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import side_by_side as bench
import torch

from dtensor import DTensor, Replicate, Shard, init_device_mesh
from dtensor.dispatch import hit as dispatch
from dtensor.dispatch.hit import OpInfo

OPS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "a + b": (torch.ops.aten.add.Tensor, lambda a, b: (a, b)),
    "a * 2.0": (torch.ops.aten.mul.Scalar, lambda a, b: (a, 2.0)),
    "a.add_(b)": (torch.ops.aten.add_.Tensor, lambda a, b: (a, b)),
    "mm": (torch.ops.aten.mm.default, lambda a, b: (a, b)),
    "t": (torch.ops.aten.t.default, lambda a, b: (a,)),
    "view": (torch.ops.aten.view.default, lambda a, b: (a, [a.shape[0], 2, 4])),
    "sum": (torch.ops.aten.sum.dim_IntList, lambda a, b: (a, [1])),
    "softmax": (torch.ops.aten._softmax.default, lambda a, b: (a, 1, False)),
    "foreach_add": (torch.ops.aten._foreach_add.List, lambda a, b: ([a, a], [a, a])),
}


class Empty(torch.Tensor):
    """A subclass whose ops do nothing but come to Python."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    given: Any = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.given


def parts(op: Any, args: Callable[..., Any]) -> dict[str, float]:
    """Microseconds of each part of one call."""
    mesh = init_device_mesh("cpu", (4,))
    layout, whole = [Shard(0)], [Replicate()]
    second = whole if op is torch.ops.aten.mm.default else layout
    local = torch.randn(8, 8)
    a, b = DTensor.from_local(local, mesh, layout), DTensor.from_local(local * 0, mesh, second)
    given = args(a, b)
    op(*given)
    info: OpInfo = dispatch._ops[id(op)]
    to_local = lambda x: x.to_local() if isinstance(x, DTensor) else x  # noqa: E731
    plain = [[to_local(y) for y in x] if isinstance(x, list) else to_local(x) for x in given]
    if op is torch.ops.aten.view.default:
        plain[1] = [8, 2, 4]
    result = op(*plain)
    empty: Any = torch.Tensor._make_subclass(Empty, torch.randn(8, 8))
    Empty.given = [empty, empty] if isinstance(result, (list, tuple)) else empty
    through = [[empty for _ in x] if isinstance(x, list) and isinstance(x[0], torch.Tensor) else x for x in given]
    through = [empty if isinstance(x, DTensor) else x for x in through]
    spec = a._spec
    new = dispatch._new
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: op(*plain),
        "into Python": (lambda: torch.ops.aten.neg.default(empty)) if info.is_view else lambda: op(*through),
        "local op": lambda: info.run(*plain),
        "wrapper": lambda: new(DTensor, local, spec, requires_grad=False),
        "in all": lambda: op(*given),
    }
    found = {name: bench.scaled(s, 1e6).median for name, s in bench.in_turns(calls, rounds=15, loops=200).items()}
    plans = dict(info.plans)
    try:
        for key in plans:
            info.plans[key] = lambda *_: empty
        keys = {"key": lambda: dispatch.dispatch(op, given)}
        found["key"] = bench.scaled(bench.in_turns(keys, rounds=15, loops=200)["key"], 1e6).median
    finally:
        info.plans.update(plans)
    wrappers = len(result) if isinstance(result, (list, tuple)) else 1
    found["wrapper"] *= 0 if info.written else wrappers
    found["rest"] = found["in all"] - sum(found[n] for n in ("into Python", "key", "local op", "wrapper"))
    return found


def stacks(name: str) -> None:
    """A profile by function of one op."""
    mesh = init_device_mesh("cpu", (4,))
    a, b = (DTensor.from_local(torch.randn(8, 8), mesh, [Shard(0)]) for _ in range(2))
    op, args = OPS[name]
    given = args(a, b)
    op(*given)
    with cProfile.Profile() as profile:
        for _ in range(20000):
            op(*given)
    pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def main() -> None:
    """Print the table, or a profile of the op asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", choices=sorted(OPS), metavar="OP")
    asked = parser.parse_args()
    bench.start_fake_world(4)
    if asked.stacks:
        return stacks(asked.stacks)
    names = ["plain", "into Python", "key", "local op", "wrapper", "rest", "in all"]
    rows = []
    for name, (op, args) in OPS.items():
        with torch.no_grad():
            found = parts(op, args)
        rows.append([name, *(f"{found[n]:.2f}" for n in names)])
    print("us a call, median; `into Python` to `rest` add up to `in all`\n")
    print(bench.markdown(["op", *names], rows))
    print()
    return None


if __name__ == "__main__":
    main()
