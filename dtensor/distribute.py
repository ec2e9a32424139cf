"""`distribute_tensor` and `distribute_module`: from what every rank holds to DTensors."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FrameType, GeneratorType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from dtensor.dispatch.hit import replicates_implicitly
from dtensor.errors import LayoutError, expect, explain_error, listed, refuse_layout
from dtensor.intervals import chunk
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec, contiguous_stride, dense, in_order, normalize_placements
from dtensor.tensor import DTensor
from dtensor.tensor_methods.compiled import refuse_export

__all__ = ["distribute_module", "distribute_tensor", "guard_state", "owned_parameters", "replacing", "unguard_state"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a leaf tensor out over a mesh.

    Args:
        tensor: the whole tensor; the same shape and dtype on every rank. Its gradients are not linked.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh axis; default all `Replicate()`. `Partial(op)` gives parts that reduce to
            the tensor (sum: position 0 holds it, the others zero).
        src_data_rank: position, on every mesh axis, of the rank whose data counts; None: every rank shards its
            own, and nothing is sent.

    Returns:
        A leaf DTensor that requires grad when `tensor` does. A DTensor of the same mesh and placements is
        returned as it is.

    Raises:
        RuntimeError: no mesh, or not a leaf.
        ValueError, IndexError, TypeError: bad placements; a DTensor of another mesh or layout.
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute_tensor: expected a torch.Tensor, got {type(tensor).__name__}\n"
            "  fix: distribute_tensor(torch.as_tensor(values), mesh, placements)"
        )
    refuse_layout("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor: the tensor is not a leaf of the autograd graph, and the link to its history would be "
            "lost; use x.detach(), or DTensor.from_local, which is differentiable"
        )
    placed = normalize_placements(placements, mesh, tensor.ndim, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ValueError(f"distribute_tensor: a DTensor of {tensor.device_mesh}, asked for {mesh}")
        if tensor.placements != placed:
            raise ValueError(
                f"distribute_tensor: a DTensor laid out as {tensor.placements}, asked for {placed}; use redistribute()"
            )
        return tensor
    refuse_export("distribute_tensor")
    if src_data_rank is not None:
        expect("distribute_tensor", "src_data_rank", src_data_rank, int, "a position on the mesh, or None", "0")
    if src_data_rank is not None and not 0 <= src_data_rank < max(mesh.shape, default=1):
        raise ValueError(
            f"distribute_tensor: src_data_rank={src_data_rank} is no position on a mesh of {mesh.shape}\n"
            "  fix: 0"
        )
    local = tensor.detach()
    if local.device.type not in (mesh.device_type, "meta"):
        local = local.to(mesh.device_type)
    stride = local.stride() if dense(local) else contiguous_stride(local.shape)
    spec = Spec.make(mesh, placed, local.shape, stride, local.dtype)
    local = in_order(_cut(local, spec, src_data_rank), stride)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def _cut(local: torch.Tensor, spec: Spec, src: int | None) -> torch.Tensor:
    """One collective per mesh axis, left to right, on what the axes before left."""
    mesh = spec.mesh
    if mesh.coord is None:
        return local.new_zeros(spec.local_shape)
    done: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    start = local
    for axis, p in enumerate(spec.placements):
        here = spec.with_placements(done)
        done = (*done[:axis], p, *done[axis + 1 :])
        there = spec.with_placements(done)
        k, at = mesh.shape[axis], src if src is None else min(src, mesh.shape[axis] - 1)
        if at is None or k == 1:
            local = redistribute_local(local, here, there)
        elif isinstance(p, Shard):
            local = _scatter(local, here, there, axis, p.dim, at)
        else:
            local = redistribute_local(mesh.comm(axis).broadcast(local.contiguous(), at), here, there)
    return local.clone(memory_format=torch.contiguous_format) if local is start else local.contiguous()


def _scatter(local: torch.Tensor, here: Spec, there: Spec, axis: int, dim: int, src: int) -> torch.Tensor:
    """Every position of `axis` gets its chunk of position `src`'s tensor."""
    k, n = here.mesh.shape[axis], local.shape[dim]
    splits = [chunk(n, k, i) for i in range(k)]
    comm = here.mesh.comm(axis)
    parts = [local.narrow(dim, *cut).contiguous() for cut in splits] if comm.rank == src else None
    shapes = [torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]]) for _, size in splits]
    return comm.scatter(parts, local.new_empty(there.local_shape), src, shapes=shapes)


PartitionFn = Callable[[str, nn.Module, DeviceMesh], object]
IOFn = Callable[..., object]

