"""How much memory does a redistribution allocate? KiB on the rank that allocates most, both engines, 4 gloo processes.

Counted are the tensors that exist at one time, the result included and the input left out, as torch's dispatcher sees
them made and the allocator sees them freed; the least of several calls, as gloo's thread lets go of buffers late.
Input and output together are what a redistribution may need. The tensor is 768 KiB, and one of uneven shards.

What gloo allocates by itself no dispatcher sees. So a tensor of 8 MiB is measured as the system does (Linux): by how
much the memory of the process rises above what it was before the call.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
import weakref
from typing import Any

import redistribute_gloo as gloo
import side_by_side as bench
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES = {"even": (1024, 192), "uneven": (1001, 187), "resident": (2048, 1024)}
RANKS, CALLS = 4, 6


class Peak(TorchDispatchMode):
    """`most`: the most bytes that storages made inside hold at one time. Wrapper classes are left to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if type(t) is torch.Tensor and t.untyped_storage() not in self.known:
                storage = t.untyped_storage()
                self.known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out


def allocated(x: Any, target: Any) -> int:
    """Bytes that `x.redistribute` allocates at one time."""
    found = []
    for _ in range(CALLS):
        with Peak() as peak:
            peak.known.add(x.to_local().untyped_storage())
            x.redistribute(placements=target).to_local()
        found.append(peak.most)
    return min(found)


def resident(x: Any, target: Any) -> int:
    """Bytes by which the memory of this process rises during `x.redistribute`, at most."""

    def read(name: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

    found = []
    for _ in range(CALLS):
        dist.barrier()
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak so far is forgotten
        before = read("VmRSS")
        x.redistribute(placements=target).to_local()
        found.append(read("VmHWM") - before)
    return min(found)


def worker(rank: int, store: str, out: Any) -> None:
    """One rank: measure all pairs, rank 0 reports."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rows = []
    for kind, shape in SHAPES.items():
        for src, dst in gloo.PAIRS:
            row: list[int] = []
            for name in bench.ENGINES:
                e = bench.engine(name)
                mesh = e.init_device_mesh("cpu", (RANKS,) if "," not in src else (2, RANKS // 2))
                lay = lambda text, e=e: gloo.placements(e, text)  # noqa: E731
                whole = e.DTensor.from_local(torch.ones(shape), mesh, lay("R" if "," not in src else "R,R"))
                cut = whole.redistribute(placements=lay(src.replace("P", "R"))).to_local().clone()
                x = e.DTensor.from_local(cut, mesh, lay(src), shape=torch.Size(shape), stride=(shape[1], 1))
                y = x.redistribute(placements=lay(dst)).to_local()
                sizes = (x.to_local().nbytes + y.nbytes,) if not row else ()
                row += [*sizes, (resident if kind == "resident" else allocated)(x, lay(dst))]
            most = torch.tensor(row)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            rows.append([kind, f"{src} -> {dst}", *most.tolist()])
    if rank == 0:
        out.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print one table."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # memory that is given back is the system's again
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=worker, args=(r, store, out)) for r in range(RANKS)]
        for p in processes:
            p.start()
        rows = out.get(timeout=600)
        for p in processes:
            p.join()
    head = ["shards", "layouts", "input and output", *bench.ENGINES, "ours / input and output", "ours / torch"]
    body = [
        [kind, pair, *(f"{n / 1024:.0f}" for n in (both, theirs, own)), f"{own / both:.2f}", f"{own / theirs:.2f}"]
        for kind, pair, both, theirs, own in rows
    ]
    print("Memory of a redistribution, KiB\n")
    print(bench.markdown(head, body))
    within = {name: sum(row[i] <= 1.03 * row[2] for row in rows) for i, name in ((3, "torch"), (4, "ours"))}
    print(f"\nWithin input and output: torch {within['torch']}, ours {within['ours']} of {len(rows)}.")


if __name__ == "__main__":
    main()
