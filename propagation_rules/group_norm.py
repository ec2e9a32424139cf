"""Group normalisation: the batch and the groups are free.

    native_group_norm    n (g [q]) [s ...], (g [q]), (g [q]) -> n (g [q]) [s ...], n g, n g
    its backward         ... -> n (g [q]) [s ...], (g [q]), (g [q])

The channels are `g` groups of `q`; cutting groups cuts channels, weight and bias along, with nothing sent. The
arguments that count batch, channels and groups become local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Rule, linear
from dtensor.spec import Spec

from .build.empty_shards import is_empty_shard, zeros_of


def group_norm(call: Call) -> Rule:
    """Forward and backward: the tensors are known by their names."""
    at = call.index("input")
    assert at is not None
    x = call.inputs[at]
    groups = call["group"]
    n, g, q = 0, 1, 2
    sizes = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    whole: Dims = ((n,), (g, q), *((3 + i,) for i in range(x.ndim - 2)))
    dims: dict[str, Dims] = {
        "input": whole, "grad_out": whole, "mean": ((n,), (g,)), "rstd": ((n,), (g,)),
        "weight": ((g, q),), "bias": ((g, q),),
    }  # fmt: skip
    backward = "grad_out" in call.names
    outs = ("input", "weight", "bias") if backward else ("input", "mean", "rstd")

    def localize(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
        rows, channels = ins[at].local_shape[:2]
        return {"N": rows, "C": channels, "group": groups * channels // x.shape[1] if x.shape[1] else groups}

    return Rule(
        tuple(dims[name] for name in call.names),
        tuple(() if m is None else dims[name] for name, m in zip(outs, call.outputs, strict=True)),
        sizes,
        frozenset({q, *range(3, len(sizes))}),
        # Statistics of another dtype than the input's are unknown to torch's shape function; an empty shard has none.
        nonempty=frozenset({n, g}) if any(s.dtype != x.dtype for s in call.inputs) else frozenset(),
        linear=(linear(0),) if backward else (),
        localize=localize,
        bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[at]) or _no_channels(ins[at]) else None,
    )


def _no_channels(x: Spec) -> bool:
    """Whether this rank has none of the channels that there are; the tensor may have no elements at all."""
    return x.local_shape[1] == 0 < x.shape[1]


register("aten.native_group_norm aten.native_group_norm_backward", group_norm, values="eps")
