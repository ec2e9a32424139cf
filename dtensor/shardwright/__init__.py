"""`import shardwright` gives `dtensor`: the distribution's name, installed as a package of its own from this folder."""

from __future__ import annotations

import sys
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import dtensor
from dtensor import debug, experimental, loss, parallel  # noqa: F401 - found under this name as well

if TYPE_CHECKING:
    from dtensor import *  # noqa: F403

for _part in iter_modules(dtensor.__path__):  # None: an inner module is imported as dtensor.x or not at all, not twice
    sys.modules[f"shardwright.{_part.name}"] = None  # type: ignore[assignment]
for _name, _module in list(sys.modules.items()):
    if _name.startswith("dtensor."):
        sys.modules["shardwright" + _name.removeprefix("dtensor")] = _module
sys.modules["shardwright"] = dtensor
