"""nll_loss: batch dims are free, the class dim and the mean have kernels.

Only kernels shard the class dim `c`. Sharded over an axis, each rank holds some classes of every row:

    none, sum    each row's log probability is held by one rank only: pending sum, nothing is sent
    backward     the rank that holds the target's class writes the gradient: nothing is sent

The mean is no sum over ranks of local means: ranks may hold different numbers of rows that count (ignored
targets, class weights, uneven shards). Its kernel all-reduces numerator and denominator together, when the loss
or its gradient is first wanted (`dtensor.rules.deferred`):

    rank 0: targets 1 2 (both count)     rank 1: targets 3 -100     mean = (l0 + l1 + l2) / 3

The kernels are given no cost: they send two numbers, deferred, and what follows a sharded log_softmax wants it sharded
alike. Sums are taken in float32 for lower precisions.

Losses that compare two tensors element by element: mse, smooth l1, huber, binary cross entropy, soft margin.

    reduction=none      pointwise
    reduction=sum       every dim is a factor that the output lacks: P(sum)
    reduction=mean      the local sum over the count of the whole: P(sum)

The gradient of the mean needs the same care: the op on a shard would divide by the shard's count. So both run
with reduction=sum locally and divide by the global count themselves.

Margin losses over classes: samples are free, the classes of one sample stay together.

    multi_margin_loss         n [c], n, [c] -> n (none), 1 (sum, mean)
    multilabel_margin_loss    n [c], n [c] -> n or 1, n [c]

As with elementwise losses, the mean of a shard is its sum over the global number of samples.

Connectionist temporal classification: the batch is free where targets have a row a sample.

    _ctc_loss        [t] n [c], n [s] -> n, n [t] [2s+1]          lengths are lists of numbers, a sample each
    its backward     n, [t] n [c], n [s], n, n [t] [2s+1] -> [t] n [c]

The second result is as wide as the longest target: on each rank it is widened to that of all samples. Nobody reads
what lies beyond a sample's own. Targets strung together in one dim are found by the lengths of all samples before,
so nothing is sharded there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.deferred import Deferral
from dtensor.rules.kernel import KernelContext, looks_at_values, traced
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule, linear
from dtensor.spec import Spec

from .build.classes import bad_targets, check_targets, local_slots, named_target, out_of_bounds
from .build.dtypes import accumulation_dtype
from .build.empty_shards import is_empty_shard, zeros_of
from .build.gathered import output_spec
from .build.labelled import labelled
from .pointwise import NUMBERS, broadcast_dims, broadcast_shape

NONE, MEAN, SUM = 0, 1, 2

Pair = tuple[torch.Tensor, torch.Tensor]


# ------------------------------------------------------------ nll_loss
def _class_dim(ndim: int) -> int:
    return 1 if ndim > 1 else 0


def _nll_dims(call: Call) -> tuple[int, tuple[int, ...], dict[str, Dims]]:
    """Class dim, sizes of the factors (one a dim of `self`), and the dims of every tensor by argument name."""
    at = call.names.index("self")
    shape = tuple(call.inputs[at].shape)
    c = _class_dim(len(shape))
    rows: Dims = tuple((d,) for d in range(len(shape)) if d != c)
    target = call["target"]
    per_row = rows if target.ndim == len(rows) else ((),) * target.ndim
    dims: dict[str, Dims] = {
        "self": tuple((d,) for d in range(len(shape))),
        "target": per_row,
        "weight": ((c,),),
        "total_weight": (),
        "grad_output": per_row if call["reduction"] == NONE else (),
    }
    return c, shape, dims


def nll_loss(call: Call) -> Rule:
    """Linear in the log probabilities; the class dim by a kernel, and all dims by one for the mean."""
    c, sizes, dims = _nll_dims(call)
    reduction = call["reduction"]
    inputs = tuple(dims[n] for n in call.names)
    outputs: tuple[Dims, ...] = (dims["target"] if reduction == NONE else (), ())
    groups = (Linear(frozenset({0}), (("sum", "sum"), ("avg", "avg")), frozenset({1})),)
    if reduction == MEAN:
        every = frozenset(range(len(sizes)))
        kernel = Kernel("nll mean", every, ("replicate", "replicate"), _run_nll)
        return Rule(inputs, outputs, sizes, every, linear=groups, kernels=(kernel,))
    kernel = Kernel("nll", frozenset({c}), ("sum", "sum"), _run_nll)
    return Rule(inputs, outputs, sizes, frozenset({c}), linear=groups, kernels=(kernel,))


def _mine(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Local log probabilities, slots, which rows count here, and their class weights."""
    at = ctx.call.names.index("self")
    x, target, weight = ctx.tensor("self"), ctx.tensor("target"), ctx.optional("weight")
    c, ignore = _class_dim(x.ndim), int(ctx.call["ignore_index"])
    if not _agrees(ctx, target):
        check_targets(str(ctx.call.op), target, ctx.in_specs[at].shape[c], ignore)
    slot, mine = local_slots(target.view(()) if x.ndim == 1 else target, ctx.intervals(at, c))
    mine &= (target.view(()) if x.ndim == 1 else target) != ignore
    return x, slot, mine, weight


