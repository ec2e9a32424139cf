"""The packages beside this one, under its name: `dtensor.parallel`, `dtensor.loss`, `dtensor.propagation_rules`.

They are found by where this file lies, never by a name on the path, which a user's own `loss.py` may have. Their short
names are other names for the same modules, for those who import them where nobody else has them. A program that is run
as `loss.py` hides the short name only by being run: it is `__main__`, and `import loss` in it means ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import iter_modules

__all__ = ["also_called", "load_beside", "name_for_the_program"]

NAMES = ("loss", "parallel", "propagation_rules")


def load_beside(name: str) -> None:
    """Run the folder that is beside this package and called as the last part of `name`, as the module `name`."""
    module = sys.modules[name]
    folder = Path(__file__).parent.parent / name.rpartition(".")[2]
    loader = SourceFileLoader(name, str(folder / "__init__.py"))
    module.__file__, module.__path__, module.__loader__ = loader.path, [str(folder)], loader
    if spec := module.__spec__:
        spec.origin, spec.submodule_search_locations, spec.loader = loader.path, module.__path__, loader
    loader.exec_module(module)


def also_called(name: str) -> None:
    """Where a package of ours is being imported as `name`: make that another name for it and for its modules."""
    if name.startswith("dtensor."):
        return
    package = import_module(f"dtensor.{name}")
    for part in iter_modules(package.__path__):
        if part.name != "__main__" and not part.ispkg:
            sys.modules[f"{name}.{part.name}"] = import_module(f"dtensor.{name}.{part.name}")
    sys.modules[name] = package


def name_for_the_program() -> None:
    """Where the running program's own file is called as one of ours, import ours by the short name."""
    name = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").stem
    if name in NAMES and name not in sys.modules:
        also_called(name)
