"""The engine on real GPUs: the same programs once per world size, one process a GPU, started by torchrun.

    python tests/gpu/run.py                              worlds of 1, 2, 4 and 8 GPUs, as many as there are
    python tests/gpu/run.py --worlds 1 --only attention  one world, the cases whose names hold "attention"
    python tests/gpu/run.py --device cpu --worlds 1,2    the same programs on gloo, for their logic
    python tests/gpu/run.py --list                       the cases

It needs torch, numpy and networkx alone, finds the checkout by itself, and exits with 0 where everything passed or was
skipped; what was skipped, and why, is listed at the end. Where a rank fails, the others are ended, and that rank's
traceback is printed first. A world that takes longer than `--timeout` seconds is ended, with the stacks of its ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORLDS = (1, 2, 4, 8)
TAIL = 12_000  # characters of the ranks' own output that are shown after a failure
GRACE = 10.0  # seconds between asking a world to show its stacks and ending it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 where nothing failed."""
    options = _options(arguments)
    if options.list:
        sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]
        from worker import cases

        print("\n".join(f"{name:40} {doc}" for name, doc in cases(options.modules)))
        return 0
    gpus = _gpus() if options.device == "cuda" else 0
    failed, skipped, lines = [], [], []
    for world in options.worlds:
        if options.device == "cuda" and gpus < world:
            skipped.append(f"world of {world}: torch sees {gpus} GPU{'s' * (gpus != 1)} here")
            continue
        print(f"== world of {world} ({options.device})", flush=True)
        start = time.monotonic()
        done = _world(world, options)
        lines.append(f"world of {world}: {done['passed']} cases passed in {time.monotonic() - start:.0f} s")
        skipped += [f"world of {world}, {name}: {why}" for name, why in done["skipped"]]
        if done["failed"]:
            failed.append(world)
            if not options.keep_going:
                break
    print("\n".join(lines))
    if skipped:
        print("skipped:\n  " + "\n  ".join(skipped))
    if failed:
        print(f"FAILED: world of {', '.join(map(str, failed))}")
    return 1 if failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the engine on real GPUs, once per world size")
    parser.add_argument("--worlds", type=_numbers, default=WORLDS, help="world sizes, default 1,2,4,8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo")
    parser.add_argument("--only", default="", help="run cases whose name holds one of these words: a,b")
    parser.add_argument("--modules", default="", help="modules with cases in the place of tests/gpu/cases_*.py: a,b")
    parser.add_argument("--quick", action="store_true", help="fewer layouts and dtypes of each case")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one world")
    parser.add_argument("--keep-going", action="store_true", help="go on to larger worlds after a failure")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if not found or any(n < 1 for n in found):
        raise argparse.ArgumentTypeError(f"world sizes are positive numbers with commas between, got {text!r}")
    return found


def _gpus() -> int:
    """GPUs that torch sees, asked in a process of its own so that this one takes none."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if out.returncode:
        sys.exit(f"torch does not start with {sys.executable}:\n{out.stderr}")
    return int(out.stdout.strip().splitlines()[-1])


def _world(world: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one world; what its ranks report."""
    with tempfile.TemporaryDirectory() as told:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone",
            str(HERE / "worker.py"), "--device", options.device, "--only", options.only, "--told", told,
            "--modules", options.modules, *(["--quick"] if options.quick else []),
        ]  # fmt: skip
        paths = [str(ROOT), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        errors = Path(told) / "errors"
        with errors.open("wb") as stream:
            process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=stream)
        try:
            code: int | None = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            print(f"a world of {world} takes longer than {options.timeout:.0f} s; the stacks of its ranks:", flush=True)
            _end(process, Path(told))
            code = None
        except BaseException:
            _end(process, Path(told))
            raise
        reports = [json.loads(p.read_text()) for p in sorted(Path(told).glob("rank*.json"))]
        failures = sorted((r for r in reports if r.get("traceback")), key=lambda r: r["time"])
        for report in failures:
            print(f"-- rank {report['rank']} failed in {report['case']}:\n{report['traceback']}", flush=True)
        if code != 0 or failures:
            print("-- what the ranks and torchrun wrote:\n" + errors.read_text(errors="replace")[-TAIL:], flush=True)
        ended = [r for r in reports if "passed" in r]
        missing = world - len({r["rank"] for r in reports})
        if missing and code != 0:
            print(f"-- {missing} of {world} ranks ended without a word (exit code {code})", flush=True)
        first = ended[0] if ended else {"passed": 0, "skipped": []}
        return {
            "passed": first["passed"], "skipped": first["skipped"],
            "failed": bool(failures) or code != 0 or len(ended) != world,
        }  # fmt: skip


def _end(process: subprocess.Popen[bytes], told: Path) -> None:
    """Have the ranks print their stacks, then end them and torchrun: the process group that was started here."""
    for file in told.glob("pid*"):
        try:
            os.kill(int(file.read_text()), signal.SIGUSR1)
        except (ProcessLookupError, ValueError):
            pass
    time.sleep(1.0)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return


if __name__ == "__main__":
    sys.exit(main())
