"""The project's shape: who imports whom, what `import dtensor` loads, and that public names explain themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dtensor", "propagation_rules", "parallel", "loss")
FOREIGN = ("torch.distributed.tensor", "torch.distributed._tensor")

# docs/architecture.md, section 2: a module imports only from the rows above its own, or from its own row.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("dtensor.placement",),
    ("dtensor.errors",),
    ("dtensor.world", "dtensor.comm", "dtensor.comm_c10d", "dtensor.comm_simulated", "dtensor.comm_fake"),
    ("dtensor.device_mesh",),
    ("dtensor.spec",),
    ("dtensor.reshard_plan", "dtensor.reshard_run"),
    ("dtensor.cost",),
    ("dtensor.factors",),
    ("dtensor.registry",),
    ("dtensor.propagate",),
    ("dtensor.dispatch", "dtensor.tensor", "dtensor.autograd", "dtensor.factory", "dtensor.random"),
    ("propagation_rules",),
    ("dtensor.experimental", "dtensor.debug", "dtensor.simulate"),
    ("parallel", "loss"),
)


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, is at the top level) of every import, relative ones made absolute, typing-only ones left out."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def walk(nodes: list[ast.stmt], top: bool) -> Iterator[tuple[str, int, bool]]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno, top
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*up, *([node.module] if node.module else [])])
                for alias in node.names:  # `from package import module` imports the module
                    inner = f"{base}.{alias.name}"
                    is_module = (ROOT / Path(*inner.split("."))).with_suffix(".py").exists()
                    yield (inner if is_module else base), node.lineno, top
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse, top)
            else:
                inside = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []), inside)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, inside)

    yield from walk(ast.parse(path.read_text()).body, True)


def layer(module: str) -> int | None:
    """The row of `module` in LAYERS, None when it has none (a package's __init__, or a module of another project)."""
    for row, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return row
    return None


def is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_no_import_of_torchs_engine(path: Path) -> None:
    if module_name(path) == "dtensor.swap":
        pytest.skip("the swap module is the one that may")
    foreign = [f"line {line}: {name}" for name, line, _ in imports(path) if name.startswith(FOREIGN)]
    assert not foreign


def layer_faults(path: Path) -> list[str]:
    """Imports at the top level of `path` that go against the order of LAYERS."""
    mine = layer(module_name(path))
    if mine is None:  # a package's __init__ gathers what is below it
        return []
    faults = []
    for name, line, top in imports(path):
        other = layer(name)
        if top and is_ours(name) and (other is None or other > mine) and name != module_name(path):
            faults.append(f"{module_name(path)}:{line} imports {name}, which is not above it")
    return faults
