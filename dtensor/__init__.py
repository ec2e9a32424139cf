"""shardwright: a DTensor engine on torch.

    from dtensor import DTensor, Shard, Replicate, Partial, distribute_tensor, init_device_mesh

The names are those of `torch.distributed.tensor` and `torch.distributed.device_mesh`. See docs/architecture.md.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from dtensor import tensor as _tensor
from dtensor.dispatch.no_rule import strict_rules
from dtensor.distribute import distribute_module, distribute_tensor
from dtensor.factory import empty, full, ones, rand, randn, zeros
from dtensor.folders import name_for_the_program as _name_for_the_program
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard, _StridedShard
from dtensor.simulation.simulate import simulate
from dtensor.spec import Spec
from dtensor.tensor import DTensor

if TYPE_CHECKING:
    from dtensor import debug as debug
    from dtensor import experimental as experimental
    from dtensor import loss as loss
    from dtensor import parallel as parallel
    from dtensor.lowering import LowerError as LowerError
    from dtensor.lowering import lower as lower

__version__ = "0.1.0"

__path__.append(str(Path(__file__).with_name("faces")))
"""Module names that moved, each the module itself: `dtensor.registry` is `dtensor.rules.registry`."""

_PACKAGES = ("debug", "experimental", "loss", "parallel")

_tensor.register_with_torch()


def __getattr__(name: str) -> object:
    """The packages inside, `dtensor.lower` and `dtensor.LowerError` load when first asked for."""
    if name in _PACKAGES:
        return importlib.import_module(f"dtensor.{name}")
    if name in ("lower", "LowerError"):
        from dtensor.lowering import LowerError, lower

        globals().update(lower=lower, LowerError=LowerError)
        return globals()[name]
    raise AttributeError(f"module 'dtensor' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names; the modules inside are reached by importing them."""
    return sorted({*__all__, *_PACKAGES, "LowerError", "lower", "__version__"} - {"_StridedShard"})


__all__ = [
    "DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "Spec", "StridedShard", "_StridedShard",
    "distribute_module", "distribute_tensor", "empty", "full", "init_device_mesh", "ones",
    "rand", "randn", "simulate", "strict_rules", "zeros",
]  # fmt: skip

_name_for_the_program()
