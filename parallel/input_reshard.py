"""input_reshard: keep only a shard of what backward needs of replicated activations, and gather it back then.

Between forward and backward a tensor-parallel module keeps its whole input on every rank. With the hooks of
this file each rank keeps its piece, and backward gathers the pieces (one all-gather a tensor):

    forward   x (replicated)   --shard-->   shard kept
    backward  shard            --gather-->  x

What is saved several times, such as the input of query, key and value projections, is kept once and gathered once: the
first of them that backward comes to gathers it, the last lets it go.

What is sharded: replicated DTensors, and the module's own plain tensor inputs, which tensor-parallel modules
take whole. Everything else (parameters, sharded DTensors, plain tensors that differ between ranks) is kept
as it is, so every saved tensor comes back exactly, whatever its size. A plain input that was *not* equal on
all ranks is noticed when it is gathered, by a checksum that travels along, and raises on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from dtensor.dispatch.materialized import Watch, memory_version
from dtensor.errors import SEE_INPUTS, expect, short
from dtensor.mesh import DeviceMesh
from dtensor.mesh.device_mesh import as_mesh
from dtensor.placement import Replicate, Shard
from dtensor.tensor import DTensor

from .styles.compare import digest

__all__ = ["input_reshard"]

Key = tuple[object, ...]


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Make `module` keep its replicated activations sharded along `input_reshard_dim` until backward.

    Args:
        tp_device_mesh: the mesh of one axis over which the module is tensor-parallel.
        input_reshard_dim: the dim to shard; None changes nothing. Tensors without that dim are kept in full.

    Returns `module`, with two hooks. Raises ValueError for a mesh of several axes and TypeError for a dim that
    is no int.
    """
    expect("input_reshard", "module", module, nn.Module, "a module", 'input_reshard(net, mesh["tp"], 0)')
    if input_reshard_dim is None:
        return module
    if not isinstance(input_reshard_dim, int) or isinstance(input_reshard_dim, bool):
        raise TypeError(
            f"input_reshard: input_reshard_dim must be an int or None, got {short(input_reshard_dim)}\n"
            "  fix: 0"
        )
    mesh = as_mesh(tp_device_mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"input_reshard: works over one mesh axis\n  got: {mesh!r}\n"
            '  fix: pass the tensor-parallel axis, e.g. input_reshard(module, mesh["tp"], 0)'
        )
    dim, running = input_reshard_dim, _Running()

    def enter(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        keeper = _Keeper(mesh, dim, module, [*args, *kwargs.values()])
        hooks = torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack)
        hooks.__enter__()
        running.stack.append((hooks, keeper))

    def leave(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        if running.stack:
            hooks, keeper = running.stack.pop()
            hooks.__exit__()
            keeper.close()

    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return module


class _Running(threading.local):
    """The contexts of the forwards that are running in this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[torch.autograd.graph.saved_tensors_hooks, _Keeper]] = []


@dataclass(slots=True)
class _Piece:
    """What is kept of a tensor: this rank's shard, and how to make the whole again.

    `users` counts how often it was saved; `whole` is there while backward is among them, for `left` more.
    """

    shard: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    distributed: bool
    checksum: torch.Tensor | None
    users: int = 1
    left: int = 0
    whole: torch.Tensor | None = None


class _Keeper:
    """Pack and unpack of one forward."""

    def __init__(self, mesh: DeviceMesh, dim: int, module: nn.Module, inputs: list[object]) -> None:
        self.mesh, self.dim = mesh, dim
        plain = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
        self.inputs = {_key(x) for x in plain}
        self.parameters = {_key(p) for p in module.parameters()}
        self.kept: dict[Key, tuple[_Piece, weakref.ref[torch.UntypedStorage], Key]] = {}
        self.watch: Watch | None = Watch()

    def close(self) -> None:
        """The end of forward: nothing more is saved."""
        self.kept.clear()
        self.watch = None

    def pack(self, x: torch.Tensor) -> torch.Tensor | _Piece:
        ndim = x.ndim
        if not -ndim <= self.dim < ndim or x.shape[self.dim] < 2 or self.mesh.size() == 1:
            return x
        key = _key(x)
        if isinstance(x, DTensor):
            replicated = x.device_mesh == self.mesh and all(isinstance(p, Replicate) for p in x.placements)
            if not replicated or key in self.parameters:
                return x
            return self._piece(x)
        if key not in self.inputs or key in self.parameters or not _is_dense(x):
            return x
        return self._piece(x)

    def _piece(self, x: torch.Tensor) -> _Piece:
        """What is kept of `x`: the piece of an earlier time where the same memory was saved, and not written since.

        The memory itself is not kept alive; what lies at its address later is not taken for it.
        """
        local = x._local_tensor if isinstance(x, DTensor) else x
        key, versions = (*_key(x), local.storage_offset()), (x._version, memory_version(local))
        storage = local.untyped_storage()
        found = self.kept.get(key)
        if found is not None and found[1]() is storage and found[2] == versions:
            found[0].users += 1
            return found[0]
        distributed = isinstance(x, DTensor)
        piece = self._sharded(x, distributed, None if distributed else digest(x).reshape(1))
        self.kept[key] = piece, weakref.ref(storage), versions
        return piece

    def _sharded(self, x: torch.Tensor, distributed: bool, checksum: torch.Tensor | None) -> _Piece:
        with torch.no_grad():
            dt = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
            sharded = dt.redistribute(placements=[Shard(self.dim % x.ndim)]).to_local().clone()
        return _Piece(sharded, x.shape, x.stride(), distributed, checksum)

    def unpack(self, kept: torch.Tensor | _Piece) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if kept.whole is None:
            kept.whole, kept.left = self._gathered(kept), kept.users
        whole, kept.left = kept.whole, kept.left - 1
        if kept.left == 0:
            kept.whole = None
        return whole

    def _gathered(self, kept: _Piece) -> torch.Tensor:
        with torch.no_grad():
            if kept.checksum is not None:
                self._check(kept.checksum, kept.shape)
            dt = DTensor.from_local(
                kept.shard, self.mesh, [Shard(self.dim % len(kept.shape))], run_check=False,
                shape=kept.shape, stride=kept.stride,
            )  # fmt: skip
            whole = dt.redistribute(placements=[Replicate()])
            return whole if kept.distributed else whole.to_local()

    def _check(self, checksum: torch.Tensor, shape: torch.Size) -> None:
        all_sums = DTensor.from_local(checksum, self.mesh, [Shard(0)], run_check=False).full_tensor()
        if not bool((all_sums == all_sums[0]).all()):
            raise RuntimeError(
                f"input_reshard: a plain input of shape {tuple(shape)} was not equal on all ranks of the mesh, so its "
                "pieces do not make it again\n  rule: plain inputs of the module must be the same on every rank\n"
                "  fix: do not reshard this module, or pass the input as a DTensor, e.g. "
                f"DTensor.from_local(x, mesh, [Shard(1)]); {SEE_INPUTS}"
            )


def _key(x: torch.Tensor) -> Key:
    """What identifies the memory that a tensor shows; equal for a tensor and its detached self."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return (local.data_ptr(), x.shape, x.stride(), x.dtype, isinstance(x, DTensor))


def _is_dense(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.layout == torch.strided and x.device.type != "meta"
