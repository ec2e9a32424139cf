"""Which name of torch stands for which name of this engine: a table.

A name that a module of torch only hands on (`torch.distributed.tensor._api.Shard`) needs no line: it is recognised by
what it is. So the table has each thing once, where torch defines or exports it first, and a few names that torch's
modules define for themselves.
"""

from __future__ import annotations

__all__ = [
    "CORE", "ENGINE", "HOLDERS_OF_TORCHS_OWN", "MODULES", "OURS", "PASSED_OVER", "PATCHES", "REFUSED", "ROOTS",
    "is_under",
]  # fmt: skip

ROOTS = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed.device_mesh")
"""What is swapped: these modules and everything under them."""

ENGINE = ("dtensor",)
"""Our own package. What it asks of torch is torch's."""

_TENSOR = "torch.distributed.tensor"

CORE = ("torch.distributed.device_mesh", _TENSOR)
"""What `install` imports: C++ looks for it anyway. Modules loaded later are swapped when they are."""

MODULES = (
    "torch.distributed.fsdp", "torch.distributed.device_mesh", _TENSOR, f"{_TENSOR}.parallel",
    f"{_TENSOR}.parallel.ddp", f"{_TENSOR}.parallel.fsdp", f"{_TENSOR}.parallel.input_reshard",
    f"{_TENSOR}.experimental", f"{_TENSOR}.experimental._attention", f"{_TENSOR}.debug", f"{_TENSOR}.device_mesh",
    f"{_TENSOR}.placement_types", f"{_TENSOR}._api", f"{_TENSOR}._dtensor_spec", f"{_TENSOR}._random",
    f"{_TENSOR}._redistribute", f"{_TENSOR}._utils", f"{_TENSOR}._shards_wrapper", "torch.distributed._tensor",
    "torch.distributed._tensor.api", "torch.distributed._tensor.placement_types",
)  # fmt: skip
"""What `status` tells about; in this order, for torch's own sake."""

HOLDERS_OF_TORCHS_OWN = (
    *ROOTS, "torch._dynamo.variables.builder", "torch._dynamo.variables.distributed",
    "torch._dynamo.variables.higher_order_ops", "torch._dynamo.decorators",
    "torch._dynamo.trace_rules", "torch._functorch", "torch._higher_order_ops", "torch._inductor", "torch._prims",
    "torch.distributed._local_tensor", "torch.distributed._ops", "torch.fx", "torch.serialization",
    "torch.testing._comparison", "torch.utils._debug_mode",
)  # fmt: skip
"""Modules of torch that go on seeing torch's own names. They have a path for torch's class and its layout in memory,
and one for tensor subclasses in general; ours takes the general one."""

OURS: dict[str, dict[str, str]] = {
    "torch.distributed.device_mesh": {
        "DeviceMesh": "dtensor.mesh.device_mesh:DeviceMesh",
        "init_device_mesh": "dtensor.mesh.device_mesh:init_device_mesh",
        "_mesh_resources": "dtensor.swap.stand_ins:mesh_resources",
    },
    _TENSOR: {
        "DTensor": "dtensor.tensor:DTensor",
        "distribute_tensor": "dtensor.distribute:distribute_tensor",
        "distribute_module": "dtensor.distribute:distribute_module",
        **{name: f"dtensor.factory:{name}" for name in ("empty", "full", "ones", "rand", "randn", "zeros")},
        **{name: f"dtensor.placement:{name}" for name in ("Partial", "Placement", "Replicate", "Shard")},
    },
    f"{_TENSOR}._api": {"_shard_tensor": "dtensor.swap.stand_ins:shard_tensor"},
    f"{_TENSOR}.placement_types": {"_StridedShard": "dtensor.placement:_StridedShard"},
    f"{_TENSOR}._dtensor_spec": {"DTensorSpec": "dtensor.spec:Spec", "TensorMeta": "dtensor.spec:TensorMeta"},
    f"{_TENSOR}._random": {
        "manual_seed": "dtensor.swap.stand_ins:manual_seed",
        "is_rng_supported_mesh": "dtensor.swap.stand_ins:is_rng_supported_mesh",
    },
    f"{_TENSOR}._redistribute": {
        "redistribute_local_tensor": "dtensor.swap.stand_ins:redistribute_local_tensor",
        "use_min_cost_redistribution_plan": "dtensor.swap.stand_ins:use_min_cost_redistribution_plan",
    },
    f"{_TENSOR}._utils": {
        "compute_local_shape_and_global_offset": "dtensor.swap.stand_ins:compute_local_shape_and_global_offset",
    },
    f"{_TENSOR}.parallel": {
        "parallelize_module": "dtensor.swap.stand_ins:parallelize_module",
        **{
            name: f"dtensor.parallel:{name}"
            for name in (
            "ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
            "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "loss_parallel",
            )
        },
    },
    f"{_TENSOR}.parallel.ddp": {
        name: f"dtensor.swap.data_parallel:{name}"
        for name in ("_localize_dtensor", "_pre_dp_module_transform", "_reconstruct_dtensor")
    },
    f"{_TENSOR}.parallel.fsdp": {"DTensorExtensions": "dtensor.swap.older_fsdp:DTensorExtensions"},
    f"{_TENSOR}.parallel.input_reshard": {"input_reshard": "dtensor.parallel:input_reshard"},
    f"{_TENSOR}.experimental": {
        name: f"dtensor.experimental:{name}" for name in ("implicit_replication", "local_map", "register_sharding")
    },
    f"{_TENSOR}.debug": {name: f"dtensor.debug:{name}" for name in ("CommDebugMode", "visualize_sharding")},
}  # fmt: skip
"""Module of torch: its name: where ours is."""

