"""All rules as text: one entry a line, and under it how many overloads it covers."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from dtensor.rules.registry import printed

from .count import KINDS, Coverage, coverage

__all__ = ["listing"]


def listing(pattern: str = "*", found: Coverage | None = None) -> str:
    """The rules of aten whose name, with or without `aten.`, fits `pattern` (as file names do), alphabetically."""
    found = coverage() if found is None else found
    lines: list[str] = []
    for line in printed().splitlines():
        name = line.split(maxsplit=1)[0]
        short = name.removeprefix("aten.")
        if name == short or not any(fnmatch.fnmatch(n, pattern) for n in (name, short, short.strip("_"))):
            continue
        kinds: Mapping[str, int] = found.by_entry.get(name, {})
        covers = ", ".join(f"{kinds[k]} {k}" for k in KINDS if kinds.get(k))
        lines += [line, f"{'':48s} covers {covers or 'nothing in this version of torch'}"]
    return "\n".join(lines) + "\n" if lines else ""
