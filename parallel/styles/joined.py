"""Modules that keep a packed parameter in parts: weight_0, weight_1, ... in place of weight.

The module's class is replaced by a subclass made for it, in which the packed names are properties. In forward they
give the local shards of the parts, one after the other, as a DTensor: a tensor of the right shape whose features are
in the order of the ranks, not of the parts. Elsewhere they give the parts joined in their true order, as does
`state_dict`. That is a copy, which is remembered until the module runs or is asked again: what was written into it by
then (`nn.init.normal_(module.weight)`, `module.reset_parameters()`) is written into the parts. Writes through
`module.weight.data` leave no trace, so copies given by the property are always written back, which costs an exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from dtensor.placement import Placement, Replicate, Shard
from dtensor.spec import stride_like
from dtensor.tensor import DTensor

from .axis import StyleAxis
from .style import full

__all__ = ["keep_parts", "put_together", "running_order", "split_output"]

PACKED = "_packed_parameters"
RUNNING = "_packed_running"
HANDED = "_packed_handed"


def keep_parts(module: nn.Module, dims: Mapping[str, int], sizes: Sequence[int]) -> None:
    """Replace each parameter named in `dims` by its parts of `sizes` along that dim."""
    for name, dim in dims.items():
        param = cast(nn.Parameter, module._parameters.pop(name))
        for i, part in enumerate(param.detach().split(list(sizes), dim)):
            value = part.contiguous().clone()
            module.register_parameter(f"{name}_{i}", nn.Parameter(value, requires_grad=param.requires_grad))
    module.__dict__[PACKED] = {n: (d, len(sizes)) for n, d in dims.items()}
    module.__class__ = _in_parts(type(module))


def put_together(module: nn.Module) -> None:
    """Undo `keep_parts`, whatever the layout of the parts is by now: whole plain parameters."""
    packed = module.__dict__.get(PACKED)
    if packed is None:
        return
    _settle(module)
    values = {name: [module._parameters.pop(f"{name}_{i}") for i in range(n)] for name, (_, n) in packed.items()}
    del module.__dict__[PACKED]
    module.__class__ = type(module).__mro__[2]
    for name, parts in values.items():
        dim = packed[name][0]
        whole = nn.Parameter(_cat([p.detach() for p in parts], dim), requires_grad=parts[0].requires_grad)  # type: ignore[union-attr]
        if all(p.grad is not None for p in parts):  # type: ignore[union-attr]
            whole.grad = _cat([p.grad for p in parts], dim)  # type: ignore[union-attr,misc]
        module.register_parameter(name, whole)


def running_order(module: nn.Module) -> list[str]:
    """Names of the parts of `module`."""
    return [f"{name}_{i}" for name, (_, n) in module.__dict__[PACKED].items() for i in range(n)]


def split_output(y: DTensor, sizes: Sequence[int], over: StyleAxis, dim: int) -> list[torch.Tensor]:
    """The parts of an output in the order of the ranks, each a DTensor sharded along `dim`."""
    placed = list(y.placements)
    out: list[torch.Tensor] = []
    for size, part in zip(sizes, y.to_local().split([n // over.size for n in sizes], dim), strict=True):
        shape = [size if d == y.ndim + dim else n for d, n in enumerate(y.shape)]
        out.append(
            DTensor.from_local(
                part, over.mesh, placed, run_check=False, shape=shape, stride=stride_like(y, tuple(shape))
            )
        )
    return out


def _cat(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts, DTensors or not, as one whole plain tensor."""
    return torch.cat([full(p) if isinstance(p, DTensor) else p for p in parts], dim)


