"""Random programs of views, writes and reads, run on a DTensor and on a plain tensor side by side.

`program(seed, mesh_shape, steps)` starts from one tensor in a random layout; each step takes a view of one of the
tensors so far, writes into one, or reads one. Whatever plain torch refuses is left out. It returns '' where all
tensors agreed throughout, else the program and what differed.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from laws import layouts_of, make

from dtensor import DTensor, init_device_mesh

Make = Callable[..., Any]
"""make(full tensor, seed of the layout): the tensor for the side that the program runs on."""

SHAPES = [(6, 4), (5, 3), (7,), (4, 3, 2), (8, 4), (3, 5), (2, 6), (1, 4)]


# ------------------------------------------------------------ views
def a_view(rng: random.Random, t: torch.Tensor) -> tuple[str, Callable[[Any], Any]]:
    """A view of tensors shaped like `t`."""
    n = t.ndim
    found: list[tuple[str, Callable[[Any], Any]]] = [("detach", lambda x: x.detach()), ("as", lambda x: x.view_as(x))]
    if n:
        d, e, perm = rng.randrange(n), rng.randrange(n), rng.sample(range(n), n)
        k, total = t.shape[d], t.numel()
        rows = rng.choice([f for f in range(1, total + 1) if total % f == 0] or [1])
        found += [
            (f"transpose {d} {e}", lambda x: x.transpose(d, e)), ("flatten", lambda x: x.flatten()),
            (f"permute {perm}", lambda x: x.permute(perm)), (f"unsqueeze {d}", lambda x: x.unsqueeze(d)),
            ("squeeze", lambda x: x.squeeze()), (f"reshape {rows}", lambda x: x.reshape(rows, x.numel() // rows)),
        ]  # fmt: skip
        if k:
            a, step, i, w = rng.randrange(k), rng.choice([1, 1, 2]), rng.randrange(-k, k), rng.randint(1, k)
            b, j = rng.randint(a, k), rng.randrange(len(torch.chunk(t, 3, d)))
            found += [
                (f"slice {d} {a}:{b}:{step}", lambda x: x[(slice(None),) * d + (slice(a, b, step),)]),
                (f"select {d} {i}", lambda x: x.select(d, i)), (f"unbind {d} {a}", lambda x: x.unbind(d)[a]),
                (f"chunk {d} {j}", lambda x: torch.chunk(x, 3, d)[j]), (f"unfold {d} {w}", lambda x: x.unfold(d, w, w)),
            ]  # fmt: skip
        if n > 1:
            found.append(("diagonal", lambda x: x.diagonal()))
            found.append(("view", lambda x: x.view(-1) if x.is_contiguous() else x))
    return rng.choice(found)


# ------------------------------------------------------------ writes
def a_write(rng: random.Random, t: torch.Tensor) -> tuple[str, Callable[[Any, Make], Any]]:
    """A write into tensors shaped like `t`: name, f(tensor, make)."""
    shape, seed, lay = tuple(t.shape), rng.randrange(10**6), rng.randrange(10**6)
    g = torch.Generator().manual_seed(seed)

    def v(*size: int) -> torch.Tensor:
        full = torch.randint(-8, 9, size, generator=torch.Generator().manual_seed(seed)).to(t.dtype)
        return full / 4 if t.is_floating_point() else full

    found: dict[str, Callable[[Any, Make], Any]] = {
        "add_ 1": lambda x, mk: x.add_(1), "mul_ 2": lambda x, mk: x.mul_(2), "zero_": lambda x, mk: x.zero_(),
        "fill_ 3": lambda x, mk: x.fill_(3), "relu_": lambda x, mk: x.relu_(), "clamp_": lambda x, mk: x.clamp_(-3, 3),
        "sub_": lambda x, mk: x.sub_(mk(v(*shape), lay)), "copy_": lambda x, mk: x.copy_(mk(v(*shape), lay)),
        "mul_": lambda x, mk: x.mul_(mk(v(*shape), lay)), "+= row": lambda x, mk: x.__iadd__(mk(v(*shape[-1:]), lay)),
        "out=": lambda x, mk: torch.maximum(mk(v(*shape), lay), mk(v(*shape) + 1, lay + 1), out=x),
        "masked_fill_": lambda x, mk: x.masked_fill_(mk(v(*shape) > 0, lay), 2),
        "[mask] =": lambda x, mk: x.__setitem__(mk(v(*shape) > 0, lay), 1),
        "masked_scatter_": lambda x, mk: x.masked_scatter_(mk(v(*shape) > 0, lay), mk(v(*shape), lay + 2)),
        "foreach": lambda x, mk: torch._foreach_clamp_min_([x, mk(v(*shape), lay)], -1.0),
        "foreach twice": lambda x, mk: torch._foreach_add_([x, x], 1.0), "data": lambda x, mk: x.data.mul_(2),
        "cumsum_": lambda x, mk: x.cumsum_(0), "tril_": lambda x, mk: x.tril_(), "self": lambda x, mk: x.add_(x),
        "addcmul_": lambda x, mk: x.addcmul_(mk(v(*shape), lay), mk(v(*shape), lay + 1)),
        "remainder_": lambda x, mk: x.remainder_(3), "eq_": lambda x, mk: x.eq_(mk(v(*shape), lay)),
    }  # fmt: skip
    if t.ndim and t.numel():
        d = rng.randrange(t.ndim)
        k, lead = shape[d], (slice(None),) * d
        few = torch.randperm(k, generator=g)[: rng.randint(1, k)]
        some, a = torch.randint(0, k, (3,), generator=g), rng.randrange(k)
        rows, more = (*shape[:d], len(few), *shape[d + 1 :]), (*shape[:d], 3, *shape[d + 1 :])
        wide = torch.randint(0, k, more, generator=g)
        order = torch.argsort(torch.rand(shape, generator=g), d)
        mask, flat = torch.rand(k, generator=g) > 0.4, torch.randperm(t.numel(), generator=g)[:4]
        put = torch.ops.aten.index_put_.default
        found |= {
            "index_copy_": lambda x, mk: x.index_copy_(d, mk(few, lay), mk(v(*rows), lay + 1)),
            "index_add_": lambda x, mk: x.index_add_(d, mk(some, lay), mk(v(*more), lay + 1)),
            "index_fill_": lambda x, mk: x.index_fill_(d, mk(few, lay), 2),
            "scatter_add_": lambda x, mk: x.scatter_add_(d, mk(wide, lay), mk(v(*more), lay + 1)),
            "scatter_": lambda x, mk: x.scatter_(d, mk(order, lay), mk(v(*shape), lay + 1)),
            "scatter_reduce_": lambda x, mk: x.scatter_reduce_(d, mk(wide, lay), mk(v(*more), lay + 1), "amin"),
            "[index] =": lambda x, mk: x.__setitem__((*lead, mk(few, lay)), mk(v(*rows), lay + 1)),
            "[list] =": lambda x, mk: x.__setitem__((*lead, few.tolist()), 2),
            "index_put_ +": lambda x, mk: put(x, [None] * d + [mk(some, lay)], mk(v(*more), lay + 1), True),
            "[rows mask] =": lambda x, mk: x.__setitem__((*lead, mk(mask, lay)), 4),
            "[a] =": lambda x, mk: x.__setitem__((*lead, a), mk(v(*shape[:d], *shape[d + 1 :]), lay)),
            "[a] += 1": lambda x, mk: x.__setitem__((*lead, a), x[(*lead, a)] + 1),
            "[a:] =": lambda x, mk: x.__setitem__((*lead, slice(a, None)), x[(*lead, slice(0, k - a))].clone()),
            "put_": lambda x, mk: x.put_(mk(flat, lay), mk(v(len(flat)), lay + 1)),
        }
    name = rng.choice(list(found))
    return name, found[name]


def _layout(rng: random.Random, t: torch.Tensor, axes: int) -> Sequence[Any]:
    return rng.choice(layouts_of(t, axes, ("sum", "avg", "max", "min")))


def program(seed: int, mesh_shape: tuple[int, ...], steps: int) -> str:
    """Run one program; '' when all was right."""
    mesh, rng = init_device_mesh("cpu", mesh_shape), random.Random(seed)
    axes = len(mesh_shape)
    dtype = rng.choice([torch.float64, torch.float64, torch.float64, torch.int64])
    shape = rng.choice(SHAPES)
    full = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    placed = _layout(rng, full, axes)
    plain, ours = [full.clone()], [make(full, mesh, placed)]
    trace = [f"seed {seed} on {mesh_shape}: {shape} {dtype} {placed}"]

    def make_ours(value: torch.Tensor, lay: int) -> DTensor:
        return make(value, mesh, _layout(random.Random(lay), value, axes))

    def read(i: int) -> None:
        trace.append(f"read {i}")
        torch.testing.assert_close(ours[i].full_tensor(), plain[i].contiguous(), rtol=1e-6, atol=1e-6)

    try:
        for _ in range(steps):
            what, i = rng.random(), rng.randrange(len(plain))
            if what < 0.35:
                name, view = a_view(rng, plain[i])
                trace.append(f"{len(plain)} = {name} of {i}")
                try:
                    seen = view(plain[i])
                except RuntimeError:
                    continue
                plain.append(seen)
                ours.append(view(ours[i]))
            elif what < 0.85:
                name, write = a_write(rng, plain[i])
                before, kept = plain[0].clone(), ours[i].placements
                trace.append(f"{name} into {i}")
                try:
                    write(plain[i], lambda value, lay: value)
                except (RuntimeError, IndexError):
                    plain[0].copy_(before)
                    continue
                write(ours[i], make_ours)
                if ours[i].placements != kept:
                    raise AssertionError(f"layout {kept} became {ours[i].placements}")
                plain[0].clamp_(-1000, 1000)
                ours[0].clamp_(-1000, 1000)
            else:
                read(i)
        for i in rng.sample(range(len(plain)), len(plain)):
            read(i)
    except Exception as e:  # every rank reports what it met
        return "\n  ".join(trace) + "\n" + "".join(traceback.format_exception(e)[-2:])
    return ""
