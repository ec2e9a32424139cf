"""Sample calls of aten ops: what torch's database of operators reaches, forward and backward, or shapes given.

The database (`torch.testing._internal.common_methods_invocations`) is part of torch; importing it needs the package
`expecttest`, which is among this project's `dev` extra. Of every operator's samples the calls that autograd really
makes are recorded, so a rule for `aten.native_layer_norm_backward` is held to the calls that `layer_norm` leads to.
`select` then keeps, for every overload, calls that are as different from as possible.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy
import torch

from dtensor.rules.call import op_name

from .recorded import Op, RecordedCall, Recorder, tensors_of

__all__ = [
    "DTYPES", "MissingDatabase", "call_from_shapes", "calls_of", "database", "every_call", "random_tensor", "select",
]  # fmt: skip

DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
"""What samples are made in: double, so that rounding hides nothing, and one of every other kind."""


class MissingDatabase(ImportError):
    """torch's database of operators cannot be imported."""


def database() -> dict[str, Any]:
    """torch's operators with samples, by name (`nn.functional.gelu`, `sum`, `norm.nuc`, `_foreach_add`)."""
    try:
        with warnings.catch_warnings():  # about packages of its own that are absent
            warnings.simplefilter("ignore")
            import torch.testing._internal.common_methods_invocations as torch_ops
    except ImportError as e:
        raise MissingDatabase(
            f"torch's database of operators cannot be imported ({e}); it needs the package expecttest: "
            "pip install 'shardwright[dev]', or give shapes instead of using its samples"
        ) from e
    found: dict[str, Any] = {}
    for part in sorted(n for n in dir(torch_ops) if n == "op_db" or (n.startswith("foreach_") and n.endswith("_db"))):
        for info in getattr(torch_ops, part):
            found[f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name] = info
    return dict(sorted(found.items()))


# ------------------------------------------------------------ from the database
def calls_of(name: str, info: Any, dtypes: Sequence[torch.dtype] = DTYPES, most: int = 40) -> list[RecordedCall]:
    """The aten calls that up to `most` samples a dtype of one operator make; samples that fail are left out."""
    calls: list[RecordedCall] = []
    supported = info.supported_dtypes("cpu")
    first = dtypes[0] if dtypes[0] in supported or dtypes[0] != torch.float64 else torch.float32
    for dtype in (first, *dtypes[1:]):
        if dtype not in supported:
            continue
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        grad = bool(info.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, sample in enumerate(_samples(info, dtype, grad)):
                if i >= (most if dtype == first else max(most // 4, 1)):
                    break
                calls += _record(f"{name}[{i}] {str(dtype).removeprefix('torch.')}", info.op, sample, grad, False)
                inplace = getattr(info, "inplace_variant", None)
                if inplace is not None and i < 4:
                    calls += _record(f"{name}_[{i}]", inplace, sample, False, True)
    return calls


def _samples(info: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    try:
        # Seeded once an operator: before every sample it takes a third of the whole time.
        yield from info.sample_inputs("cpu", dtype, requires_grad=grad, set_seed=False)
    except Exception:
        return  # the database has none for this dtype


def _record(origin: str, fn: Any, sample: Any, grad: bool, copy: bool) -> list[RecordedCall]:
    recorder = Recorder(origin)
    first = sample.input
    if copy and isinstance(first, torch.Tensor):
        first = first.detach().clone()
    try:
        with recorder:
            outs = [t for t in tensors_of(fn(first, *sample.args, **sample.kwargs)) if t.requires_grad]
        leaves = [t for t in tensors_of((first, sample.args, sample.kwargs)) if t.requires_grad and t.is_leaf]
        if grad and outs and leaves:
            cotangents = [torch.randn_like(t.detach()) for t in outs]
            with recorder:
                torch.autograd.grad(outs, leaves, cotangents, allow_unused=True)
    except Exception:
        pass  # a sample that torch itself refuses: what was recorded before counts
    return recorder.calls


def select(calls: Iterable[RecordedCall], most: int = 8) -> dict[str, list[RecordedCall]]:
    """By overload up to `most` calls: first one of every kind, those with long dims before others, then more."""
    kinds: dict[str, dict[tuple[Any, ...], dict[str, RecordedCall]]] = {}
    for c in calls:
        kinds.setdefault(c.name, {}).setdefault(c.kind(), {}).setdefault(str(c), c)
    chosen: dict[str, list[RecordedCall]] = {}
    for name, groups in sorted(kinds.items()):
        ranked = [sorted(g.values(), key=RecordedCall.poverty) for g in groups.values()]
        ranked.sort(key=lambda g: g[0].poverty())
        rounds = (g[i] for i in range(most) for g in ranked if i < len(g))
        chosen[name] = [c for c, _ in zip(rounds, range(most), strict=False)]
    return chosen


def every_call(most: int = 8, out: TextIO | None = None) -> dict[str, list[RecordedCall]]:
    """Up to `most` calls of every overload that the database reaches, some 20 seconds of work; `out` is told so."""
    if out is not None:
        out.write("collecting calls from torch's database of operators\n")
        out.flush()
    kept: list[RecordedCall] = []
    for name, info in database().items():
        few = select(calls_of(name, info, most=2 * most), most)
        kept += [c for calls in few.values() for c in calls]
    return select(kept, most)


# ------------------------------------------------------------ from shapes
def random_tensor(text: str, seed: int = 0) -> torch.Tensor:
    """A tensor from `5x4` or `i64:5x4` (f64 f32 bf16 i64 b8 c128; `i64<7:5` are indices below 7; `f64:` is 0-d).

    Raises ValueError for other texts.
    """
    kind, colon, dims = text.rpartition(":")
    kind, _, high = kind.partition("<")
    names = {"": "float64", "f64": "float64", "f32": "float32", "bf16": "bfloat16", "i64": "int64", "b8": "bool"}
    names["c128"] = "complex128"
    try:
        dtype = getattr(torch, names[kind])
        shape = [int(n) for n in dims.split("x")] if dims else []
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is no shape; write 5x4, i64:5x4, i64<7:5, or f64: without dims") from None
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    low, top = (0, int(high or 2)) if high or dtype == torch.bool else (-4, 5)
    return torch.randint(low, top, shape, generator=g).to(dtype)


def call_from_shapes(op: Op, shapes: Sequence[str], arguments: Mapping[str, str]) -> RecordedCall:
    """A call of `op` on random tensors of the shapes given, in schema order, and arguments given as text.

    Raises ValueError when they do not fit the schema.
    """
    tensors = [random_tensor(s, i) for i, s in enumerate(shapes)]
    args: list[Any] = []
    named: dict[str, Any] = {}
    given = dict(arguments)
    for a in op._schema.arguments:
        if a.name in given:
            value: Any = _value(given.pop(a.name))
        elif "Tensor[]" in str(a.real_type) or "List[Tensor]" in str(a.type):
            value, tensors = tensors, []
        elif "Tensor" in str(a.type) and tensors:
            value = tensors.pop(0)
        elif a.has_default_value() or "Optional" in str(a.type):
            value = a.default_value
        else:
            raise ValueError(f"{op_name(op)} needs a value for {a.name!r} ({a.type}): give it as {a.name}=VALUE")
        if a.kwarg_only:
            named[a.name] = value
        else:
            args.append(value)
    if tensors or given:
        extra = f"{len(tensors)} shapes" if tensors else f"arguments {sorted(given)}"
        raise ValueError(f"{op_name(op)} takes no more tensors or arguments, {extra} are left; schema: {op._schema}")
    return RecordedCall(op, tuple(args), named, "shapes given")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else text
