"""The workflows run what people run, and are harmless: parsed, and held to rules that can fail."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED_ACTION = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}$")
Workflow = dict[Any, Any]


def parsed(file: Path) -> Workflow:
    found: Workflow = yaml.safe_load(file.read_text())
    return found


def targets() -> set[str]:
    """The targets of the Makefile that people name."""
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert phony
    names = set(phony.group(1).split())
    assert all(re.search(rf"^{re.escape(n)}:", text, re.MULTILINE) for n in names)
    return names


def triggers(workflow: Workflow) -> dict[str, Any]:
    """What starts it: YAML reads the key `on` as True."""
    found = workflow[True] if True in workflow else workflow["on"]
    return found if isinstance(found, dict) else dict.fromkeys([found] if isinstance(found, str) else found)


def steps(workflow: Workflow) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def faults(workflow: Workflow) -> list[str]:
    """What is wrong with a workflow, by the rules of this project."""
    found = []
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions are not contents: read")
    if not {"group", "cancel-in-progress"} <= set(workflow.get("concurrency", {})):
        found.append("concurrency is not limited")
    if set(triggers(workflow)) - {"push", "pull_request", "workflow_dispatch"}:
        found.append("started by what strangers control")
    if "secrets." in str(workflow):
        found.append("uses a secret")
    for name, job in workflow["jobs"].items():
        if not isinstance(job.get("timeout-minutes"), int) or not 0 < job["timeout-minutes"] <= 120:
            found.append(f"{name}: no timeout")
        if set(job) & {"permissions", "secrets", "uses"}:
            found.append(f"{name}: permissions, secrets or a workflow of its own")
        guard = str(job.get("if", ""))
        kept = (
            "pull_request.head.repo.full_name == github.repository" in guard
            and "!github.event.repository.fork" in guard
        )
        if "self-hosted" in str(job["runs-on"]) and not kept:
            found.append(f"{name}: our machine, without a condition that keeps forks away")
    for step in steps(workflow):
        if "uses" in step and not PINNED_ACTION.match(step["uses"]):
            found.append(f"{step['uses']} is not pinned")
        if "actions/checkout" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") is not False:
            found.append("the token stays in the checkout")
        if "run" in step:
            found += [f"{step['run']!r}: {why}" for why in [not_a_command_of_ours(step["run"])] if why]
    return found


def not_a_command_of_ours(command: str) -> str | None:
    """Why a step is none that people run: it is `make` with targets that exist and variables, or .ci/run."""
    words = shlex.split(command)
    if words == [".ci/run"]:
        return None if (ROOT / ".ci" / "run").stat().st_mode & 0o111 else ".ci/run cannot be executed"
    if words[:1] != ["make"] or "${{" in command or "\n" in command.strip():
        return "neither make nor .ci/run alone"
    unknown = [w for w in words[1:] if "=" not in w and w not in targets()]
    return f"no targets: {unknown}" if unknown else None


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_workflow_keeps_the_rules(file: Path) -> None:
    assert not faults(parsed(file))


def test_what_is_run_where() -> None:
    """All versions that pyproject.toml names on CPU, the GPU targets on the machine with 8 of them and on CPU."""
    ci, gpu = (parsed(ROOT / ".github" / "workflows" / f"{n}.yml") for n in ("ci", "gpu"))
    runs = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in (ci["jobs"] | gpu["jobs"]).items()}
    assert runs["readme"] == [".ci/run", "make demo", "make test-gpu", "make bench-gpu"]
    assert runs["versions"] == ["make suite", "make demo"] and runs["gpu"] == ["make test-gpu", "make bench-gpu"]
    matrix = ci["jobs"]["versions"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    oldest = re.search(r'"torch>=([\d.]+)"', project)
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert oldest and pinned
    assert matrix["torch"] == [f"{oldest.group(1)}.0", pinned.group(1), "newest"]
    assert gpu["jobs"]["gpu"]["strategy"]["matrix"]["torch"] == matrix["torch"][:2]
    assert "gpu-8" in gpu["jobs"]["gpu"]["runs-on"] and gpu["jobs"]["gpu"]["container"]["image"]
    kept = [s["with"]["path"] for s in steps(gpu) if "upload-artifact" in s.get("uses", "")]
    assert kept == ["benchmarks/results-gpu"]


def broken(path: str, value: Any) -> Workflow:
    """A workflow of ours with one thing changed."""
    workflow = copy.deepcopy(parsed(ROOT / ".github" / "workflows" / "gpu.yml"))
    *way, last = path.split("/")
    at: Any = workflow
    for key in way:
        at = at[int(key) if key.isdigit() else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return workflow


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("permissions", None),
        ("permissions", {"contents": "write"}),
        ("concurrency", None),
        ("jobs/gpu/timeout-minutes", None),
        ("jobs/gpu/if", None),
        ("jobs/gpu/if", "github.event_name != 'push'"),
        ("jobs/gpu/permissions", {"contents": "write"}),
        ("jobs/gpu/env", {"TOKEN": "${{ secrets.TOKEN }}"}),
        ("jobs/gpu/steps/0/uses", "actions/checkout@v4"),
        ("jobs/gpu/steps/0/with", {}),
        ("jobs/gpu/steps/1/run", "make test-gpus"),
        ("jobs/gpu/steps/1/run", "pytest tests/gpu"),
        ("jobs/gpu/steps/1/run", "make test-gpu && pip list"),
        ("jobs/gpu/steps/1/run", "make test-gpu GPU=${{ github.event.pull_request.title }}"),
    ],
)
def test_the_rules_can_fail(path: str, value: Any) -> None:
    assert len(faults(broken(path, value))) == 1


def test_a_trigger_that_strangers_control_is_a_fault() -> None:
    workflow = parsed(ROOT / ".github" / "workflows" / "ci.yml")
    workflow[True] = {"pull_request_target": None}
    assert faults(workflow) == ["started by what strangers control"]


def said(*arguments: str) -> list[str]:
    """What make would run."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "TORCH", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "-n", *arguments], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


@pytest.mark.parametrize(
    ("arguments", "folder", "torch"),
    [
        ((), ".venv", "==2.13.0"),
        (("TORCH=2.13.0", "PYTHON=python3"), ".venv", "==2.13.0"),
        (("PYTHON=python3.12",), ".venv-python3.12", "==2.13.0"),
        (("PYTHON=python3.12", "TORCH=2.11.0"), ".venv-python3.12-torch2.11.0", "==2.11.0"),
        (("TORCH=newest",), ".venv-torchnewest", ">=2.13.0"),
    ],
)
def test_each_python_and_torch_has_a_folder_of_its_own(arguments: tuple[str, ...], folder: str, torch: str) -> None:
    pins = "-c " + f"{folder}/constraints.txt"
    lines = said("-W", "pyproject.toml", "suite", *arguments)
    assert f'{folder}/bin/python -m pip install --quiet "torch{torch}" {pins}' in lines
    assert f"{folder}/bin/python -m pip install --quiet {pins} -e '.[dev,plot]'" in lines
    assert lines[-1].startswith(f"{folder}/bin/python -m pytest ")


def test_with_what_is_there_nothing_is_installed() -> None:
    lines = [line for target in ("test-gpu", "bench-gpu") for line in said(target, "TORCH=system", "PYTHON=python9")]
    assert [line.split()[:2] for line in lines] == [["python9", "tests/gpu/run.py"], ["python9", "benchmarks/gpu.py"]]