def _agrees(ctx: KernelContext, target: torch.Tensor) -> bool:
    """True where all positions reduce numbers anyway, and with them how many targets are out of bounds.

    Where all positions hold all targets, each sees by itself what is out of bounds.
    """
    at = ctx.call.index("target")
    if at is None or ctx.in_specs[at].is_replicated() or ctx.call.index("grad_output") is not None:
        return False
    return ctx.call["reduction"] == MEAN and target.device.type in ("cpu", "meta")


def _run_nll(ctx: KernelContext) -> Pair | Deferral:
    x, slot, mine, weight = _mine(ctx)
    out, total_spec = output_spec(ctx), output_spec(ctx, 1)
    reduction, c, acc = ctx.call["reduction"], _class_dim(x.ndim), accumulation_dtype(x.dtype)
    zero = torch.zeros(mine.shape, dtype=acc, device=x.device)
    if x.shape[c] == 0:
        rows, counted = zero, zero
    else:
        picked = x.gather(c, slot.unsqueeze(c)).squeeze(c).to(acc)
        scale = torch.ones_like(zero) if weight is None else weight.to(acc).take(slot)
        rows, counted = torch.where(mine, -picked * scale, zero), torch.where(mine, scale, zero)
    if reduction == NONE:
        total = counted.sum() if x.ndim == 1 else zero.new_zeros(())  # torch counts a single row, but not many
        return rows.to(out.dtype).view(out.local_shape), total.to(total_spec.dtype)
    sums = [rows.sum(), counted.sum()]
    if reduction == MEAN:
        return _mean(ctx, sums, (out.dtype, total_spec.dtype))
    return sums[0].to(out.dtype), sums[1].to(total_spec.dtype)