APPLIED = "_distribute_module_applied"


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: IOFn | None = None,
    output_fn: IOFn | None = None,
) -> nn.Module:
    """Make every parameter and buffer of `module` a DTensor on `device_mesh`, in place, and return `module`.

    Args:
        device_mesh: by default the mesh of the enclosing `with mesh:`.
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every submodule (and "" for the
            module itself); it replaces the parameters it wants sharded. What is still plain afterwards is
            replicated from the mesh's first rank.
        input_fn: called as `input_fn(module, inputs, mesh)` before forward; what it returns, unless None,
            replaces the inputs.
        output_fn: called as `output_fn(module, outputs, mesh)` after forward, likewise.

    Raises RuntimeError when the module was distributed before, ValueError when `input_fn` or `output_fn` takes
    another number of arguments.
    """
    expect("distribute_module", "module", module, nn.Module, "a module", "distribute_module(net, mesh)")
    for name, function in (("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn)):
        if function is not None:
            expect("distribute_module", name, function, Callable, "a function", f"def {name}(a, b, mesh): ...")
    if getattr(module, APPLIED, False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} was distributed before\n"
            "  rule: a module is distributed once, since its hooks would run twice\n"
            "  fix: do all of it in one call, or distribute its parts"
        )
    mesh = as_mesh(device_mesh)
    prepare = None if input_fn is None else _three_arguments("input_fn", input_fn)
    finish = None if output_fn is None else _three_arguments("output_fn", output_fn)
    plain = [x for x in owned_parameters(module) if not isinstance(x[1]._parameters[x[2]], DTensor)]
    with replacing(plain, module, "distribute_module", every=partition_fn is None):
        if partition_fn is not None:
            for name, part in module.named_modules():
                partition_fn(name, part, mesh)
        done: dict[int, nn.Parameter] = {}
        for part in module.modules():
            _replicate(part, mesh, done)
    guard_state(module)
    if prepare is not None:
        module.register_forward_pre_hook(lambda mod, inputs: prepare(mod, inputs, mesh))
    if finish is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: finish(mod, outputs, mesh))
    setattr(module, APPLIED, True)
    return module


