"""`python -m dtensor.propagation_rules`: print the rules, show one, hold them to numbers.

    list [PATTERN] [--count]            all rules, or those that fit: `list 'aten.*pool*'`
    show OP                             one rule: factors, linearity, kernels, the strategies of one mesh axis
    check OP... | --all                 wrong strategies and missing rows; exit status 1 when something is wrong

An OP is `mm`, `aten.mm` or `aten.mm.default`. Sample calls come from torch's database of operators, or from shapes:

    python -m dtensor.propagation_rules show mm --shapes 5x4 4x3
    python -m dtensor.propagation_rules check index_select --shapes 5x4 'i64<5:3' --arg dim=0
    python -m dtensor.propagation_rules check --all --jobs 4 --json found.json
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .proof import count, reasons, samples, shown, sweep
from .proof.recorded import Op, RecordedCall


class UnknownOp(ValueError):
    """No op of aten has this name."""


def overloads(name: str) -> list[Op]:
    """The overloads of `mm`, `aten.mm` or `aten.mm.default` that take or give tensors, those without `out=` first.

    Raises UnknownOp with names that are near.
    """
    parts = name.removeprefix("aten.").split(".")
    every = count.aten_overloads()
    packet = lambda op: op._schema.name.removeprefix("aten::")  # noqa: E731
    found = [op for op in every if packet(op) == parts[0]]
    if not any(count.covering(op) for op in found):  # `softmax` is composite, the rule is that of `_softmax`
        found = [op for op in every if packet(op).strip("_").removeprefix("native_") == parts[0]] or found
    if len(parts) == 2:
        found = [op for op in found if (op._overloadname or "default") == parts[1]]
    if not found or len(parts) > 2:
        names = sorted({op._schema.name.removeprefix("aten::") for op in every} | {str(op)[5:] for op in every})
        near = difflib.get_close_matches(name.removeprefix("aten."), names, n=4, cutoff=0.5)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UnknownOp(f"aten has no op {name!r}{hint}")
    return sorted(found, key=lambda op: count.KINDS.index(count.kind_of(op)))


def sample_calls(ops: Sequence[Op], most: int, everywhere: bool = False) -> dict[str, list[RecordedCall]]:
    """Calls of these ops from torch's database: from operators of like names, else from all of them."""
    names = {str(op) for op in ops}
    words = {op._schema.name.removeprefix("aten::").strip("_") for op in ops}
    words |= {re.sub(r"(_backward.*|^native_|^_+|_+$)", "", w) for w in words}
    known = samples.database()
    like = [n for n in known if any(w and (w in n or n.rpartition(".")[2] in w) for w in words)]
    for group in ([] if everywhere else [like]) + [list(known)]:
        calls = [c for n in group for c in samples.calls_of(n, known[n], most=4 * most) if str(c.op) in names]
        if calls:
            return samples.select(calls, most)
    return {}


def from_shapes(ops: Sequence[Op], options: argparse.Namespace) -> RecordedCall:
    """The call of the first overload that the shapes given fit."""
    given = dict(a.partition("=")[::2] for a in options.arg)
    errors = []
    for op in ops:
        try:
            call = samples.call_from_shapes(op, options.shapes, given)
            call.clone().op(*call.clone().args, **call.clone().kwargs)
            return call
        except Exception as e:
            errors.append(f"{op}: {e}".splitlines()[0])
    raise ValueError("the shapes fit no overload:\n  " + "\n  ".join(errors))


# ------------------------------------------------------------ commands
def run_list(options: argparse.Namespace) -> int:
    """Print rules, or how many there are."""
    found = count.coverage()
    if options.count:
        print(found)
        return 0
    text = count.listing(options.pattern, found)
    if not text:
        print(f"no rule has a name like {options.pattern!r}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print one rule on a sample call or on shapes given."""
    ops = overloads(options.op)
    if options.shapes:
        print(shown.shown(from_shapes(ops, options), options.axis))
        return 0
    calls = sample_calls(ops, options.calls)
    if not calls:
        print(f"no sample of torch's database reaches {options.op}; give shapes: --shapes 5x4 4x3", file=sys.stderr)
        return 2
    print("\n\n".join(shown.shown(c, options.axis) for name in calls for c in calls[name]))
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Check ops; 1 when something is wrong, 2 when nothing could be checked."""
    settings = sweep.Settings(
        tuple(tuple(int(n) for n in m.split("x")) for m in options.mesh) or sweep.Settings().meshes,
        options.limit, not options.wrong_only, options.keys,
    )  # fmt: skip
    if options.all:
        calls = samples.every_call(options.calls, sys.stderr)
    elif options.shapes:
        call = from_shapes([op for name in options.ops for op in overloads(name)], options)
        calls = {call.name: [call]}
    else:
        calls = {}
        for name in options.ops:
            found = sample_calls(overloads(name), options.calls, options.everywhere)
            if not found:
                print(f"no sample of torch's database reaches {name}; give shapes: --shapes 5x4 4x3", file=sys.stderr)
            calls |= found
    if not calls:
        return 2
    reports = sweep.sweep(calls, settings, options.jobs, log=options.json)
    print(sweep.written_summary(reports))
    if options.missing_to:
        Path(options.missing_to).write_text(reasons.written_missing(reports))
    return int(any(r.wrong for r in reports))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        "python -m dtensor.propagation_rules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help)
        sub.set_defaults(run=run)
        return sub

    def call_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help="tensors: 5x4, i64:5, i64<7:5, b8:5")
        sub.add_argument("--arg", nargs="+", default=[], metavar="NAME=VALUE", help="other arguments, with --shapes")

    one = command("list", run_list, "print the rules")
    one.add_argument("pattern", nargs="?", default="*")
    one.add_argument("--count", action="store_true", help="only how many overloads are covered, and lines")
    one = command("show", run_show, "print what one rule means for a call")
    one.add_argument("op")
    one.add_argument("--axis", type=int, default=4, help="positions of the mesh axis (4)")
    one.add_argument("--calls", type=int, default=1, help="sample calls an overload (1)")
    call_options(one)
    one = command("check", run_check, "hold rules to numbers")
    one.add_argument("ops", nargs="*", metavar="OP")
    one.add_argument("--all", action="store_true", help="every overload that torch's database reaches")
    one.add_argument("--everywhere", action="store_true", help="look for calls in all samples, not in likely ones")
    one.add_argument("--jobs", type=int, default=1, help="processes (1)")
    one.add_argument("--calls", type=int, default=8, help="calls an overload (8)")
    one.add_argument("--limit", type=int, default=48, help="strategies a call and mesh (48)")
    one.add_argument("--mesh", nargs="+", default=[], metavar="2x3", help="meshes (2 3 2x2 2x3)")
    one.add_argument("--wrong-only", action="store_true", help="do not look for missing rows")
    one.add_argument("--keys", action="store_true", help="vary the static arguments too: stale plans are wrong")
    one.add_argument("--json", metavar="FILE", help="write the findings there, a JSON object an overload")
    one.add_argument("--missing-to", metavar="FILE", help="write the missing rows with their reasons there")
    call_options(one)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    top = parser()
    options = top.parse_args(arguments)
    if options.command == "check" and not (options.all or options.ops):
        top.error("check: name ops, or give --all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status: int = options.run(options)
        return status
    except (ValueError, samples.MissingDatabase) as e:
        print(f"propagation_rules: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