REFUSED: dict[str, dict[str, str]] = {
    f"{_TENSOR}._utils": {
        "ExplicitRedistributionContext": "use dtensor.debug.CommDebugMode to see what is redistributed",
    },
    f"{_TENSOR}._random": {"OffsetBasedRNGTracker": "seed with torch.manual_seed; docs/architecture.md, section 10"},
    f"{_TENSOR}._redistribute": {
        "Redistribute": "use DTensor.redistribute",
        "disable_redistribute_transform_optimization": "plans of this engine have no stage like that",
    },
}
"""Names whose work would be lost without a word if torch's stayed: calling them says so, and what to do."""

PASSED_OVER: dict[str, dict[str, str]] = {
    f"{_TENSOR}._ops.utils": {"register_op_strategy": "use register_sharding, or dtensor.rules.register"},
    f"{_TENSOR}._ops.single_dim_strategy": {
        "register_single_dim_strategy": "use register_sharding, or dtensor.rules.register"
    },
}
"""Decorators that tell torch's engine where an op may be sharded. They change no number: they are passed over with a
warning, and the op has this engine's rule, or works on gathered inputs."""

_FSDP, _CHECKPOINT = "torch.distributed.fsdp", "torch.distributed.checkpoint"
PATCHES: dict[str, dict[str, str]] = {
    "multiprocessing.spawn": {"get_preparation_data": "children:preparation_data"},
    "torch._tensor": {"_rebuild_from_type_v2": "files:rebuild"},
    "torch.nn.parallel.distributed": {"DistributedDataParallel.__init__": "data_parallel:init"},
    f"{_FSDP}._fully_shard._fsdp_param": {"FSDPParam._init_sharding_spec_spmd": "data_parallel:sharding_spec"},
    f"{_FSDP}._optim_utils": {
        f"_{name}": f"older_fsdp_state:{name}"
        for name in (
            "flatten_optim_state", "map_param_key_to_optim_keys", "shard_orig_param_state",
            "unflatten_orig_param_states",
        )
    },
    f"{_CHECKPOINT}.state_dict": dict.fromkeys(
        ("_get_optim_state_dict", "_load_optim_state_dict"), "data_parallel_state:with_hooks"
    ),
    f"{_CHECKPOINT}._state_dict_stager": {"StateDictStager._offload_tensor": "files:offload_tensor"},
}  # fmt: skip
"""Functions of other modules that are replaced: module: its name: where in `dtensor.swap` ours is, which gets the
original first."""


def is_under(module: str, roots: tuple[str, ...]) -> bool:
    """Whether `module` is one of `roots` or inside one."""
    return module.startswith(roots) and (module in roots or module.startswith(tuple(f"{root}." for root in roots)))
