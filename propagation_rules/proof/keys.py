"""Arguments that matter are in the key of a cached plan.

A plan is cached under the layouts of the tensors and the static arguments that can change what the op gives. One
that is forgotten shows when the same op is called on the same layouts with another value of it: the stale plan
answers. So a call is varied in every argument that is no tensor, and the variants the op takes are run one after the
other by the engine in one process, the first one again at the end, and each is compared with the plain op: value,
shape, dtype, and the strides of the global tensor.

    topk(x, 2)  topk(x, 3)  topk(x, 2, largest=False)  ...  topk(x, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import dtensor
from dtensor import DTensor, init_device_mesh
from dtensor.dispatch import hit as hot
from dtensor.placement import Placement, Replicate, Shard
from dtensor.rules.deferred import finish
from dtensor.spec import Spec

from .parts import assemble, differs
from .recorded import RecordedCall, plain_result, tensors_of
from .truth import skip_reason, wrapped

__all__ = ["stale_plans", "variants"]

_WORDS = ("mean", "sum", "none", "reflect", "constant", "trunc", "floor", "linear", "nearest", "tanh", "amax", "amin")


def variants(call: RecordedCall, most: int = 24) -> list[RecordedCall]:
    """`call` and calls that differ from it in one argument that is no tensor, and that the plain op takes."""
    found, seen = [call], {str(call)}
    for other in _changed(call):
        if str(other) in seen:
            continue
        seen.add(str(other))
        try:
            plain_result(other)
        except Exception:
            continue
        found.append(other)
        if len(found) >= most:
            break
    return found


def _changed(call: RecordedCall) -> Iterator[RecordedCall]:
    params = call.op._schema.arguments
    full = [*call.args]
    for a in params[len(call.args) :]:
        if a.kwarg_only or not a.has_default_value():
            break
        full.append(a.default_value)
    for i, value in enumerate(full):
        for other in _others(value, str(params[i].type)):
            yield RecordedCall(call.op, (*full[:i], other, *full[i + 1 :]), call.kwargs, call.origin)
    for a in params:
        if a.kwarg_only and not a.is_out and a.name not in ("device", "layout", "pin_memory", "generator"):
            value = call.kwargs.get(a.name, a.default_value)
            for other in _others(value, str(a.type)):
                yield RecordedCall(call.op, call.args, {**call.kwargs, a.name: other}, call.origin)


def _others(value: Any, kind: str) -> list[Any]:
    """Other values of an argument of type `kind`."""
    if isinstance(value, torch.Tensor) or "Tensor" in kind:
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, -1 - value]
    if isinstance(value, float):
        return [value * 0.5 + 0.25, -value, 2.0]
    if isinstance(value, str):
        return [w for w in _WORDS if w != value]
    if isinstance(value, torch.dtype):
        return [d for d in (torch.float64, torch.float32, torch.int64) if d != value]
    if isinstance(value, torch.memory_format):
        return [f for f in (torch.contiguous_format, torch.channels_last, torch.preserve_format) if f != value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, (bool, int)) for x in value):
        given = list(value)
        one = [not x if isinstance(x, bool) else x + 1 for x in given]
        return [[one[0], *given[1:]], [*given[:-1], one[-1]], given[::-1], given[1:]]
    if value is None:
        if "memory_format" in kind or "MemoryFormat" in kind:
            return [torch.channels_last]
        return [v for word, v in (("bool", True), ("int", 1), ("float", 0.5), ("number", 2)) if word in kind]
    return []


# ------------------------------------------------------------ one after the other
def stale_plans(call: RecordedCall, most: int = 24) -> list[str]:
    """What went wrong when the variants of `call` ran one after the other on 2 ranks; [] when all were right.

    Inputs are sharded on dim 0, then all are replicated. A refusal is no fault, and neither is what is wrong
    in a first call as well: that is for the law of truth.
    """
    if skip_reason(call):
        return []
    many = variants(call, most)
    if len(many) < 2:
        return []
    many = [c for c in many if not skip_reason(c)]
    order = [*many, many[0]]
    faults: list[str] = []
    for cut in (True, False):
        for c, bad in zip(order, _judged(order, cut), strict=True):
            if bad and not _judged([c], cut)[0]:  # what is wrong by itself is no matter of keys
                faults.append(f"{c} on {'shards' if cut else 'replicas'}, after others: {bad}")
    return faults


def _judged(order: list[RecordedCall], cut: bool) -> list[str]:
    """What is wrong with each call, in this order, on fresh meshes and so with no plans made."""
    per_rank = dtensor.simulate(2)(_on_rank, order, cut)
    return [_judge(c, results) for c, *results in zip(order, *per_rank, strict=True)]


def _on_rank(order: list[RecordedCall], cut: bool) -> list[tuple[list[Spec], list[torch.Tensor]] | str]:
    mesh = init_device_mesh("cpu", (2,))
    results: list[tuple[list[Spec], list[torch.Tensor]] | str] = []
    with torch.no_grad():
        for call in order:
            layouts: list[tuple[Placement, ...]] = [
                (Shard(0) if cut and t.ndim else Replicate(),) for t in call.tensors
            ]
            args, kwargs = wrapped(call, mesh, layouts)
            try:
                outs = [t for t in tensors_of(hot.dispatch(call.op, args, kwargs)) if isinstance(t, DTensor)]
                finish(outs)
                results.append(([t._spec for t in outs], [t._local_tensor for t in outs]))
            except Exception as e:
                results.append(f"{type(e).__name__}: {str(e).partition(chr(10))[0]}")
    return results


def _judge(call: RecordedCall, results: list[Any]) -> str:
    if any(isinstance(r, str) for r in results):
        agree = all(isinstance(r, str) for r in results)
        return "" if agree else f"ranks disagree: {[r if isinstance(r, str) else 'a result' for r in results]}"
    want = list(tensors_of(plain_result(call)[0]))
    specs = results[0][0]
    if len(specs) != len(want):
        return f"{len(specs)} results, not {len(want)}"
    for i, (spec, ref) in enumerate(zip(specs, want, strict=True)):
        whole = assemble(spec, [r[1][i] for r in results])
        bad = whole if isinstance(whole, str) else differs(whole, ref, 1e-3, 1e-4)
        if not bad and ref.numel() and not _same_order(ref.shape, spec.stride, ref.stride()):
            bad = f"strides {list(spec.stride)}, not {list(ref.stride())}"
        if bad:
            return f"result {i}: {bad}"
    return ""


def _same_order(sizes: Sequence[int], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True when strides differ in dims of size 1 only, which say nothing."""
    return all(n == 1 or x == y for n, x, y in zip(sizes, a, b, strict=True))