class _InParts:
    """Mixed into the class of a module that keeps parameters in parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on the local shards of the parts."""
        packed = self.__dict__[PACKED]
        _settle(self)
        self.__dict__[RUNNING] = {name: _by_rank(_parts(self, name), dim) for name, (dim, _) in packed.items()}
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__[RUNNING]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For copies and pickle: without what was handed out, whose changes belong to this module alone."""
        _settle(self)
        return _empty, (type(self).__mro__[2],), dict(self.__dict__)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        _settle(self)
        super()._save_to_state_dict(own, "", keep_vars)  # type: ignore[misc]
        for name, (dim, n) in self.__dict__[PACKED].items():
            parts = [own.pop(f"{name}_{i}") for i in range(n)]
            destination[prefix + name] = _hand_out(self, name, parts, dim)
        destination.update({prefix + name: x for name, x in own.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        mine = dict(state_dict)
        for name, (dim, n) in self.__dict__[PACKED].items():
            if prefix + name in mine:
                whole = mine.pop(prefix + name)
                sizes = [p.shape[dim] for p in _parts(self, name)]
                fits = whole.ndim > dim and whole.shape[dim] == sum(sizes)
                pieces = whole.split(sizes, dim) if fits else [whole] * n
                mine.update({f"{prefix}{name}_{i}": piece for i, piece in enumerate(pieces)})
        super()._load_from_state_dict(mine, prefix, *rest)  # type: ignore[misc]
        # what the parts' names are called outside
        missing, unexpected = rest[2], rest[3]
        for name, (_, n) in self.__dict__[PACKED].items():
            inner = {f"{prefix}{name}_{i}" for i in range(n)}
            if inner & set(missing):
                missing[:] = [k for k in missing if k not in inner] + [prefix + name]
            unexpected[:] = [k for k in unexpected if k != prefix + name]


def _parts(module: Any, name: str) -> list[torch.Tensor]:
    return [module._parameters[f"{name}_{i}"] for i in range(module.__dict__[PACKED][name][1])]


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts in their true order, laid out as each of them is."""
    whole = torch.cat(list(parts), dim)
    first = parts[0]
    if isinstance(whole, DTensor) and isinstance(first, DTensor):
        return whole.redistribute(placements=first.placements)
    return whole


def _hand_out(
    module: Any, name: str, parts: Sequence[torch.Tensor], dim: int, by_data: bool = False
) -> torch.Tensor:
    """The joined parts, remembered with what tells whether they or the parts are written to later.

    `by_data`: they may be written to without a trace.
    """
    whole = _joined(parts, dim)
    handed = module.__dict__.setdefault(HANDED, [])
    handed.append((name, whole, _versions([whole]), _versions(_parts(module, name)), by_data))
    return whole


def _settle(module: Any) -> None:
    """Write into the parts what was written into joined copies of them, and forget the copies."""
    for name, whole, then, parts_then, by_data in module.__dict__.pop(HANDED, ()):
        parts, dim = _parts(module, name), module.__dict__[PACKED][name][0]
        written, moved_on = _versions([whole]) != then, _versions(parts) != parts_then
        if not written and (moved_on or not by_data):
            continue
        if moved_on:
            raise RuntimeError(
                f"{type(module).__name__}: both the parts of `{name}` and a joined copy of them were written to\n"
                "  rule: a packed parameter with parts of several sizes is kept in parts; module.weight and "
                "state_dict() give copies, whose changes are taken over when the module is used next\n"
                f"  fix: write to one of them, or load_state_dict; the parts are {name}_0, {name}_1, ..."
            )
        with torch.no_grad():
            for part, piece in zip(parts, whole.detach().split([p.shape[dim] for p in parts], dim), strict=True):
                part.copy_(piece)


def _versions(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """What changes when a tensor is written to."""
    seen = [(t, *([t._local_tensor] if isinstance(t, DTensor) else [])) for t in tensors]
    return [(id(each[0]), *(0 if t.is_inference() else t._version for t in each)) for each in seen]


def _by_rank(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts with the features in the order of the ranks: every rank's shards, one after the other."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return torch.cat(list(parts), dim)
    local = torch.cat([cast(DTensor, p).to_local() for p in parts], dim)
    shape = [sum(p.shape[dim] for p in parts) if d == dim else n for d, n in enumerate(first.shape)]
    placed: list[Placement] = [p if isinstance(p, Shard) else Replicate() for p in first.placements]
    return DTensor.from_local(
        local, first.device_mesh, placed, run_check=False, shape=shape, stride=stride_like(local, tuple(shape))
    )


_made: dict[type, type[nn.Module]] = {}


def _empty(cls: type[nn.Module]) -> nn.Module:
    """A module of the subclass for `cls`, to be given its state."""
    made = _in_parts(cls)
    return made.__new__(made)


def _in_parts(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls`, made once, in which packed parameters are properties."""
    if cls in _made:
        return _made[cls]

    def joined(name: str) -> property:
        def get(self: nn.Module) -> torch.Tensor | None:
            packed = self.__dict__[PACKED]
            if name not in packed:
                return self._parameters.get(name)
            running = self.__dict__.get(RUNNING)
            if running is not None:
                return cast(torch.Tensor, running[name])
            _settle(self)
            return _hand_out(self, name, _parts(self, name), packed[name][0], by_data=True)

        return property(get)

    names = {"weight": joined("weight"), "bias": joined("bias"), "__module__": __name__}
    return _made.setdefault(cls, type(f"{cls.__name__}InParts", (_InParts, cls), names))
