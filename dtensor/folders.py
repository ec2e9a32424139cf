"""The packages beside this one, under its name: `dtensor.parallel`, `dtensor.loss`, `dtensor.propagation_rules`.

They are found by where this file lies, never by a name on the path, which a user's own `loss.py` may have. Their short
names are other names for the same modules, for those who import them where nobody else has them. A program that is run
as `loss.py` hides the short name only by being run: it is `__main__`, and `import loss` in it means ours.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import iter_modules
from types import FrameType

import torch

__all__ = ["NOT_A_PROGRAMS", "also_called", "load_beside", "name_for_the_program", "users_frame", "users_line"]

NAMES = ("loss", "parallel", "propagation_rules")
_ROOT = Path(__file__).parent.parent

NOT_A_PROGRAMS = (
    *(f"{_ROOT / name}{os.sep}" for name in ("dtensor", *NAMES)), f"{Path(torch.__file__ or '').parent}{os.sep}",
    contextlib.__file__, contextvars.__file__, threading.__file__, "<frozen",
)  # fmt: skip
"""What the file names of code begin with that is this project's, torch's or Python's, and no program's."""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from `frame` outwards that is a program's; None where there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_A_PROGRAMS):
        frame = frame.f_back
    return frame


def users_line() -> str:
    """`file:line` of the innermost frame that is a program's."""
    frame = users_frame(sys._getframe(1))
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def load_beside(name: str) -> None:
    """Run the folder that is beside this package and called as the last part of `name`, as the module `name`."""
    module = sys.modules[name]
    folder = _ROOT / name.rpartition(".")[2]
    loader = SourceFileLoader(name, str(folder / "__init__.py"))
    module.__file__, module.__path__, module.__loader__ = loader.path, [str(folder)], loader
    if spec := module.__spec__:
        spec.origin, spec.submodule_search_locations, spec.loader = loader.path, module.__path__, loader
    loader.exec_module(module)


def also_called(name: str) -> None:
    """Where a package of ours is being imported as `name`: make that another name for it and for its modules."""
    if name.startswith("dtensor."):
        return
    sys.modules[name] = package = import_module(f"dtensor.{name}")
    for part in iter_modules(package.__path__, f"{name}."):
        if part.ispkg and f"dtensor.{part.name}" in sys.modules:  # what checks the rules is loaded by those who check
            also_called(part.name)
        elif not part.ispkg and not part.name.endswith("__main__"):
            sys.modules[part.name] = import_module(f"dtensor.{part.name}")


def name_for_the_program() -> None:
    """Where the running program's own file is called as one of ours, import ours by the short name."""
    name = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").stem
    if name in NAMES and name not in sys.modules:
        also_called(name)
