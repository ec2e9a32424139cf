"""The project's shape: who imports whom, what `import dtensor` loads, and that public names explain themselves."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dtensor", "propagation_rules", "parallel", "loss")
FOREIGN = ("torch.distributed.tensor", "torch.distributed._tensor")
MAY_IMPORT_FOREIGN = {"dtensor.swap"}
MARKS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")

PUBLIC = {"_StridedShard"}  # torch's own spelling of a placement


class Import(NamedTuple):
    """One import: the module it names, where, and whether it runs when its file is imported."""

    module: str
    line: int
    at_top: bool


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = () if parts[0] == "dtensor" else ("dtensor",)
    return ".".join((*inside, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def full(name: str) -> str:
    """`dtensor.loss` for the short name `loss`."""
    return f"dtensor.{name}" if name.split(".")[0] in PACKAGES[1:] else name


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.removeprefix("dtensor.").split("."))
    path = path if path.parts[len(ROOT.parts)] in PACKAGES else ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(name: str, code: str, is_package: bool = False) -> Iterator[Import]:
    """The imports of module `name`, relative ones made absolute, those for type checkers only among them."""
    package = name if is_package else name.rpartition(".")[0]

    def walk(nodes: list[ast.stmt], top: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(full(alias.name), node.lineno, top) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                for alias in node.names:  # `from package import module` imports the module
                    inner = f"{base}.{alias.name}"
                    yield Import(full(inner if is_module(inner) else base), node.lineno, top)
            else:
                inside = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []), inside)
                for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                    yield from walk(part.body, inside)

    yield from walk(ast.parse(code).body, True)


def imports_of(path: Path) -> Iterator[Import]:
    return imports(module_name(path), path.read_text(), path.name == "__init__.py")


@functools.cache
def layers() -> tuple[tuple[str, ...], ...]:
    """The rows of the table in docs/architecture.md, section 2."""
    sections = re.split(r"^## ", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    section = next(text for text in sections if text.startswith("2. Packages"))
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return tuple(tuple(name.strip("/") for name in re.findall(r"`([\w./]+)`", row)) for row in rows)


def layer(module: str) -> int | None:
    """The row of `module`, None when it has none."""
    fits = [
        (len(name), row) for row, names in enumerate(layers()) for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(fits)[1] if fits else None


def layer_faults(name: str, found: Iterator[Import]) -> list[str]:
    """What goes against the order: imports from a lower row than the module's own, or from a module without one."""
    mine, faults = layer(name), []
    if mine is None:
        return [f"{name} has no row in docs/architecture.md, section 2"]
    for imported, line, _ in found:
        if imported.split(".")[0] not in PACKAGES or imported in PACKAGES[:1]:
            continue
        other = layer(imported)
        if other is None or other > mine:
            faults.append(f"{name}:{line} imports {imported}, which is not above it")
    return list(dict.fromkeys(faults))


MODULES = [pytest.param(path, id=module_name(path)) for path in sources()]


@pytest.mark.parametrize("path", MODULES)
def test_no_import_of_torchs_engine(path: Path) -> None:
    foreign = [f"line {i.line}: {i.module}" for i in imports_of(path) if i.module.startswith(FOREIGN)]
    assert not foreign or module_name(path) in MAY_IMPORT_FOREIGN


@pytest.mark.parametrize("path", [p for p in MODULES if module_name(p.values[0]) not in ("dtensor",)])
def test_layers(path: Path) -> None:
    assert not layer_faults(module_name(path), imports_of(path))


def test_clients_use_public_names_of_the_package_only_from_outside() -> None:
    """`import dtensor` inside the package would be a circle: only clients may."""
    circles = [
        f"{module_name(path)}:{i.line}"
        for path in sources()
        if module_name(path).startswith("dtensor.")
        and (layer(module_name(path)) or 0) < (layer("dtensor.propagation_rules") or 0)
        for i in imports_of(path)
        if i.module == "dtensor" and i.at_top
    ]
    assert not circles


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    found = nx.strongly_connected_components(nx.DiGraph(edge for edge in edges if edge[0] != edge[1]))
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def test_no_import_goes_in_a_circle() -> None:
    """Those for type checkers and those inside functions count."""
    names = {module_name(path) for path in sources()}
    edges = [(module_name(path), i.module) for path in sources() for i in imports_of(path) if i.module in names]
    assert len(edges) > 500 and not circles(edges)
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [["a", "b", "c"]]


def package_of(module: str) -> str:
    """`dtensor.comm` for `dtensor.comm.wire`; a module that lies in `dtensor` itself is a package of its own."""
    return ".".join(module.split(".")[:2])


