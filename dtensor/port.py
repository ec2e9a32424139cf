"""`python -m dtensor.port FILE...`: change a program's imports from torch's DTensor to this engine.

    python -m dtensor.port train.py models/*.py             shows the diff
    python -m dtensor.port --apply train.py models/*.py     and writes it

    from torch.distributed.tensor import DTensor, Shard     from dtensor import DTensor, Shard
    import torch.distributed.tensor.parallel as tp          import dtensor.parallel as tp
    dist.init_device_mesh("cpu", (2,))                      dtensor.init_device_mesh("cpu", (2,))

What has no counterpart is left as it is and named, with its line; the exit status is then 1. So are `fully_shard`,
`replicate`, FSDP and DDP, which work with this engine under `dtensor.swap` only. Only import statements and
dotted names change; comments, strings and layout stay.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from dtensor.swap.names import OURS, ROOTS, is_under

__all__ = ["Port", "main", "port"]

PACKAGES = {
    "torch.distributed.tensor": "dtensor",
    "torch.distributed._tensor": "dtensor",
    "torch.distributed.device_mesh": "dtensor",
    "torch.distributed.tensor.device_mesh": "dtensor",
    "torch.distributed.tensor.parallel": "dtensor.parallel",
    "torch.distributed.tensor.experimental": "dtensor.experimental",
    "torch.distributed.tensor.debug": "dtensor.debug",
    "torch.distributed.tensor.placement_types": "dtensor.placement",
}
"""Modules of torch that have one of ours with the same names."""
ALSO_IN_DISTRIBUTED = ("DeviceMesh", "init_device_mesh")
SWAP_ONLY = ("fully_shard", "replicate", "FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel")
"""What torch has for data parallelism. It knows torch's DTensor only, and ours under `dtensor.swap`."""
SWAP_HOMES = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")


@dataclass
class Port:
    """A ported text, and what could not be ported: (line, what)."""

    text: str
    left: list[tuple[int, str]] = field(default_factory=list)


def port(source: str) -> Port:
    """`source` with this engine's imports. Raises SyntaxError where it is no Python."""
    return _Porter(source).port()


def _home(module: str, name: str) -> tuple[str, str] | None:
    """Our (module, name) for a name that `module` of torch has; None where there is none."""
    if not (is_under(module, ROOTS) or (module == "torch.distributed" and name in ALSO_IN_DISTRIBUTED)):
        return None
    for names in OURS.values():
        if name in names:
            there, _, attribute = names[name].partition(":")
            for package in ("dtensor", "dtensor.parallel", "dtensor.experimental", "dtensor.debug"):
                # What stands in for a style's function under the swap is that of `dtensor.parallel` otherwise.
                stands_in = package == "dtensor.parallel" and there == "dtensor.swap.stand_ins"
                ours = stands_in or is_under(there, (package,))
                if ours and attribute in getattr(import_module(package), "__all__"):  # noqa: B009
                    return package, attribute
            return there, attribute
    return None


NEEDS_SWAP = " (knows torch's DTensor only: use dtensor.swap, for which the program stays as it is)"


def _under_swap_only(module: str, name: str) -> bool:
    """Whether `name` of a module of torch is data parallelism of torch's, or `*` may be."""
    return is_under(module, SWAP_HOMES) and (name in SWAP_ONLY or name == "*")


