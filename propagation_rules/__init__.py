"""What each aten op means, one family a file. Importing the package registers all of them.

`build` has what rules are made of, `optimizers` what steps, clipping and loss scaling do, `proof` what holds rules to
numbers; that is loaded by those who check.
"""

from __future__ import annotations

import importlib
import pkgutil

from dtensor.folders import also_called

also_called(__name__)

from dtensor import torch_changes
from dtensor.rules.registry import built_in, rules_are_loaded

with built_in():
    for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        if not _module.startswith("__") and _module not in ("build", "proof"):
            importlib.import_module(f"{__name__}.{_module}")
rules_are_loaded()
torch_changes.apply("rules")