def _mean(ctx: KernelContext, own: list[torch.Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> Pair | Deferral:
    """(mean, count) from the sums of all positions. A target out of bounds on one of them is an error on all.

    Outside of a trace the all-reduce waits until the loss or its gradient is wanted, and the error with it.
    """
    target, at, ignore = ctx.tensor("target"), ctx.call.names.index("self"), int(ctx.call["ignore_index"])
    name, shape = str(ctx.call.op), ctx.in_specs[at].shape
    classes, which = shape[_class_dim(len(shape))], "a target on another rank"
    sums = list(own)
    if _agrees(ctx, target):
        bad = bad_targets(target, classes, ignore)
        sums.append(bad.sum().to(own[0].dtype))
        if looks_at_values(bad) and sums[2]:
            which = named_target(target, bad)
    sent, mesh, axes = torch.stack(sums), ctx.in_specs[0].mesh, ctx.axes

    def finish() -> Pair:
        total, count, *wrong = mesh.comm(axes).all_reduce(sent, "sum") if axes else sent
        for found in wrong:
            if not looks_at_values(found):
                torch._assert_async(found == 0, out_of_bounds(name, "a target", classes))
            elif found:
                raise IndexError(out_of_bounds(name, which, classes))
        return (total / count).to(dtypes[0]), count.to(dtypes[1])

    if not axes or traced(sent):
        return finish()
    return Deferral(((own[0] / own[1]).to(dtypes[0]), own[1].to(dtypes[1])), finish)


def nll_loss_backward(call: Call) -> Rule:
    """Linear in the gradient; rows are free, since the denominator comes as an input; a kernel for the classes."""
    c, sizes, dims = _nll_dims(call)
    inputs = tuple(dims[n] for n in call.names)
    kernel = Kernel("nll backward", frozenset({c}), ("shard",), _run_nll_backward)
    return Rule(inputs, (dims["self"],), sizes, frozenset({c}), linear=(linear(0),), kernels=(kernel,))


def _run_nll_backward(ctx: KernelContext) -> torch.Tensor:
    x, slot, mine, weight = _mine(ctx)
    reduction, c, acc = ctx.call["reduction"], _class_dim(x.ndim), accumulation_dtype(x.dtype)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[c] == 0:
        return out
    grad = ctx.tensor("grad_output").to(acc)
    grad = grad.view(mine.shape) if reduction == NONE else grad
    if reduction == MEAN:
        grad = grad / ctx.tensor("total_weight").to(acc)
    scale = -grad if weight is None else -grad * weight.to(acc).take(slot)
    rows = torch.where(mine, scale, torch.zeros((), dtype=acc, device=x.device))
    return out.scatter_(c, slot.unsqueeze(c), rows.unsqueeze(c).to(out.dtype))


register("aten.nll_loss_forward aten.nll_loss2d_forward", nll_loss)
register("aten.nll_loss_backward aten.nll_loss2d_backward", nll_loss_backward)


def _dims(call: Call) -> tuple[torch.Size, tuple[Dims, ...]]:
    """The shape all but the gradient broadcast to, and the dims of every input."""
    shape = broadcast_shape(s.shape for s, n in zip(call.inputs, call.names, strict=True) if n != "grad_output")
    reduced = call["reduction"] != NONE
    dims = tuple(
        () if n == "grad_output" and reduced and s.ndim == 0 else broadcast_dims(s.shape, shape)
        for s, n in zip(call.inputs, call.names, strict=True)
    )
    return shape, dims


def _over_count(op: torch._ops.OpOverload, count: int) -> Callable[..., object]:
    """The op with reduction=sum, what it gives first divided by the global `count`."""
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")
    over = count or math.nan  # the mean of nothing

    def run(*args: Any, **kwargs: Any) -> object:
        if at < len(args):
            args = (*args[:at], SUM, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "reduction": SUM}
        got = op(*args, **kwargs)
        return got / over if isinstance(got, torch.Tensor) else (got[0] / over, *got[1:])

    return run


def _mean_of_shards(call: Call, rule: Rule, elements: int) -> Rule:
    """`rule`; where an input of a mean is sharded, the shard's sum over the number of all elements."""
    if call["reduction"] != MEAN:
        return rule
    run = _over_count(call.op, elements)
    sharded = lambda ins: any(s.is_sharded_on(d) for s in ins for d in range(s.ndim))  # noqa: E731
    return replace(rule, bind=lambda ins, outs: run if sharded(ins) else None)


def loss(call: Call) -> Rule:
    """The loss itself; nothing pending passes."""
    shape, dims = _dims(call)
    if call["reduction"] == NONE:
        return Rule(dims, (tuple((d,) for d in range(len(shape))),), tuple(shape))
    return _mean_of_shards(call, Rule(dims, ((),), tuple(shape)), math.prod(shape))


def loss_backward(call: Call) -> Rule:
    """Its gradient: pointwise, and linear in the incoming gradient."""
    shape, dims = _dims(call)
    at = call.names.index("grad_output")
    outs = tuple(() if m is None else broadcast_dims(m.shape, shape) for m in call.outputs)
    return _mean_of_shards(call, Rule(dims, outs, tuple(shape), linear=(linear(at),)), math.prod(shape))


register(
    "aten.binary_cross_entropy aten.binary_cross_entropy_with_logits aten.huber_loss aten.mse_loss aten.smooth_l1_loss "
    "aten.soft_margin_loss",
    loss, values=NUMBERS,
)  # fmt: skip
register(
    "aten.binary_cross_entropy_backward aten.huber_loss_backward aten.mse_loss_backward aten.smooth_l1_loss_backward "
    "aten.soft_margin_loss_backward",
    loss_backward, values=NUMBERS,
)  # fmt: skip


def margin_loss(call: Call) -> Rule:
    """Forward and backward: the tensors are known by their names."""
    at = call.names.index("self")
    x, none = call.inputs[at], call["reduction"] == NONE
    row: list[Hashable] = ["n"] if x.ndim == 2 else []
    per_row: list[Hashable] = row if none else []
    classes = [*row, None]
    target = row if "multi_margin" in call.op._schema.name else classes
    backward = "grad_output" in call.names

    def labels(name: str, ndim: int) -> list[Hashable]:
        known: dict[str, list[Hashable]] = {
            "self": classes, "target": target, "is_target": classes, "grad_output": per_row, "weight": [None],
        }  # fmt: skip
        return known[name] if len(known[name]) == ndim else [None] * ndim

    outs = [classes] if backward else [per_row, classes][: len(call.outputs)]
    rule = labelled(
        call, [labels(n, s.ndim) for n, s in zip(call.names, call.inputs, strict=True)],
        [o if m is None or len(o) == len(m.shape) else [None] * len(m.shape)
         for o, m in zip(outs, call.outputs, strict=True)],
        linear=(linear(0),) if backward else (),
    )  # fmt: skip
    return replace(rule, bind=lambda ins, outs: _over_rows(call, ins[at], outs))


def _over_rows(call: Call, x: Spec, outs: Sequence[Spec | None]) -> Callable[..., object] | None:
    """What a rank runs where rows are sharded: a mean over the global number of rows; zeros where there are none."""
    if not x.is_sharded_on(0) or x.ndim < 2:
        return None
    if is_empty_shard(x):
        return zeros_of(outs)
    return _over_count(call.op, x.shape[0]) if call["reduction"] == MEAN else None


register(
    "aten.multi_margin_loss aten.multi_margin_loss_backward aten.multilabel_margin_loss_forward "
    "aten.multilabel_margin_loss_backward", margin_loss, values="p margin",
)  # fmt: skip


LENGTHS = ("input_lengths", "target_lengths")


def ctc_loss(call: Call) -> Rule:
    """Forward and backward; lengths become those of this rank's samples."""
    x, target = call["log_probs"], call["targets"]
    n: Hashable = "n" if x.ndim == 3 and target.ndim == 2 else None
    probabilities: list[Hashable] = [None, n, None] if x.ndim == 3 else [None, None]
    per_sample: list[Hashable] = [n] if x.ndim == 3 else []
    labels: dict[str, list[Hashable]] = {
        "log_probs": probabilities, "targets": [n, None] if target.ndim == 2 else [None], "grad": per_sample,
        "neg_log_likelihood": per_sample, "log_alpha": [*per_sample, None, None],
    }  # fmt: skip
    backward = "grad" in call.names
    outs = ["log_probs"] if backward else ["neg_log_likelihood", "log_alpha"]
    rule = labelled(
        call, [_fit(labels[m], s.ndim) for m, s in zip(call.names, call.inputs, strict=True)],
        [[] if s is None else _fit(labels[m], len(s.shape)) for m, s in zip(outs, call.outputs, strict=True)],
        linear=(linear(0),) if backward else (), filled=True,
    )  # fmt: skip
    at = call.names.index("log_probs")

    def localize(ins: Sequence[Spec], _: Sequence[Spec | None]) -> Mapping[str, object]:
        spec = ins[at]
        if spec.mesh.coord is None or n is None:
            return {}
        runs = spec.intervals_of(spec.mesh.coord)[1]
        return {name: [call[name][i] for s, m in runs for i in range(s, s + m)] for name in LENGTHS}

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        table = None if backward else outs[1]
        if table is None or not table.is_sharded_on(0):
            return None
        width = table.local_shape[2]

        def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, made = call.op(*args, **kwargs)
            return loss, torch.nn.functional.pad(made, (0, width - made.shape[2]), value=-math.inf)

        return run

    return replace(rule, localize=localize, bind=bind)


def _fit(labels: list[Hashable], ndim: int) -> list[Hashable]:
    return labels if len(labels) == ndim else [None] * ndim


register("aten._ctc_loss.default aten._ctc_loss_backward.default", ctc_loss)
