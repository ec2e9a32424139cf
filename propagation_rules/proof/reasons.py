"""Why a rule does not offer a row that would be right: `docs/missing.md` is written from this.

A reason stands for rows of overloads, each given as a regular expression that must match the whole name or row. The
first that matches counts; a row without a reason is listed as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from propagation_rules.proof.sweep import OpReport

__all__ = ["REASONS", "Reason", "reason_of", "written_missing"]


@dataclass(frozen=True)
class Reason:
    """`title` of the group, the `text` that explains it, what it covers."""

    title: str
    text: str
    overloads: str = ".*"
    rows: str = ".*"


REASONS: tuple[Reason, ...] = ()


def reason_of(overload: str, row: str) -> Reason | None:
    """The reason for a missing row, None where there is none yet."""
    for reason in REASONS:
        if re.fullmatch(reason.overloads, overload) and re.fullmatch(reason.rows, row):
            return reason
    return None


def written_missing(reports: Iterable[OpReport]) -> str:
    """The document: rows by reason and overload, with the share of the calls that each would be right for."""
    groups: dict[Reason | None, dict[str, list[str]]] = {}
    for report in sorted(reports, key=lambda r: r.name):
        for row, (n, _) in report.missing.items():
            rows = groups.setdefault(reason_of(report.name, row), {}).setdefault(report.name, [])
            rows.append(f"`{row}` ({n} of {report.calls})")
    count = sum(len(rows) for group in groups.values() for rows in group.values())
    lines = [_HEAD.format(count=count)]
    known: Sequence[Reason | None] = [r for r in REASONS if r in groups]
    for reason in [*known, *([None] if None in groups else [])]:
        title, text = (reason.title, reason.text) if reason else ("No reason yet", "Rows that a rule should offer.")
        lines += [f"## {title}", text, ""]
        lines += [f"- `{name}`: {', '.join(rows)}" for name, rows in groups[reason].items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """# Rows that the rules do not offer

Written by `make sweep`. A row is a layout of all inputs and outputs on one mesh axis that would have been right
without communication for some sample calls (how many of how many is said in brackets), and for which the engine
communicates or gathers instead: the result is right all the same, it costs more. How a row is found, and what it has
to stand: `propagation_rules/proof/missing.py`. There are {count}, grouped by the reason they are left out for.
"""
