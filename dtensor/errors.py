"""Errors of the engine: what was called, what it got, the rule that was broken, a fix to paste.

No text is longer than `LIMIT`. What can grow without bound (values of users, names of a model's modules, ranks of a
mesh) goes into a text by `short` or `listed`; whatever is too long still, loses the middles of its longest lines, so
that the call, the rule and the fix stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

__all__ = [
    "LIMIT", "SEE_INPUTS", "WITHOUT_SWAP", "BoundedError", "CollectiveError", "LayoutError", "MeshError",
    "MixedTensorError", "NoRuleError", "RuleError", "bounded", "expect", "explain_error", "listed", "refuse_layout",
    "short",
]  # fmt: skip

LIMIT = 1900
"""Characters of an error's text; room is left for what names a rank or an operator in front of it."""


def short(value: object, limit: int = 200) -> str:
    """`repr(value)`, without its middle where that is longer than `limit`."""
    return _cut(repr(value), limit)


def listed(names: Iterable[object], limit: int = 8) -> str:
    """`a, b, c and 97 more`."""
    found = [_cut(str(name), 100) for name in names]
    more = len(found) - limit
    return ", ".join(found[:limit]) + (f" and {more} more" if more > 0 else "")


def bounded(text: str, limit: int = LIMIT) -> str:
    """`text` with at most `limit` characters: its longest lines lose their middles, the line of the fix last."""
    lines = text.split("\n")
    if len(text) > limit and len(lines) > 24:
        fixes = [line for line in lines[16:-7] if line.startswith("  fix: ")][:1]
        lines = [*lines[:16], f"  ... {len(lines) - 23 - len(fixes)} lines more", *fixes, *lines[-7:]]
    over = sum(map(len, lines)) + len(lines) - 1 - limit
    while over > 0:
        longest = max(range(len(lines)), key=lambda i: (len(lines[i]), -i) if "fix: " not in lines[i] else (0, 0))
        longest = longest if len(lines[longest]) > 160 else max(range(len(lines)), key=lambda i: len(lines[i]))
        cut = _cut(lines[longest], max(len(lines[longest]) - over - 5, min(160, len(lines[longest]) // 2)))
        over -= len(lines[longest]) - len(cut)
        lines[longest] = cut
    return "\n".join(lines)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = (limit - 5) * 2 // 3
    return f"{text[:head]} ... {text[len(text) - (limit - 5 - head) :]}"


SEE_INPUTS = (
    "where modules under a plan may have been given inputs that differ between ranks: DTENSOR_CHECK_INPUTS=first in "
    'the environment, or parallelize_module(..., check_inputs="first"), compares them'
)
"""What to do about errors that may come from such inputs."""


class BoundedError(Exception):
    """An error whose text is `bounded`, and names `dtensor.swap` where torch's data parallelism led to it."""

    def __init__(self, *args: object) -> None:
        text = str(args[0]) if args else "dtensor.swap"
        asked = text.startswith("fsdp.") or _inside_data_parallel(sys._getframe(1))
        more = WITHOUT_SWAP if asked and "dtensor.swap" not in text else ""
        super().__init__(*(bounded(a, LIMIT - len(more)) + more if isinstance(a, str) else a for a in args))


WITHOUT_SWAP = (
    "\n  rule: torch's fully_shard, replicate, FSDP and DDP know torch's own DTensor only\n"
    "  fix: use dtensor.swap: python -m dtensor.swap program.py, or dtensor.swap.install() before all other imports"
)


def _inside_data_parallel(frame: FrameType | None) -> bool:
    """Whether one of torch's modules for data parallelism called, not through a module of the program, without swap."""
    swap = sys.modules.get("dtensor.swap")
    if swap is not None and swap.installed():
        return False
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _HERE:
        if str(frame.f_globals["__name__"]).startswith(DATA_PARALLEL):
            return True
        frame = frame.f_back
    return False


_HERE = ("torch", "dtensor", "parallel", "loss", "propagation_rules", "contextlib", "functools")
DATA_PARALLEL = (
    "torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks", "torch.distributed.utils",
)  # fmt: skip
"""Modules of torch that hand out `fully_shard`, `replicate`, `FullyShardedDataParallel`, `DistributedDataParallel`."""


class CollectiveError(BoundedError, RuntimeError):
    """A collective that its process group did not finish: a timeout, an abort, a rank that is gone."""

    def during(self, what: str) -> None:
        """Say what the collective was for. Said once, by whoever is nearest to it."""
        text = str(self.args[0]) if self.args else ""
        if "\n  for: " not in text:
            head, _, rest = text.partition("\n  from: ")
            what = what.replace("\n", "\n    ")
            self.args = (bounded(f"{head}\n  for: {what}" + (f"\n  from: {rest}" if rest else "")),)


class LayoutError(BoundedError, RuntimeError):
    """A layout that an operation cannot take, or an operation that a layout does not allow."""


class MixedTensorError(LayoutError):
    """A plain tensor among DTensors."""


class MeshError(LayoutError):
    """Tensors of different meshes in one operation."""


class NoRuleError(BoundedError, NotImplementedError):
    """An operator without a sharding rule that cannot be run another way."""


class RuleError(BoundedError, ValueError):
    """A sharding rule that cannot be meant: it fails, or does not fit its operator."""


def explain_error(call: str, got: str, rule: str, fix: str) -> str:
    """The four-part message. `call` and `got` are facts, `rule` is one sentence, `fix` is code to paste."""
    return bounded(f"{call}: {rule}\n  got: {got}\n  fix: {fix}")


def expect(call: str, name: str, value: object, kind: Any, what: str, fix: str) -> None:
    """Raise TypeError where the argument `name` of `call` is not of `kind`, that is `what`. A bool is no int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(
            explain_error(call, f"{name}={short(value)}, a {type(value).__name__}", f"{name} must be {what}", fix)
        )


def refuse_layout(call: str, t: torch.Tensor, fix: str = "t.to_dense()") -> None:
    """RuntimeError for tensors that are no dense block of numbers: sparse, nested, opaque to torch."""
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise RuntimeError(
            explain_error(
                call, f"a {kind} tensor of {list(t.shape) if not t.is_nested else 'several shapes'}",
                "only dense tensors can be distributed", "t.to_padded_tensor(0)" if t.is_nested else fix,
            )
        )  # fmt: skip
