"""Optimizer state of the older FSDP over tensor parallelism, on its way out of an optimizer and into one.

FSDP's pieces are pieces of this rank's part of a parameter. When state is loaded torch gathers it whole over all axes
and shards the pieces out of that, at the places that they have in the part: with tensor parallelism those are other
elements. When state is saved torch takes every part to have the size of its own, and without `use_orig_params` rank 0
to be in every group. All this is put right here, for the state of parameters of tensor parallelism; all other state
goes torch's way.

    out    flat pieces ──FSDP gathers──▶ part ──post_unflatten──▶ DTensor ──chunk_dtensor──▶ saved
    in     saved, whole or a DTensor ──part_of──▶ this rank's part, plain ──FSDP shards──▶ flat pieces
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtensor.spec import Spec
from dtensor.swap.parts import part_of
from dtensor.tensor import DTensor

__all__ = [
    "flatten_optim_state", "map_param_key_to_optim_keys", "shard_orig_param_state", "unflatten_orig_param_states",
]  # fmt: skip


def _checked(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part. Raises ValueError for state of another shape than the parameter's, of which are no pieces."""
    if value.shape != spec.shape:
        raise ValueError(
            f"FullyShardedDataParallel over tensor parallelism: state of shape {tuple(value.shape)} for a parameter "
            f"{spec}; its shape must be the parameter's, whole. fully_shard takes any state that the optimizer has"
        )
    return part_of(value, spec)


def _parts(info: Any, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter, with tensors that have dims as this rank's parts where it is tensor parallel."""
    extensions = info.handle.flat_param._param_extensions
    spec = extensions[info.param_indices[name]]
    if not isinstance(spec, Spec):
        return dict(state)
    return {k: _checked(v, spec) if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in state.items()}


def shard_orig_param_state(
    original: Callable[..., Any], fsdp_param_info: Any, fqn: str, optim_state: dict[str, Any]
) -> dict[str, Any]:
    """With `use_orig_params=True`: the state of one parameter as this rank's piece."""
    state = _parts(fsdp_param_info, fqn, optim_state)
    given: dict[str, Any] = original(fsdp_param_info, fqn, state)
    return given


def flatten_optim_state(
    original: Callable[..., Any], fsdp_param_info: Any, unflat_osd_state: dict[str, Any], unflat_param_names: list[str]
) -> Any:
    """Without: the state of all parameters of one flat parameter as this rank's piece."""
    state = {n: _parts(fsdp_param_info, n, unflat_osd_state[n]) for n in unflat_param_names if n in unflat_osd_state}
    return original(fsdp_param_info, {**unflat_osd_state, **state}, unflat_param_names)


def map_param_key_to_optim_keys(
    original: Callable[..., Any],
    optim_state_dict: dict[str, Any],
    group: Any,
    param_key_to_param: Any,
    param_to_fqns: Any,
    fqn_to_fsdp_param_info: dict[str, Any],
    merge_keys: bool = False,
) -> Any:
    """The names of what has state, the same on all ranks: gathered, as only one group of FSDP has rank 0."""
    handles = {id(info.handle): info.handle for info in fqn_to_fsdp_param_info.values()}
    over_both = any(isinstance(e, Spec) for h in handles.values() for e in h.flat_param._param_extensions)
    return original(
        optim_state_dict, group, param_key_to_param, param_to_fqns, fqn_to_fsdp_param_info, merge_keys or over_both
    )


def unflatten_orig_param_states(
    original: Callable[..., Any],
    fsdp_param_info: Any,
    output_states: dict[str, dict[str, Any]],
    state_name: str,
    shard_state: bool,
    to_save: bool,
    cpu_offload: bool,
) -> None:
    """State that FSDP has gathered, as it is saved: in place. DTensors have their shape and their layout already."""
    rest = {}
    for name, held in output_states.items():
        value, state = held[state_name], fsdp_param_info.state
        if not to_save or not isinstance(value, DTensor):
            rest[name] = held
            continue
        if not shard_state:
            value = value.detach().clone()
        elif getattr(state._optim_state_dict_config, "_use_dtensor", False):
            value = state._fsdp_extension.chunk_dtensor(value, state.rank, state._device_mesh)
        else:
            value = state._fsdp_extension.chunk_tensor(value)
        held[state_name] = value.cpu() if cpu_offload else value
    original(fsdp_param_info, rest, state_name, shard_state, to_save, cpu_offload)
