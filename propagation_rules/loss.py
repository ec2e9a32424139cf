"""log_softmax and nll_loss: batch dims are free, the class dim and the mean have kernels.

The class dim `c` is whole for plain strategies. Cut over an axis, each rank holds some classes of every row:

    log_softmax           max and sum of exponentials of the own classes, gathered as one small tensor
                          [2, rows], then combined on every rank alike: x - log(sum)
    its backward          one all-reduce of the rows' gradient sums
    nll_loss none, sum    each row's log probability is held by one rank only: pending sum, nothing is sent
    nll_loss backward     the rank that holds the target's class writes the gradient: nothing is sent

The mean is no sum over ranks of local means: ranks may hold different numbers of rows that count (ignored
targets, class weights, uneven shards). Its kernel all-reduces numerator and denominator together, when the loss
or its gradient is first wanted (`dtensor.rules.deferred`):

    rank 0: targets 1 2 (both count)     rank 1: targets 3 -100     mean = (l0 + l1 + l2) / 3

The kernels are given no cost: they send one or two numbers a row or put that off, and what follows a sharded
log_softmax wants it sharded alike. Sums are taken in float32 for lower precisions.

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
so nothing is cut there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.deferred import PutOff
from dtensor.rules.kernel import KernelContext, looks_at_values, traced
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Bind, Dims, Kernel, Linear, Rule, linear
from dtensor.spec import Spec

from .build.classes import bad_targets, check_targets, local_slots, named_target, out_of_bounds
from .build.empty_shards import is_empty_shard
from .build.labelled import labelled
from .pointwise import NUMBERS, broadcast_dims, broadcast_shape

NONE, MEAN, SUM = 0, 1, 2

Pair = tuple[torch.Tensor, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: float32 for lower precisions."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# ------------------------------------------------------------ log_softmax
def log_softmax(call: Call) -> Rule:
    """Every dim a factor; the softmax dim whole, with a kernel."""
    shape = tuple(call.inputs[0].shape)
    dims: Dims = tuple((d,) for d in range(len(shape)))
    if not dims:
        return Rule((dims,), (dims,), ())
    c = call.dim()
    kernel = Kernel("log_softmax", frozenset({c}), ("shard",), _run_log_softmax)
    return Rule((dims,), (dims,), shape, frozenset({c}), kernels=(kernel,))


def combine_statistics(ctx: KernelContext, stats: torch.Tensor) -> torch.Tensor:
    """Statistics of all positions of the kernel's axes, stacked in front: [positions, *stats.shape]."""
    mesh = ctx.in_specs[0].mesh
    comm = mesh.comm(ctx.axes)
    return torch.stack(comm.all_gather(stats, [tuple(stats.shape)] * comm.size))


def finite_top(top: torch.Tensor) -> torch.Tensor:
    """A maximum that can be subtracted: 0 in place of -inf."""
    return torch.where(top == float("-inf"), torch.zeros_like(top), top)


