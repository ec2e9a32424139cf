"""shardwright: a DTensor engine on torch.

    from dtensor import DTensor, Shard, Replicate, Partial, distribute_tensor, init_device_mesh

The names are those of `torch.distributed.tensor` and `torch.distributed.device_mesh`. See docs/architecture.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtensor import tensor as _tensor
from dtensor.api import distribute_tensor
from dtensor.device_mesh import DeviceMesh, init_device_mesh
from dtensor.factory import empty, full, ones, rand, randn, zeros
from dtensor.module import distribute_module
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard, _StridedShard
from dtensor.rule_absent import strict_rules
from dtensor.simulate import simulate
from dtensor.spec import Spec
from dtensor.tensor import DTensor

if TYPE_CHECKING:
    from dtensor.lowering import LowerError as LowerError
    from dtensor.lowering import lower as lower

_tensor.register_with_torch()


def _unhide_packages() -> None:
    """Let a script called `loss.py` or `parallel.py` import the packages of these names.

    Python puts a script's folder first on the path, so `from loss import loss_parallel` in a script of that name
    would import the script itself. Nothing happens for any other script.
    """
    name = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").stem
    home = Path(__file__).parent.parent / name / "__init__.py"
    if name in ("loss", "parallel") and name not in sys.modules and home.exists():
        spec = importlib.util.spec_from_file_location(name, home, submodule_search_locations=[str(home.parent)])
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


_unhide_packages()


def __getattr__(name: str) -> object:
    """`dtensor.experimental`, `dtensor.lower` and `dtensor.LowerError` load when first asked for."""
    if name == "experimental":
        return importlib.import_module(f"dtensor.{name}")
    if name in ("lower", "LowerError"):
        from dtensor.lowering import LowerError, lower

        globals().update(lower=lower, LowerError=LowerError)
        return globals()[name]
    raise AttributeError(f"module 'dtensor' has no attribute {name!r}")


__all__ = [
    "DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "Spec", "StridedShard", "_StridedShard",
    "distribute_module", "distribute_tensor", "empty", "full", "init_device_mesh", "ones",
    "rand", "randn", "simulate", "strict_rules", "zeros",
]  # fmt: skip
