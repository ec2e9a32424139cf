"""What the programs beside this one share. It holds no name that `dtensor.swap` swaps, as both engines use it."""

import torch
import torch.nn as nn


def made(width=10, hidden=12, dtype=torch.float64, seed=0):
    """Two linear layers and a norm: the same numbers on every process."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width))
    return net.to(dtype)


def batches(count, rows, width=10, dtype=torch.float64, seed=3):
    """The global batches of `count` steps."""
    return torch.randn(count, rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def full(x):
    """The whole of a tensor, detached, whichever kind it is."""
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def numbers(model, *more):
    """Every parameter, whole, then `more`."""
    return [*(full(p).clone() for p in model.parameters()), *(full(x).clone() for x in more)]


def train(model, data, optimizer, clip=None):
    """A step for each batch; gives the losses and the gradients' norms."""
    seen = []
    for x in data:
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip is not None:
            seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(full(loss))
    return seen


def close(got, want, tolerance=1e-9):
    """Two lists of tensors agree."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
