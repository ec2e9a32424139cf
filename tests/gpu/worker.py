"""One rank of a world: runs the cases in order. Started by torchrun, which `run.py` starts.

A case is a function `case_name(env)` of a module in `CASES`; its first line says what must hold. It may raise `Skip`
with a reason, on all ranks alike. The first rank on which a case fails writes its traceback down and ends at once;
torchrun then ends the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from environment import Environment, Skip

CASES = (
    "collectives", "redistribution", "rules", "numbers", "attention", "random_numbers", "losses", "training", "lowered",
)  # fmt: skip


def _found(modules: str) -> Iterator[tuple[str, Callable[[Environment], None]]]:
    """Name and function of every case of `modules`, or of all modules here."""
    for name in modules.split(",") if modules else CASES:
        module = importlib.import_module(f"cases_{name}")
        for key, value in list(vars(module).items()):
            if key.startswith("case_") and callable(value):
                yield f"{name}.{key.removeprefix('case_')}", value


def cases(modules: str = "") -> list[tuple[str, str]]:
    """Name and first line of every case."""
    return [(name, (case.__doc__ or "").strip().splitlines()[0]) for name, case in _found(modules)]


def main() -> None:
    """Run the cases on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--told", required=True)
    parser.add_argument("--modules", default="")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    told = Path(options.told)
    (told / f"pid{rank}").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(local)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        device = torch.device("cuda", local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120), device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    env = Environment(device, rank, dist.get_world_size(), options.quick)
    words = [word for word in options.only.split(",") if word]
    passed, skipped = 0, []
    for name, case in list(_found(options.modules)):
        if words and not any(word in name for word in words):
            continue
        torch.manual_seed(0)
        start = time.monotonic()
        try:
            case(env)
            if device.type == "cuda":
                torch.cuda.synchronize()
            passed += 1
            word = f"passed {time.monotonic() - start:6.1f} s"
        except Skip as reason:
            skipped.append((name, str(reason)))
            word = f"skipped: {reason}"
        except BaseException:
            _tell(told, {"rank": rank, "case": name, "time": time.time(), "traceback": traceback.format_exc()})
            os._exit(1)  # the others may wait for this rank in a collective: nothing is put in order
        if rank == 0:
            print(f"{name:40} {word}", flush=True)
    _tell(told, {"rank": rank, "passed": passed, "skipped": skipped})
    dist.barrier()
    dist.destroy_process_group()


def _tell(told: Path, report: dict[str, object]) -> None:
    made = told / f".rank{report['rank']}"
    made.write_text(json.dumps(report))
    made.rename(told / f"rank{report['rank']}.json")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
