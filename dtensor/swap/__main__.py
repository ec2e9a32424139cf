"""`python -m dtensor.swap script.py args`, `python -m dtensor.swap -m package.module args`: run it on this engine.

`--status` instead of a script prints what is swapped.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dtensor.swap import install, status

USAGE = "usage: python -m dtensor.swap (SCRIPT | -m MODULE | --status) [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Install, then run the script or the module as `__main__`, with its own arguments and import path."""
    if arguments[:1] == ["--status"]:
        print(status())
        return
    as_module = arguments[:1] == ["-m"]
    target = arguments[1:] if as_module else arguments
    if not target or (target[0].startswith("-") and not as_module):
        raise SystemExit(USAGE)
    install()
    sys.argv = target
    if as_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        return
    if not Path(target[0]).exists():
        raise SystemExit(f"dtensor.swap: there is no script {target[0]}\n{USAGE}")
    sys.path[0] = str(Path(target[0]).resolve().parent)
    runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
