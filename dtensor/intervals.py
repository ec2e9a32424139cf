"""A whole tensor cut into what the positions of an axis hold: `Shard._split_tensor`, which programs call."""

from __future__ import annotations

import torch

__all__ = ["pieces"]


def pieces(
    x: torch.Tensor, dim: int, split_factor: int, count: int, padded: bool, contiguous: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """What `count` positions hold of `x`, cut along `dim`; with a split factor, of each of so many chunks of it.

    With `padded` each part is filled up with zeros to the length of the longest, and the second list says by how many
    elements; without, it is empty. Raises IndexError for a dim that `x` does not have.
    """
    dim = range(x.ndim)[dim]
    runs = x.chunk(split_factor, dim) if split_factor > 1 else (x,)
    cut = [[*run.chunk(count, dim), *(run.narrow(dim, 0, 0),) * count][:count] for run in runs]
    parts = [torch.cat(of_one, dim) if split_factor > 1 else of_one[0] for of_one in zip(*cut, strict=True)]
    pads: list[int] = []
    if padded:
        longest = max(part.shape[dim] for part in parts)
        pads = [longest - part.shape[dim] for part in parts]
        parts = [_filled_up(part, dim, n) if n else part for part, n in zip(parts, pads, strict=True)]
    return [part.contiguous() for part in parts] if contiguous else parts, pads


def _filled_up(part: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)