def private_names(name: str, code: str, is_package: bool = False) -> list[str]:
    """Names with a leading underscore that module `name` takes from another package, imported or as an attribute."""
    tree, found, modules = ast.parse(code), [], dict[str, str]()
    package = name if is_package else name.rpartition(".")[0]
    private = re.compile(r"_(?!_)").match
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            if base.split(".")[0] not in PACKAGES:
                continue
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if is_module(inner):
                    modules[alias.asname or alias.name] = inner
                elif private(alias.name) and alias.name not in PUBLIC and package_of(base) != package_of(name):
                    found.append(f"{name}:{node.lineno} imports {base}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and private(node.attr):
            module = modules.get(node.value.id)
            if module and package_of(module) != package_of(name):
                found.append(f"{name}:{node.lineno} takes {module}.{node.attr}")
    return found


def test_packages_use_public_names_of_each_other() -> None:
    found = [
        fault
        for path in sources()
        for fault in private_names(module_name(path), path.read_text(), path.name == "__init__.py")
    ]
    assert not found
    assert private_names("dtensor.spec", "from dtensor.mesh import geometry as g\nfrom .comm.wire import _a\ng._b") == [
        "dtensor.spec:2 imports dtensor.comm.wire._a",
        "dtensor.spec:3 takes dtensor.mesh.geometry._b",
    ]


def test_packages_are_the_map() -> None:
    """Few files lie in `dtensor` itself, and every folder is a package that says what it is for."""
    assert len([path for path in (ROOT / "dtensor").iterdir() if path.is_file()]) <= 14
    folders = {path.parent for path in sources()}
    assert all((ast.get_docstring(ast.parse((f / "__init__.py").read_text())) or "").strip() for f in folders)


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [
        ("dtensor.spec", "from dtensor.tensor import DTensor", True),
        ("dtensor.spec", "from .tensor import DTensor", True),
        ("dtensor.spec", "def f():\n    try:\n        import dtensor.parallel\n    except ImportError: pass", True),
        ("dtensor.spec", "import dtensor.not_there", True),
        ("dtensor.not_there", "", True),
        ("dtensor.spec", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dtensor.tensor", True),
        ("dtensor.spec", "import torch, dtensor.placement", False),
        ("dtensor.loss.anything", "from dtensor.rules.registry import register", False),
    ],
)
def test_the_layer_check_can_fail(name: str, code: str, fault: bool) -> None:
    assert bool(layer_faults(name, imports(name, code))) == fault


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "examples", "benchmarks", "docs"])
def test_no_marks_left(folder: str) -> None:
    """Open points are a dated list in docs/, not marks in the code."""
    files = [p for suffix in ("*.py", "*.md") for p in (ROOT / folder).rglob(suffix)]
    marked = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in files
        for n, s in enumerate(p.read_text().splitlines(), 1)
        if MARKS.search(s)
    ]
    assert files and not marked


def imported_tests(code: str) -> list[str]:
    """The tests that a file imports, by whatever name."""
    found = imports("test", code)
    return [i.module for i in found if any(part.startswith("test_") for part in i.module.split("."))]


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: p.stem)
def test_no_test_is_imported(path: Path) -> None:
    """What tests share lies in tests/helpers."""
    assert not imported_tests(path.read_text())


def test_the_check_for_imported_tests_can_fail() -> None:
    assert imported_tests("from test_comm import every") == ["test_comm"]
    assert imported_tests("def f():\n    import core.test_comm") == ["core.test_comm"]
    assert not imported_tests("from helpers.comm_cases import every\nfrom torch import testing")


def loaded_by(statement: str) -> set[str]:
    """The modules that `statement` adds to a fresh interpreter that has torch."""
    program = f"import sys, torch; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_loads_little() -> None:
    """How long it takes is a benchmark; what it depends on is this."""
    loaded = loaded_by("import dtensor")
    ours = (f"dtensor.{name}" for name in PACKAGES[1:])
    heavy = {m for m in loaded if m.startswith((*FOREIGN, *ours, "networkx", "sympy", "matplotlib", "rich"))}
    assert "dtensor" in loaded and not heavy
    assert len(loaded) < 150, sorted(loaded)


@pytest.mark.parametrize("package", ["dtensor.parallel", "dtensor.loss", "dtensor.propagation_rules"])
def test_clients_do_not_load_torchs_engine(package: str) -> None:
    assert not {m for m in loaded_by(f"import {package}") if m.startswith(FOREIGN)}


@pytest.mark.parametrize("package", ["", ".debug", ".experimental", ".parallel", ".loss"])
def test_public_names_exist_and_explain_themselves(package: str) -> None:
    module = import_module(f"dtensor{package}")
    assert module.__doc__ and module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def test_pinned_torch_is_the_one_that_runs() -> None:
    import torch

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wanted = os.environ.get("TORCH", pins["torch"])  # make's variable; `newest` and `system` say no version
    assert not wanted[0].isdigit() or torch.__version__.split("+")[0] == wanted
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in [*extras["dev"], *extras["plot"], "numpy", "networkx"]:
        assert re.split(r"[<>=]", requirement)[0] in pins, f"{requirement} is not pinned in constraints.txt"
