"""Ops that draw random numbers: every dim is free, replicas agree, shards differ (see `dtensor.dispatch.random`).

Ops that read no values draw through `draw_part`, so that on CPU the numbers are those of one device. In place
they need a layout that they can keep: a pending tensor is refused, for its parts would have to add up to what is
drawn. The `*_like` ops read of their model only its shape; beside a pending model the result is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dtensor.dispatch import random as rng
from dtensor.rules.registry import Call, pattern, register
from dtensor.rules.rule import Linear, Rule
from dtensor.spec import Spec

from .pointwise import broadcast_rule

Local = Callable[..., torch.Tensor]

UNREAD = (Linear(frozenset({0}), (("*", "*"),), frozenset({0})),)
"""Any pending model does, and the output is replicated."""


def fill(call: Call) -> Rule:
    """`x.uniform_()` and the like: the target is written, what it held is not read."""
    return replace(broadcast_rule(call), bind=lambda ins, outs: _fill(call, ins[0]))


def _fill(call: Call, spec: Spec) -> Local:
    op = call.op
    dense = all(spec.stride) or spec.numel <= 1

    def run(x: torch.Tensor, *args: object, generator: torch.Generator | None = None, **kwargs: object) -> torch.Tensor:
        def draw(shape: Sequence[int]) -> torch.Tensor:
            if x.shape == torch.Size(shape) and x.is_contiguous() and spec.local_shape == spec.shape:
                into = x
            elif shape == spec.shape and dense:
                into = torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device)
            else:
                into = x.new_empty(shape)
            got: torch.Tensor = op(into, *args, generator=generator, **kwargs)
            return got

        part = rng.draw_part(draw, spec, generator, x.device)
        return x if part is x else x.copy_(part)

    return run


def like(call: Call) -> Rule:
    """`rand_like` and `bernoulli(x, p)`: a new tensor of the model's shape."""
    return replace(broadcast_rule(call, UNREAD), bind=lambda ins, outs: _like(call, ins[0], outs[0]))


def _like(call: Call, model: Spec, out: Spec | None) -> Local:
    assert out is not None
    op = call.op

    def run(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        def draw(shape: Sequence[int]) -> torch.Tensor:
            of = x if x.shape == torch.Size(shape) else _empty(model, shape, x.device)
            got: torch.Tensor = op(of, *args, **kwargs)
            return got

        generator = kwargs.get("generator")
        part = rng.draw_part(draw, out, generator if isinstance(generator, torch.Generator) else None, x.device)
        return part if part.shape == out.shape else part.clone()

    return run


def _empty(spec: Spec, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    if shape == spec.shape and all(spec.stride):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    return torch.empty(tuple(shape), dtype=spec.dtype, device=device)


def drawn_from(call: Call) -> Rule:
    """Parameters of the distribution are read, element by element."""
    return broadcast_rule(call)


def native_dropout(call: Call) -> Rule:
    """As `drawn_from`; of an empty part torch gives a mask of the wrong dtype."""
    return replace(broadcast_rule(call), bind=lambda ins, outs: _native_dropout(call, ins[0]))


def _native_dropout(call: Call, spec: Spec) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    op = call.op

    def run(x: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        got = rng.run_seeded(lambda: op(x, *args, **kwargs), spec, None, x.device)
        assert isinstance(got, tuple)
        return got[0], got[1].to(torch.bool)

    return run


FILLS = (
    "bernoulli_.float cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ "
    "bernoulli.p cauchy exponential geometric log_normal normal_functional random uniform"
).split()
"""In place, and their functional forms, which read as little."""

register(
    [f"aten.{name}" for name in FILLS if name.split(".")[0].endswith("_")], fill,
    values="* p lambd mean std median sigma from to", random=True,
)  # fmt: skip
register(
    [f"aten.{name}" for name in FILLS if not name.split(".")[0].endswith("_")], like,
    values="* p lambd mean std median sigma from to", random=True,
)  # fmt: skip
register("aten.rand_like aten.randn_like", like, random=True)
register(
    "aten.randint_like.default aten.randint_like.low_dtype aten.randint_like.generator "
    "aten.randint_like.low_generator_dtype", like, values="low high", random=True,
)  # fmt: skip

register(
    "aten.bernoulli.default aten.bernoulli.Tensor aten.bernoulli_.Tensor aten._fused_dropout "
    "aten.normal.Tensor_float aten.normal.float_Tensor aten.normal.Tensor_Tensor aten.poisson aten.binomial "
    "aten._standard_gamma aten.rrelu_with_noise", drawn_from, values="p mean std lower upper", random=True,
)  # fmt: skip
register("aten.native_dropout", native_dropout, values="p", random=True)
register("aten._sample_dirichlet", pattern("... [n] -> ... [n]"), random=True)
register("aten.multinomial", pattern("... [n] -> ... [k]"), random=True)