def local_max_and_sum(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Max over `dim` and sum of exp(x - max), both with `dim` kept; -inf and 0 for an empty shard."""
    if x.shape[dim] == 0:
        low = x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), float("-inf"))
        return low, torch.zeros_like(low)
    top = x.amax(dim, keepdim=True)
    return top, (x - finite_top(top)).exp_().sum(dim, keepdim=True)


def merged_sums(tops: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Max and sum of exp(x - max) of all positions, from theirs, stacked in front."""
    top = tops.amax(0)
    scale = torch.where(sums == 0, torch.zeros_like(tops), (tops - top).exp())
    return top, (sums * scale).sum(0)


def log_sum_exp(tops: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, log(sum(exp(x - max)))) from the positions' maxima and sums, stacked in front.

    They are kept apart: added up, large logits would take the logarithm's digits.
    """
    top, total = merged_sums(tops, sums)
    return top, total.log()


def _run_log_softmax(ctx: KernelContext) -> torch.Tensor:
    out = ctx.out_specs[0]
    assert out is not None
    x = ctx.inputs[0]
    x = x.to(accumulation_dtype(x.dtype))
    dim = ctx.call.dim()
    stats = combine_statistics(ctx, torch.stack(local_max_and_sum(x, dim)))
    top, log_sum = log_sum_exp(stats[:, 0], stats[:, 1])
    return (x - top - log_sum).to(out.dtype)


def log_softmax_backward(call: Call) -> Rule:
    """grad - exp(output) * sum(grad): linear in the gradient; a kernel for the softmax dim."""
    shape = tuple(call.inputs[0].shape)
    dims: Dims = tuple((d,) for d in range(len(shape)))
    if not dims:
        return Rule((dims, dims), (dims,), (), linear=(linear(0),))
    c = call.dim()
    kernel = Kernel("log_softmax backward", frozenset({c}), ("shard",), _run_log_softmax_backward)
    return Rule((dims, dims), (dims,), shape, frozenset({c}), linear=(linear(0),), kernels=(kernel,))


def _run_log_softmax_backward(ctx: KernelContext) -> torch.Tensor:
    spec = ctx.out_specs[0]
    assert spec is not None
    grad, out = ctx.inputs
    grad = grad.to(accumulation_dtype(grad.dtype))
    total = ctx.all_reduce(grad.sum(ctx.call.dim(), keepdim=True), "sum")
    return (grad - out.to(grad.dtype).exp() * total).to(spec.dtype)


# ------------------------------------------------------------ nll_loss
def _class_dim(ndim: int) -> int:
    return 1 if ndim > 1 else 0


def _nll_dims(call: Call) -> tuple[int, tuple[int, ...], dict[str, Dims]]:
    """Class dim, sizes of the factors (one a dim of `self`), and the dims of every tensor by argument name."""
    at = call.index("self")
    assert at is not None
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
    at = ctx.call.index("self")
    assert at is not None
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


def _run_nll(ctx: KernelContext) -> Pair | PutOff:
    x, slot, mine, weight = _mine(ctx)
    out, total_spec = ctx.out_specs
    assert out is not None and total_spec is not None
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


def _mean(ctx: KernelContext, own: list[torch.Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> Pair | PutOff:
    """(mean, count) from the sums of all positions. A target out of bounds on one of them is an error on all.

    Outside of a trace the all-reduce waits until the loss or its gradient is wanted, and the error with it.
    """
    target, at, ignore = ctx.tensor("target"), ctx.call.index("self"), int(ctx.call["ignore_index"])
    assert at is not None
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
    return PutOff(((own[0] / own[1]).to(dtypes[0]), own[1].to(dtypes[1])), finish)


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


register("aten._log_softmax", log_softmax)
register("aten._log_softmax_backward_data", log_softmax_backward)
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


def _over_count(call: Call, elements: int) -> Bind:
    """The op with reduction=sum, over the global count, wherever an input is cut."""
    count = elements or math.nan  # the mean of nothing
    op = call.op
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        if not any(s.is_sharded_on(d) for s in ins for d in range(s.ndim)):
            return None

        def run(*args: object, **kwargs: object) -> object:
            if at < len(args):
                return op(*args[:at], SUM, *args[at + 1 :], **kwargs) / count
            return op(*args, **{**kwargs, "reduction": SUM}) / count

        return run

    return bind


def loss(call: Call) -> Rule:
    """The loss itself; nothing pending passes."""
    shape, dims = _dims(call)
    if call["reduction"] == NONE:
        return Rule(dims, (tuple((d,) for d in range(len(shape))),), tuple(shape))
    rule = Rule(dims, ((),), tuple(shape))
    return replace(rule, bind=_over_count(call, math.prod(shape))) if call["reduction"] == MEAN else rule


def loss_backward(call: Call) -> Rule:
    """Its gradient: pointwise, and linear in the incoming gradient."""
    shape, dims = _dims(call)
    at = call.index("grad_output")
    assert at is not None
    outs = tuple(() if m is None else broadcast_dims(m.shape, shape) for m in call.outputs)
    rule = Rule(dims, outs, tuple(shape), linear=(linear(at),))
    return replace(rule, bind=_over_count(call, math.prod(shape))) if call["reduction"] == MEAN else rule


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
    at = call.index("self")
    assert at is not None
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
    """The op with reduction=sum, over the global number of rows, where they are cut; zeros where there are none."""
    if not x.is_sharded_on(0) or x.ndim < 2:
        return None
    op, mean = call.op, call["reduction"] == MEAN
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")
    empty = is_empty_shard(x)

    def run(*args: Any, **kwargs: Any) -> object:
        if empty:
            made = tuple(
                None if s is None else args[0].new_zeros(s.local_shape, dtype=s.dtype) for s in outs
            )  # fmt: skip
            return made[0] if len(made) == 1 else made
        if not mean:
            return op(*args, **kwargs)
        if at < len(args):
            args = (*args[:at], SUM, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "reduction": SUM}
        got = op(*args, **kwargs)
        return got / x.shape[0] if isinstance(got, torch.Tensor) else (got[0] / x.shape[0], *got[1:])

    return run


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
