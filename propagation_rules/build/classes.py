"""Which of the entries that indices or targets name lie in this rank's shard of a dim, and where in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.intervals import Interval
from dtensor.rules.kernel import looks_at_values

__all__ = ["bad_targets", "check_indices", "check_targets", "local_slots", "named_target", "out_of_bounds"]


def local_slots(target: torch.Tensor, runs: Sequence[Interval]) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot, mine): for each target its index in the local shard, 0 where it lies elsewhere, and whether it is here.

    `runs` are the intervals of the class dim that this rank holds, ascending.

    Example: a rank that holds classes [3, 6) of 10; targets 4, 9 -> slots 1, 0 and mine True, False.
    """
    if len(runs) == 1:
        ((start, length),) = runs
        slot = target - start if start else target
        mine = (slot >= 0) & (slot < length)
        return torch.where(mine, slot, 0), mine
    slot = torch.zeros_like(target)
    mine = torch.zeros_like(target, dtype=torch.bool)
    before = 0
    for start, length in runs:
        inside = (target >= start) & (target < start + length)
        slot = torch.where(inside, target - (start - before), slot)
        mine |= inside
        before += length
    return slot, mine


def bad_targets(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    """Which targets name a class that does not exist."""
    return ((target < 0) | (target >= classes)) & (target != ignore_index)


def out_of_bounds(call: str, which: object, classes: int) -> str:
    """What an error says of a target, or of one that is not named, whose class does not exist."""
    return f"{call}: {which} is out of bounds for {classes} classes"


def named_target(target: torch.Tensor, bad: torch.Tensor) -> str:
    """The first target that is bad, for an error."""
    return f"target {int(target[bad].flatten()[0])}"


def check_indices(call: str, index: torch.Tensor, n: int, of: str, lowest: int = 0) -> None:
    """IndexError where an index is not in [lowest, n) (on accelerators, in graphs: a failed assertion)."""
    if index.numel() == 0 or index.device.type == "meta":
        return
    bad = (index < lowest) | (index >= n)
    if not looks_at_values(index):
        torch._assert_async(~bad.any(), f"{call}: an index is {of}")
    elif bool(bad.any()):
        raise IndexError(f"{call}: index {int(index[bad][0])} is {of}")


def check_targets(call: str, target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """IndexError when a target names a class that does not exist (on accelerators, in graphs: a failed assertion)."""
    bad = bad_targets(target, classes, ignore_index)
    if target.device.type == "meta":
        return
    if looks_at_values(target):
        if bool(bad.any()):
            raise IndexError(out_of_bounds(call, named_target(target, bad), classes))
    else:
        torch._assert_async(~bad.any(), out_of_bounds(call, "a target", classes))
