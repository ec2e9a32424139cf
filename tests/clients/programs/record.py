"""What every program here shares: its cases are functions, and what they give back is kept for comparison.

    program = Program()

    @program.case
    def llama():
        ...
        return {"logits": tensor, "loss": number}

    if __name__ == "__main__":
        program.main()

A program is a script for torch's names alone. It knows neither this engine nor how it is started: on one process, under
torchrun, or under torchrun with `-m dtensor.swap`. Called as `script.py FILE [CASE ...]`, rank 0 writes to FILE what
`torch.save` makes of `{"engine": module of the DTensor class, "cases": {name: values or the text of its error}}`.

Every rank gives back the same values, those of the whole batch: that they do is checked here, per case.
"""

import datetime
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

Values = dict[str, torch.Tensor]


def whole(x):
    """A detached plain tensor of all of `x`; numbers become 0-d tensors."""
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().clone()


def digest(values):
    """What ranks compare: shapes and norms."""
    return {name: (tuple(x.shape), x.double().norm().item()) for name, x in values.items()}


def close(a, b):
    """Whether two digests are of the same values."""
    return a.keys() == b.keys() and all(
        a[k][0] == b[k][0] and abs(a[k][1] - b[k][1]) <= 1e-6 + 1e-5 * abs(b[k][1]) for k in a
    )


class Program:
    """The cases of one script."""

    def __init__(self) -> None:
        self.cases: dict[str, Callable] = {}
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))

    @property
    def parallel(self) -> bool:
        """Whether it was started on several ranks."""
        return "WORLD_SIZE" in os.environ

    def case(self, function):
        """Add a case under its function's name."""
        self.add(function.__name__, function)
        return function

    def add(self, name, function):
        """Add a case under a name."""
        self.cases[name] = function

    def main(self, group=True):
        """Run the cases named on the command line, or all; `group`: make the process group here."""
        torch.set_num_threads(1)
        file, chosen = sys.argv[1], sys.argv[2:] or list(self.cases)
        if group and self.parallel:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        results = {}
        for name in chosen:
            torch.manual_seed(0)
            try:
                values = {key: whole(x) for key, x in self.cases[name]().items()}
                results[name] = self.agreed(values)
            except BaseException as error:  # torch's CheckpointException is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                results[name] = traceback.format_exc()
                if self.rank == 0:
                    print(name, results[name], sep="\n", file=sys.stderr, flush=True)
                    self.write(file, results)
            if self.rank == 0:
                print("ran", name, flush=True)
        if self.rank == 0:
            self.write(file, results)
        if dist.is_initialized():
            dist.destroy_process_group()

    def agreed(self, values):
        """`values`, or an error where the ranks do not have the same."""
        if not dist.is_initialized():
            return values
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest(values))
        differ = [rank for rank, d in enumerate(digests) if not close(d, digests[0])]
        if differ:
            raise ValueError(f"ranks {differ} have other values than rank 0: {digests[differ[0]]} and {digests[0]}")
        return values

    def write(self, file, results):
        """Write all that is known; a crash later loses nothing."""
        from torch.distributed.tensor import DTensor

        torch.save({"engine": DTensor.__module__, "cases": results}, file)