def _replicate(part: nn.Module, mesh: DeviceMesh, done: dict[int, nn.Parameter]) -> None:
    """Make what is still plain in one module (its children apart) replicated.

    `done` holds what became of parameters by id, so that shared ones stay shared.
    """
    everywhere = [Replicate()] * mesh.ndim
    for name, param in list(part._parameters.items()):
        if param is not None and not isinstance(param, DTensor):
            if id(param) not in done:
                value = distribute_tensor(param.detach(), mesh, everywhere)
                done[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            part.register_parameter(name, done[id(param)])
    for name, buffer in list(part._buffers.items()):
        if buffer is not None and not isinstance(buffer, DTensor):
            part._buffers[name] = distribute_tensor(buffer.detach(), mesh, everywhere)


def _three_arguments(name: str, fn: IOFn) -> IOFn:
    """`fn` as a function of (module, value, mesh)."""
    try:
        count = len(inspect.signature(fn).parameters)
    except ValueError:  # one of Python's own, which says nothing of its arguments
        count = 3
    if count == 3:
        return fn
    if count == 2:
        warnings.warn(
            f"distribute_module: {name} of two arguments (value, mesh) is deprecated, take (module, value, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda module, value, mesh: fn(value, mesh)
    raise ValueError(
        f"distribute_module: {name} must take 3 arguments (module, value, mesh), {fn!r} takes {count}\n"
        f"  fix: def {name}(module, value, mesh): ..."
    )


# ------------------------------------------------------------ plain state dicts
def guard_state(module: nn.Module) -> None:
    """Refuse plain state dicts for `module`, before any part of it is loaded; once, however often this is asked for."""
    unguard_state(module)
    module.register_load_state_dict_pre_hook(_refuse_plain_state)


def unguard_state(module: nn.Module) -> None:
    """Undo `guard_state`."""
    hooks = module._load_state_dict_pre_hooks
    for number in [n for n, h in hooks.items() if getattr(h, "hook", h) is _refuse_plain_state]:
        del hooks[number]


def _refuse_plain_state(module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: object) -> None:
    """LayoutError, before anything of `module` is loaded, where plain tensors are to go into its DTensors.

    Nothing says whether such a tensor is replicated or this rank's part. Numbers pass, and so does all that counts as
    replicated.
    """
    if replicates_implicitly():
        return
    ours = {prefix + n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if isinstance(t, DTensor)}
    plain = [n for n in ours if _is_plain(state.get(n)) and state[n].numel() > 1]
    if plain:
        raise LayoutError(
            explain_error(
                "load_state_dict", f"plain tensors for {listed(plain)}",
                f"a plain tensor would be written into a DTensor, e.g. {plain[0]} ({ours[plain[0]]._spec}); whether it "
                "is replicated or this rank's part is not known. Nothing of this module was loaded",
                "where every rank has the whole tensors: with dtensor.experimental.implicit_replication(): "
                "net.load_state_dict(state)",
            )
        )  # fmt: skip


def _is_plain(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


# ------------------------------------------------------------ who holds what is replaced
class _Replacing(threading.local):
    def __init__(self) -> None:
        self.seen: set[int] = set()


_replacing = _Replacing()
_VARIABLES = (FrameType, CellType, GeneratorType, tuple)
"""What holds a parameter for a variable; a tuple does for the arguments of a call, which an old traceback keeps."""

Owned = tuple[str, nn.Module, str]
"""The name of a parameter, the module that has it, and its name there."""


def owned_parameters(module: nn.Module) -> Iterator[Owned]:
    """Every parameter of `module` and of what is below it, once for each module that has it."""
    for path, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is not None:
                yield f"{path}.{name}" if path else name, part, name


@contextmanager
def replacing(owned: Sequence[Owned], root: nn.Module, call: str, every: bool = True) -> Iterator[None]:
    """Inside, `call` replaces these parameters of `root`. Warns before of those that somebody else holds.

    Where it may keep some (not `every`) it warns afterwards, of those that were replaced. An optimizer that was made
    before, or a list to make one of, keeps the old parameters, and would train nothing. What only a variable holds is
    not told: a loop leaves a parameter behind. Calls inside tell of other parameters only.
    """
    outer = _replacing.seen
    owned = [x for x in owned if id(x[1]._parameters[x[2]]) not in outer]
    held = _held_by_others(owned, root)
    if every:
        _warn_of(held, call)
    before = {path: id(part._parameters[name]) for path, part, name in owned}
    _replacing.seen = outer | {id(part._parameters[name]) for _, part, name in owned}
    try:
        yield
    finally:
        _replacing.seen = outer
    if not every:
        gone = {path for path, part, name in owned if id(part._parameters[name]) != before[path]}
        _warn_of({path: by for path, by in held.items() if path in gone}, call)


def _warn_of(held: Mapping[str, str], call: str) -> None:
    if held:
        warnings.warn(
            f"{call}: {', '.join(sorted(set(held.values())))} holds parameters that are replaced now: {listed(held)}\n"
            f"  rule: {call} makes new parameters; an optimizer that was made before keeps the old ones, and trains "
            f"nothing\n  fix: make the optimizer, and lists of parameters, after {call}",
            stacklevel=5,
        )


def _held_by_others(owned: Sequence[Owned], root: nn.Module) -> dict[str, str]:
    """Which of these parameters something other than modules of `root` holds: name -> what that is."""
    owners = Counter(id(part._parameters[name]) for _, part, name in owned_parameters(root))
    alone = sys.getrefcount({"p": object()}["p"])
    suspects: dict[int, tuple[str, nn.Parameter | None]] = {}
    for path, part, name in owned:
        count = sys.getrefcount(part._parameters[name]) - alone + 1
        if count > owners[id(part._parameters[name])]:
            suspects.setdefault(id(part._parameters[name]), (path, part._parameters[name]))
    if not suspects:
        return {}
    own = {id(part._parameters) for part in root.modules()} | {id(pair) for pair in suspects.values()}
    own |= {id(part.__dict__.get("_flat_weights")) for part in root.modules()}  # of RNNs, which see to it themselves
    params = [p for _, p in suspects.values()]
    own.add(id(params))
    holders = _holders(params, own)
    if holders:
        del holders
        gc.collect()  # what nobody can reach any more holds nothing
        holders = _holders(params, own)
    held = {i: "somebody else" for holder in holders for i in map(id, gc.get_referents(holder))}
    held = {i: by for i, by in held.items() if i in suspects}
    for optimizer in [x for x in gc.get_objects() if issubclass(type(x), Optimizer)] if held else ():
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held.update(dict.fromkeys(held.keys() & in_groups, type(optimizer).__name__))
    return {suspects[i][0]: by for i, by in held.items()}


def _holders(params: list[nn.Parameter | None], own: set[int]) -> list[object]:
    """The objects that hold one of `params` for longer than a variable does, without those of `own`."""
    return [
        holder
        for holder in gc.get_referrers(*params)
        if id(holder) not in own
        and not isinstance(holder, _VARIABLES)
        and not (isinstance(holder, dict) and "__builtins__" in holder)
    ]
