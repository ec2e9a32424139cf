"""Tensors made after another one.

`zeros_like` and `new_zeros` take the layout of their model when they have its shape, else they are replicated;
where the model is pending they are replicated, since a constant is nobody's share. What is left uninitialised keeps
a pending layout too. Nothing is moved: the model's values are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtensor.placement import Partial, Placement, Replicate
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, passes
from dtensor.spec import Spec

from .build.labelled import every_dim, labelled

R = Replicate()


def _unread(call: Call, rule: Rule, placements: set[Placement]) -> Rule:
    """`rule`, and for these placements of the model: taken as it is, the output replicated."""
    rows = tuple(((R,), (p,)) for p in sorted(placements, key=repr))
    return replace(rule, rows=rows)


def like(call: Call) -> Rule:
    """The model's shards, replicated where it is pending."""
    model = call.inputs[0]
    labels = every_dim(model.ndim)
    return _unread(call, labelled(call, [labels], [labels]), {p for p in model.placements if isinstance(p, Partial)})


def uninitialised_like(call: Call) -> Rule:
    """The model's layout whatever it is: there are no values that a pending one could falsify."""
    labels = every_dim(call.inputs[0].ndim)
    return labelled(call, [labels], [labels], linear=(passes(0),))


def new(call: Call) -> Rule:
    """As `like` for the model's shape; another shape is replicated, whatever the model's layout."""
    model, out = call.inputs[0], call.outputs[0]
    assert out is not None
    if out.shape == model.shape:
        return _local_factory(call, like(call))
    rule = labelled(call, [[None] * model.ndim], [[None] * len(out.shape)])
    return _unread(call, rule, {p for p in model.placements if p is not R})


def new_like_storage(call: Call) -> Rule:
    """Uninitialised, so a pending layout may stay."""
    model, out = call.inputs[0], call.outputs[0]
    assert out is not None
    if out.shape != model.shape:
        return new(call)
    labels = every_dim(model.ndim)
    return _local_factory(call, labelled(call, [labels], [labels], linear=(passes(0),)))


def _local_factory(call: Call, rule: Rule) -> Rule:
    """Size, and stride where there is one, become local."""
    stride = "stride" in call.arguments

    def localize(_: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
        spec = outs[0]
        if spec is None or spec.local_shape == spec.shape:
            return {}
        size: dict[str, object] = {"size": list(spec.local_shape)}
        return size | {"stride": _dense_stride(spec)} if stride else size

    return replace(rule, localize=localize)


def _dense_stride(spec: Spec) -> list[int]:
    """Strides of the local part, in memory in the order of the global dims; outside the mesh it has one dim."""
    if spec.mesh.coord is None:
        return [1] * len(spec.local_shape)
    order = sorted(range(spec.ndim), key=lambda d: (spec.stride[d], -d))
    stride, step = [0] * spec.ndim, 1
    for d in order:
        stride[d] = step
        step *= max(spec.local_shape[d], 1)
    return stride


register("aten.zeros_like aten.ones_like", like)
register("aten.empty_like", uninitialised_like)
register("aten.full_like", like, values="fill_value")
register("aten.new_zeros aten.new_ones aten.new_empty", new)
register("aten.new_full", new, values="fill_value")
register("aten.new_empty_strided", new_like_storage)
