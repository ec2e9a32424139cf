"""What type checkers take for the base of DTensor: operators, and the methods used most, give DTensors."""

from collections.abc import Callable

import torch

from dtensor.tensor import DTensor

Gives = Callable[..., DTensor]
Give = Callable[..., tuple[DTensor, ...]]

class Tensor(torch.Tensor):
    grad: DTensor | None
    # fmt: off
    chunk: Give; split: Give; tensor_split: Give; unbind: Give
    __add__: Gives; __radd__: Gives; __sub__: Gives; __rsub__: Gives; __mul__: Gives; __rmul__: Gives
    __truediv__: Gives; __rtruediv__: Gives; __floordiv__: Gives; __rfloordiv__: Gives; __mod__: Gives
    __pow__: Gives; __rpow__: Gives; __matmul__: Gives; __rmatmul__: Gives; __neg__: Gives; __pos__: Gives
    __abs__: Gives; __invert__: Gives; __and__: Gives; __or__: Gives; __xor__: Gives; __lt__: Gives; __le__: Gives
    __gt__: Gives; __ge__: Gives; __iadd__: Gives; __isub__: Gives; __imul__: Gives; __itruediv__: Gives
    __eq__: Gives; __ne__: Gives  # type: ignore[assignment]
    abs: Gives; add: Gives; addmm: Gives; all: Gives; amax: Gives; amin: Gives; any: Gives; argmax: Gives
    argmin: Gives; argsort: Gives; baddbmm: Gives; bfloat16: Gives; bmm: Gives; bool: Gives; clamp: Gives
    clone: Gives; contiguous: Gives; cos: Gives; cpu: Gives; cuda: Gives; cumsum: Gives; detach: Gives; diff: Gives
    div: Gives; double: Gives; dot: Gives; eq: Gives; exp: Gives; expand: Gives; expand_as: Gives; flatten: Gives
    flip: Gives; float: Gives; gather: Gives; ge: Gives; gt: Gives; half: Gives; index_add: Gives; index_put: Gives
    index_select: Gives; int: Gives; isfinite: Gives; isinf: Gives; isnan: Gives; le: Gives; lerp: Gives; log: Gives
    log_softmax: Gives; logical_and: Gives; logical_not: Gives; logical_or: Gives; logsumexp: Gives; long: Gives
    lt: Gives; masked_fill: Gives; masked_select: Gives; matmul: Gives; maximum: Gives; mean: Gives; minimum: Gives
    mm: Gives; movedim: Gives; mul: Gives; mv: Gives; narrow: Gives; ne: Gives; neg: Gives; new_empty: Gives
    new_full: Gives; new_ones: Gives; new_tensor: Gives; new_zeros: Gives; norm: Gives; outer: Gives; permute: Gives
    pow: Gives; prod: Gives; reciprocal: Gives; relu: Gives; repeat: Gives; repeat_interleave: Gives; reshape: Gives
    roll: Gives; round: Gives; rsqrt: Gives; scatter: Gives; scatter_add: Gives; select: Gives; sigmoid: Gives
    sign: Gives; sin: Gives; softmax: Gives; sqrt: Gives; square: Gives; squeeze: Gives; std: Gives; sub: Gives
    sum: Gives; swapaxes: Gives; t: Gives; take_along_dim: Gives; tanh: Gives; tile: Gives; to: Gives
    to_dense: Gives; transpose: Gives; tril: Gives; triu: Gives; type_as: Gives; unflatten: Gives; unfold: Gives
    unsqueeze: Gives; var: Gives; view: Gives; view_as: Gives; where: Gives; add_: Gives; clamp_: Gives
    copy_: Gives; div_: Gives; exp_: Gives; fill_: Gives; masked_fill_: Gives; mul_: Gives; neg_: Gives
    normal_: Gives; pow_: Gives; relu_: Gives; sqrt_: Gives; sub_: Gives; uniform_: Gives; zero_: Gives