class _Porter:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.edits: list[tuple[int, int, str]] = []
        self.left: list[tuple[int, str]] = []
        self.needed: set[str] = set()
        self.modules = {"torch": "torch"}
        """Names that stand for a module of torch, and which."""
        self.kept: dict[str, str] = {}
        """Those of them that an import of ours takes over."""
        self.bound = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        self.bound |= {n.arg for n in ast.walk(self.tree) if isinstance(n, ast.arg)}

    def port(self) -> Port:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.plain_import(node)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                self.import_from(node, node.module)
        for chain, node in self.chains():
            self.chain(chain, node)
        data = self.source.encode()
        for start, end, text in sorted(self.edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return Port(self.with_needed(data.decode()), sorted(self.left))

    # ------------------------------------------------------------ imports
    def plain_import(self, node: ast.Import) -> None:
        lines, changed = [], False
        for alias in node.names:
            ours = PACKAGES.get(alias.name)
            if is_under(alias.name, ROOTS) and ours and alias.asname:
                lines.append(f"import {ours} as {alias.asname}")
                self.modules[alias.asname], self.kept[alias.asname] = alias.name, ours
                changed = True
            elif is_under(alias.name, ROOTS) and ours:
                lines.append("import torch")
                changed = True
            else:
                if is_under(alias.name, ROOTS):
                    self.left.append((node.lineno, f"import {alias.name}"))
                if alias.asname:
                    self.modules[alias.asname] = alias.name
                lines.append(f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""))
        if changed:
            self.put(node, list(dict.fromkeys(lines)))

    def import_from(self, node: ast.ImportFrom, module: str) -> None:
        groups: dict[str, list[str]] = {}
        lines, changed = [], False
        for alias in node.names:
            whole, name = f"{module}.{alias.name}", alias.asname or alias.name
            suffix = f" as {alias.asname}" if alias.asname else ""
            home = _home(module, alias.name)
            if home is not None:
                package, ours = home
                groups.setdefault(package, []).append(ours + (f" as {name}" if ours != name else ""))
                changed = True
            elif whole in PACKAGES:
                lines.append(f"import {PACKAGES[whole]}" + (f" as {name}" if PACKAGES[whole] != name else ""))
                self.modules[name], self.kept[name] = whole, PACKAGES[whole]
                changed = True
            else:
                if _under_swap_only(module, alias.name):
                    self.left.append((node.lineno, f"from {module} import {alias.name}{NEEDS_SWAP}"))
                elif is_under(module, ROOTS) or is_under(whole, ROOTS):
                    self.left.append((node.lineno, f"from {module} import {alias.name}"))
                self.modules[name] = whole
                groups.setdefault(module, []).append(alias.name + suffix)
        if changed:
            self.put(node, [self.written(package, names, node) for package, names in groups.items()] + lines)

    def written(self, package: str, names: list[str], node: ast.stmt) -> str:
        line, pad = f"from {package} import {', '.join(names)}", " " * node.col_offset
        if len(pad + line) <= 88:
            return line
        return f"from {package} import (\n" + "".join(f"{pad}    {name},\n" for name in names) + f"{pad})"

    def put(self, node: ast.stmt, lines: list[str]) -> None:
        """Write `lines` in the place of a statement, with the comments that stand inside it behind them."""
        start, end = self.span(node)
        data = self.source.encode()
        before = data[self.starts[node.lineno - 1] : start]
        old = data[start:end].decode().splitlines()
        comments = "".join("  #" + line.split("#", 1)[1] for line in old if "#" in line)
        glue = "; " if before.strip() else "\n" + before.decode()
        self.edits.append((start, end, glue.join(lines) + comments))

    # ------------------------------------------------------------ dotted names
    def chains(self) -> Iterator[tuple[list[str], ast.Attribute]]:
        """Attribute chains that begin with a name, the longest ones only."""
        inner = {id(n.value) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                parts: list[str] = []
                base: ast.expr = node
                while isinstance(base, ast.Attribute):
                    parts.insert(0, base.attr)
                    base = base.value
                if isinstance(base, ast.Name):
                    yield [base.id, *parts], node

    def chain(self, parts: list[str], node: ast.Attribute) -> None:
        """Rewrite `parts` where a head of them is a name of torch that is ours as well."""
        head = self.modules.get(parts[0])
        if head is None:
            return
        names = [*head.split("."), *parts[1:]]
        extra = len(head.split(".")) - 1
        for n in range(len(names) - 1, extra, -1):
            module, name = ".".join(names[:n]), names[n]
            if _under_swap_only(module, name):
                self.left.append((node.lineno, f"{'.'.join(parts)}{NEEDS_SWAP}"))
                return
            home = _home(module, name)
            if home is None:
                continue
            if n == extra + 1 and self.kept.get(parts[0]) == home[0]:
                return  # the import gives it already
            package = home[0]
            if package.split(".")[0] in self.bound:
                self.left.append((node.lineno, f"{'.'.join(parts)}: {package} is another variable in this file"))
                return
            part: ast.expr = node
            for _ in range(len(names) - 1 - n):
                if isinstance(part, ast.Attribute):
                    part = part.value
            self.edits.append((*self.span(part), f"{package}.{home[1]}"))
            self.needed.add(package)
            return
        if any(is_under(".".join(names[:n]), ROOTS) for n in range(3, len(names))):
            self.left.append((node.lineno, ".".join(parts)))

    # ------------------------------------------------------------ text
    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        end_line, end_col = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end_col

    def with_needed(self, text: str) -> str:
        """`text` with imports of the packages that its dotted names need now, behind its first import of torch."""
        if not self.needed:
            return text
        lines = text.splitlines(keepends=True)
        last = 0
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and not last
            ):
                last = node.end_lineno or node.lineno
                if isinstance(node, ast.Import) and any(is_under(a.name, ("torch",)) for a in node.names):
                    break
        lines[last:last] = [f"import {package}\n" for package in sorted(self.needed)]
        return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 where something was left, 2 where a file is no Python."""
    parser = argparse.ArgumentParser(prog="python -m dtensor.port", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--apply", action="store_true", help="write the files")
    given = parser.parse_args(arguments)
    status = 0
    for path in given.files:
        old = path.read_text()
        try:
            new = port(old)
        except SyntaxError as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 2
            continue
        sys.stdout.writelines(
            difflib.unified_diff(
                old.splitlines(keepends=True), new.text.splitlines(keepends=True), str(path), str(path)
            )
        )
        for line, what in new.left:
            print(f"{path}:{line}: no counterpart, left as it is: {what}", file=sys.stderr)
            status = max(status, 1)
        if given.apply and new.text != old:
            path.write_text(new.text)
    return status


if __name__ == "__main__":
    sys.exit(main())
