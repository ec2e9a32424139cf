"""`make fuzz`: draw programs, run them, shrink what is wrong, count what is refused."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fuzz.draw import draw
from fuzz.judge import runnable
from fuzz.processes import Tally, on_gloo, simulated_apart


def main() -> int:
    p = argparse.ArgumentParser(prog="make fuzz", description="Random programs, plain and distributed.")
    p.add_argument("--seed", type=int, default=0, help="of the first program")
    p.add_argument("--programs", type=int, default=200, help="for each mesh")
    p.add_argument("--mesh", nargs="*", default=["2", "2x2", "2x3"], help="e.g. 2x3 4")
    p.add_argument("--gloo", action="store_true", help="on real processes; nothing is shrunk")
    p.add_argument("--show", action="store_true", help="print the programs as scripts, run none")
    p.add_argument("--shrink", type=float, default=60.0, help="seconds for shrinking a program")
    args = p.parse_args()
    seeds, wrong = range(args.seed, args.seed + args.programs), 0
    for text in args.mesh:
        mesh = tuple(int(k) for k in text.split("x"))
        if args.show:
            for seed in seeds:
                print(runnable(draw(seed, mesh))[0].script())
            continue
        tally, start = Tally(), time.monotonic()
        for judged, small in on_gloo(mesh, seeds) if args.gloo else simulated_apart(mesh, seeds, args.shrink):
            tally.add(judged)
            if judged.found.kind == "wrong":
                print(f"WRONG: seed {judged.program.seed} on {text}: {judged.found.text[:900]}\n{small}", flush=True)
        print(f"mesh {text}:\n{tally}, {time.monotonic() - start:.0f} s", flush=True)
        wrong += tally.wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
