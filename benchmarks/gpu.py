"""What does the engine cost on GPUs, beside torch's DTensor and collectives by hand?

    python benchmarks/gpu.py                                worlds of 1, 2, 4 and 8 GPUs, as many as there are
    python benchmarks/gpu.py --worlds 1 --only block,loss   one world, two of the questions
    python benchmarks/gpu.py --device cpu --worlds 1,2      the same programs over gloo, small, for their logic

It needs torch, numpy and networkx alone (matplotlib for the plots), and no network. Tables go to RESULTS.md in
`benchmarks/results-gpu`, each also as JSON and as a plot. Where there is no GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
QUESTIONS = ("ops", "block", "redistribution", "loss", "overlap")
WORLDS = (1, 2, 4, 8)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: tuple(int(n) for n in text.split(","))  # noqa: E731
    parser.add_argument("--worlds", type=numbers, default=WORLDS, help="world sizes, default 1,2,4,8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(QUESTIONS), help=f"some of {','.join(QUESTIONS)}")
    parser.add_argument("--tiny", action="store_true", help="few and small, to try the benchmark itself")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one world")
    parser.add_argument("--out", type=Path, default=HERE / "results-gpu", help="where the results go")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, default=None, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if unknown := set(found.only.split(",")) - set(QUESTIONS):
        parser.error(f"--only takes some of {', '.join(QUESTIONS)}, got {', '.join(sorted(unknown))}")
    return found


# ------------------------------------------------------------ one rank
def rank(given: argparse.Namespace) -> None:
    """Measure all questions on this rank of the world; rank 0 writes what it found, question by question."""
    import logging
    import warnings

    import gpu_block
    import gpu_questions
    import gpu_timing
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = given.worlds[0]
    store = dist.FileStore(str(given.told / "store"), world)
    if given.device == "cuda":
        device = torch.device("cuda", given.rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=given.rank, world_size=world, device_id=device)
        facts = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}"
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=given.rank, world_size=world)
        facts = "CPU over gloo: a trial of the programs, no measurement"
    at = gpu_timing.Rank(device, given.rank, world, given.tiny or given.device == "cpu")
    functions = {"block": gpu_block.run} | {n: getattr(gpu_questions, n) for n in QUESTIONS if n != "block"}
    for name in given.only.split(","):
        text = functions[name](at)
        if given.rank == 0:
            source = gpu_block if name == "block" else functions[name]
            question = (source.__doc__ or "").splitlines()[0]
            found = json.dumps({"question": question, "facts": facts, "text": text})
            (given.told / f"{name}.json").write_text(found)
            print(f"{name}, {world} ranks: {question}\n\n{text}\n", flush=True)
        dist.barrier()
        if given.device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


# ------------------------------------------------------------ all worlds
def gpus() -> int:
    """GPUs that torch sees, asked in a process of its own so that this one takes none."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if out.returncode:
        sys.exit(f"torch does not start with {sys.executable}:\n{out.stderr}")
    return int(out.stdout.strip().splitlines()[-1])


def run_world(world: int, given: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Start the ranks of a world; what its rank 0 found, by question, and why it ended early if it did."""
    with tempfile.TemporaryDirectory() as told:
        command = [
            sys.executable, str(HERE / "gpu.py"), "--worlds", str(world), "--device", given.device,
            "--only", given.only, "--told", told, *(["--tiny"] if given.tiny else []), "--rank",
        ]  # fmt: skip
        path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        base = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(world)}
        logs: list[IO[str]] = [open(f"{told}/rank{r}", "w+") for r in range(world)]
        ranks = [
            subprocess.Popen([*command, str(r)], stderr=logs[r], env={**base, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(world)
        ]
        try:
            why = wait(ranks, given.timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        said = {}
        for r, log in enumerate(logs):
            log.seek(0)
            said[r] = "".join(line for line in log if not line.startswith("USDT:"))  # the profiler's marks
            log.close()
        for r, process in enumerate(ranks):
            if process.returncode > 0:
                print(f"-- rank {r}:\n{said[r][-4000:]}", flush=True)
        if why is None and said[0].strip():
            print(said[0], flush=True)  # programs that fail
        found = {n: json.loads(f.read_text()) for n in QUESTIONS if (f := Path(told) / f"{n}.json").exists()}
        return found, why


def wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Wait until all ranks have ended; the reason, where one fails or time is up."""
    end = time.monotonic() + timeout
    while any(p.poll() is None for p in ranks):
        failed = [r for r, p in enumerate(ranks) if p.poll() not in (None, 0)]
        if failed:
            time.sleep(2.0)  # the others may have something to say too
            return f"rank {failed[0]} failed"
        if time.monotonic() > end:
            return f"not done in {timeout:.0f} s"
        time.sleep(0.1)
    failed = [r for r, p in enumerate(ranks) if p.returncode]
    return f"rank {failed[0]} failed" if failed else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all worlds that there are GPUs for; 0 where nothing failed."""
    given = options(arguments)
    if given.rank is not None:
        rank(given)
        return 0
    import run

    there = gpus() if given.device == "cuda" else max(given.worlds)
    now, sections, ended = run.surroundings(), [], []
    for world in given.worlds:
        if world > there:
            print(f"skipped: a world of {world}, torch sees {there} GPU{'s' * (there != 1)} here", flush=True)
            continue
        found, why = run_world(world, given)
        if why:
            ended.append(f"a world of {world} ended early: {why}")
        given.out.mkdir(parents=True, exist_ok=True)
        for name, one in found.items():
            tables, file = run.tables_of(one["text"]), f"world{world}-{name}"
            result = {"question": one["question"], "world": world, "facts": one["facts"], **now, "tables": tables}
            (given.out / f"{file}.json").write_text(json.dumps(result, indent=1) + "\n")
            drawn = run.plot(file, f"{one['question']} World of {world}.", tables, given.out)
            picture = f"\n![{file}]({file}.svg)\n" if drawn else ""
            sections.append(f"## {name}, {world} ranks\n\n{one['question']} {one['facts']}\n\n{one['text']}\n{picture}")
    if sections:
        head = (
            "# Benchmarks on GPUs\n\nWritten by `make bench-gpu`. Lower is better; above a ratio of 1 torch's engine is"
        )
        head += f" faster.\n\n- date: {now['date']}\n- machine: {now['machine']}\n- {now['versions']}\n"
        (given.out / "RESULTS.md").write_text("\n".join([head, *sections, *(f"- {e}" for e in ended)]).rstrip() + "\n")
        print(f"written: {given.out / 'RESULTS.md'}")
    print("\n".join(ended))
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
