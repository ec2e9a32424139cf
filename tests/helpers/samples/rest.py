"""Samples for overloads that the families' own samples do not reach: aliases, copies of views, rare pointwise ops."""

from __future__ import annotations

import torch

from helpers.laws import Sample, ints, rand

aten = torch.ops.aten
X, Y, Z = rand(5, 6), rand(5, 6, seed=1), rand(2, 3, 4, 6)
V = rand(2, 3, 3, 4, 4)
I, J = ints(8, 5, 6), ints(8, 5, 6, seed=1)
C = torch.complex(rand(5, 6), rand(5, 6, seed=1))


def plain(name: str, fn, *tensors: torch.Tensor) -> Sample:
    """A sample without gradients."""
    return Sample(name, fn, tensors, grads=False)


POINTWISE = [
    plain("and", aten.__and__.Tensor, I, J),
    plain("or", aten.__or__.Tensor, I, J),
    plain("xor", aten.__xor__.Tensor, I, J),
    plain("lshift", aten.__lshift__.Tensor, I, J),
    plain("rshift", aten.__rshift__.Tensor, I, J),
    plain("conj", lambda x: x.conj() * 2, C),
    plain("conj_copy", aten._conj_copy.default, C),
    plain("conj_physical", torch.conj_physical, C),
    plain("_conj_physical", aten._conj_physical.default, C),
    plain("neg_view", lambda x: x.conj().imag * 1, C),
    Sample("asinh", torch.asinh, (X,)),
    Sample("atan", torch.atan, (X,)),
    Sample("sinh", torch.sinh, (X,)),
    Sample("exp2", torch.exp2, (X,)),
    Sample("expm1", torch.expm1, (X,)),
    plain("trunc", torch.trunc, X),
    plain("deg2rad", torch.deg2rad, X),
    plain("rad2deg", torch.rad2deg, X),
    plain("positive", torch.positive, X),
    plain("relu6", aten.relu6.default, X),
    plain("ndtr", torch.special.ndtr, X),
    plain("clip", lambda x: aten.clip.default(x, -0.5, 0.5), X),
    plain("clamp_min", lambda x, y: aten.clamp_min.Tensor(x, y), X, Y),
    plain("clamp_max", lambda x, y: aten.clamp_max.Tensor(x, y), X, Y),
    plain("clamp_max number", lambda x: aten.clamp_max.default(x, 0.5), X),
    plain("div floor", lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"), X, Y),
    plain("div trunc", lambda x: aten.div.Scalar_mode(x, 0.3, rounding_mode="trunc"), X),
    plain("true_divide", aten.true_divide.Tensor, X, Y),
    plain("complex", torch.complex, X, Y),
    plain("polar", lambda r, a: torch.polar(r, a), X, Y),
    plain("max.other", aten.max.other, X, Y),
    plain("min.other", aten.min.other, X, Y),
    plain("where numbers", lambda c: torch.where(c > 0, 1.0, 2.0), X),
    plain("where number left", lambda c, y: torch.where(c > 0, 1.0, y), X, Y),
    plain("where number right", lambda c, y: torch.where(c > 0, y, 1.0), X, Y),
    Sample("logit", lambda x: torch.logit(x.sigmoid(), 1e-3), (X,), pending=("sum",)),
    plain(
        "rrelu backward", lambda g, x, n: aten.rrelu_with_noise_backward(g, x, n, 0.1, 0.3, True, False),
        X, Y, torch.full((5, 6), 0.2),
    ),
]
COPIES = [
    plain("contiguous", lambda x: aten.contiguous.default(x), X),
    plain("lift_fresh", aten.lift_fresh.default, X),
    plain("t_copy", aten.t_copy.default, X),
    plain("transpose_copy", lambda x: aten.transpose_copy.int(x, 0, -1), Z),
    plain("permute_copy", lambda x: aten.permute_copy.default(x, [2, 0, 3, 1]), Z),
    plain("expand_copy", lambda x: aten.expand_copy.default(x, [3, 5, 6]), X),
    plain("view_copy", lambda x: aten.view_copy.default(x, [6, 24]), Z),
    plain("view_copy dtype", lambda x: aten.view_copy.dtype(x, torch.int32), I.to(torch.int32)),
    plain("reshape_copy", lambda x: aten._reshape_copy.default(x, [6, 24]), Z),
    plain("squeeze_copy", lambda x: aten.squeeze_copy.default(x), rand(5, 1, 6)),
    plain("unsqueeze_copy", lambda x: aten.unsqueeze_copy.default(x, -1), X),
    plain("diagonal_copy", lambda x: aten.diagonal_copy.default(x), X),
    plain("unfold_copy", lambda x: aten.unfold_copy.default(x, 1, 2, 2), X),
    plain("select_copy", lambda x: aten.select_copy.int(x, 1, -2), X),
    plain("slice_copy", lambda x: aten.slice_copy.Tensor(x, 1, 1, 4), X),
    plain("split_copy", lambda x: aten.split_copy.Tensor(x, 2, 0), X),
    plain("split sizes copy", lambda x: aten.split_with_sizes_copy.default(x, [1, 4], 0), X),
    plain("unbind_copy", lambda x: aten.unbind_copy.int(x, 1), X),
    plain("view_as_real_copy", aten.view_as_real_copy.default, C),
    plain("view_as_complex_copy", aten.view_as_complex_copy.default, rand(5, 6, 2)),
    plain("unsafe_split", lambda x: aten.unsafe_split.Tensor(x, 2, 1), X),
    plain("unsafe sizes", lambda x: aten.unsafe_split_with_sizes.default(x, [2, 4], 1), X),
    plain("unsafe_chunk", lambda x: aten.unsafe_chunk.default(x, 2, 1), X),
    plain("chunk", lambda x: aten.chunk.default(x, 2, 1), X),
    plain("concat", lambda x, y: aten.concat.default([x, y], 1), X, Y),
    plain("concatenate", lambda x, y: aten.concatenate.default([x, y], 0), X, Y),
    plain("channel shuffle", lambda x: aten.native_channel_shuffle.default(x, 2), rand(3, 4, 2, 2)),
]
OTHERS = [
    plain("linear", lambda x, w, b: aten.linear.default(x, w, b), X, rand(4, 6), rand(4)),
    plain("int_mm", aten._int_mm.default, ints(9, 24, 16).to(torch.int8), ints(9, 16, 8).to(torch.int8)),
    plain("addmm_activation", lambda b, x, y: aten._addmm_activation.default(b, x, y), rand(4), X, rand(6, 4)),
    plain("cummin", lambda x: torch.cummin(x, 1)[0], X),
    plain("nanmedian", lambda x: torch.nanmedian(x, 1)[0], X),
    plain("norm", lambda x: aten.norm.ScalarOpt_dim(x, 2.0, [1]), X),
    plain("isin number", lambda x: torch.isin(x, 3), I),
    plain("unsafe_index", lambda x, i: aten._unsafe_index.Tensor(x, [i]), X, ints(5, 3)),
    plain(
        "unsafe_index_put", lambda x, i, v: aten._unsafe_index_put.default(x, [i], v),
        X, torch.tensor([1, 3]), rand(2, 6),
    ),
    Sample("reflection 2d", lambda x: torch.nn.functional.pad(x, (1, 2, 1, 0), mode="reflect"), (Z,)),
    Sample("replication 1d", lambda x: torch.nn.functional.pad(x, (1, 2), mode="replicate"), (rand(3, 4, 5),)),
    Sample("reflection 3d", lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1, 1, 0), mode="reflect"), (V,)),
    Sample("replication 3d", lambda x: torch.nn.functional.pad(x, (1, 1, 1, 0, 1, 1), mode="replicate"), (V,)),
]
WHOLE = (
    "and,or,xor,conj_physical,positive,relu6,contiguous,chunk,unsafe_chunk,concat,concatenate,clip,true_divide,"
    "max.other,min.other,linear,ndtr,where numbers,where number left,where number right"
).split(",")
"""Composites: torch takes them apart before dispatch, except in inference mode."""


def in_inference_mode(sample: Sample) -> Sample:
    """The sample as it is run in inference mode."""

    def fn(*tensors: torch.Tensor):
        with torch.inference_mode():
            return sample.fn(*tensors)

    return Sample(f"{sample.name} in inference mode", fn, sample.tensors, grads=False)


INFERENCE = [in_inference_mode(s) for s in (*POINTWISE, *COPIES, *OTHERS) if s.name in WHOLE]
NO_STRATEGIES = {"positive", "contiguous", "conj", "neg_view"}
"""Taken apart before any rule is asked, or lazy: the layouts are checked all the same."""
SAMPLES = [*POINTWISE, *COPIES, *OTHERS]
