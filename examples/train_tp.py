"""Train a small Llama-style language model, tensor-parallel, and show that it computes what one process computes.

    python examples/train_tp.py                              4 processes on this machine's CPU
    python examples/train_tp.py --mesh 2,2                   2-way data parallel x 2-way tensor parallel
    python examples/train_tp.py --simulated                  the same ranks inside one process
    python examples/train_tp.py --compare                    also the same program on torch's own DTensor
    python examples/train_tp.py --fused-loss                 the last layer and the loss in one: logits are never made
    torchrun --nproc-per-node 4 examples/train_tp.py --device cuda

The text is what every Python carries: the topics of its built-in help, read as bytes. The model is trained
twice with the same seed on the same batches, over the ranks and in one process; the exit code is 1 when
the losses differ by more than rounding (see TOLERANCE).

To read: `shard` is the whole of what makes the model tensor-parallel; `train` is an ordinary loop.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llama import Llama, ModelConfig
from meter import Meter
from report import Progress, print_report

# The two runs add the same numbers in another order. In float32 that is a relative 1e-7 an op, which training
# enlarges a little: after 100 steps the losses are some 1e-6 to 1e-5 apart. In float64 the same runs agree to about
# 1e-15, which is how to tell rounding from a mistake: a wrong gradient is as wrong in any precision.
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}

# Where the names come from. The names are the same, so changing engines is changing imports.
ENGINES = {
    "ours": ("dtensor", "dtensor.parallel", "dtensor.loss"),
    "torch": ("torch.distributed.tensor", "torch.distributed.tensor.parallel", "torch.distributed.tensor.parallel"),
}


def engine(name: str) -> SimpleNamespace:
    """The names this program uses, of one engine."""
    core, parallel, loss = (import_module(module) for module in ENGINES[name])
    return SimpleNamespace(
        Shard=core.Shard,
        Replicate=core.Replicate,
        init_device_mesh=core.init_device_mesh,
        parallelize_module=parallel.parallelize_module,
        checks={"check_inputs": "first"} if name == "ours" else {},
        ColwiseParallel=parallel.ColwiseParallel,
        RowwiseParallel=parallel.RowwiseParallel,
        SequenceParallel=parallel.SequenceParallel,
        PrepareModuleInput=parallel.PrepareModuleInput,
        loss_parallel=loss.loss_parallel,
        linear_cross_entropy=getattr(loss, "linear_cross_entropy", None),
    )


def shard(model: Llama, tp: Any, e: SimpleNamespace) -> None:
    """Spread `model` over the 1-D mesh `tp`: its parameters become DTensors.

    Between the blocks the activations x[b, t, d] are sharded by position, so that the norms and the sums do
    each position once. Inside a block every rank sees all positions, for its own heads and its own part of
    the feed-forward block: the first projections are sharded by columns, the last by rows, and the sum over the
    rows goes back to sharded by position. The logits stay sharded by class.
    """
    by_position, whole = e.Shard(1), e.Replicate()
    plan = {
        "embedding": e.RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "norm": e.SequenceParallel(),
        "logits": e.ColwiseParallel(input_layouts=by_position, output_layouts=e.Shard(-1), use_local_output=False),
        "blocks.*.attention_norm": e.SequenceParallel(),
        "blocks.*.attention": e.PrepareModuleInput(
            input_layouts=(by_position, None), desired_input_layouts=(whole, None)
        ),
        "blocks.*.attention.wq": e.ColwiseParallel(),
        "blocks.*.attention.wk": e.ColwiseParallel(),
        "blocks.*.attention.wv": e.ColwiseParallel(),
        "blocks.*.attention.wo": e.RowwiseParallel(output_layouts=by_position),
        "blocks.*.feed_forward_norm": e.SequenceParallel(),
        "blocks.*.feed_forward": e.PrepareModuleInput(input_layouts=(by_position,), desired_input_layouts=(whole,)),
        "blocks.*.feed_forward.gate": e.ColwiseParallel(),
        "blocks.*.feed_forward.up": e.ColwiseParallel(),
        "blocks.*.feed_forward.down": e.RowwiseParallel(output_layouts=by_position),
    }
    # In the first step the ranks of a row compare what they were given: a batch of its own each would show in the loss
    # only, and not at once.
    e.parallelize_module(model, tp, plan, **e.checks)


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to know."""

    text: bytes
    mesh: tuple[int, int] = (1, 4)
    steps: int = 100
    batch: int = 8
    rate: float = 3e-3
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    sample: int = 120
    fused_loss: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def ranks(self) -> int:
        """Number of ranks: data-parallel times tensor-parallel."""
        return math.prod(self.mesh)


@dataclass
class Record:
    """What one rank saw of its run."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    parameter_bytes: int = 0
    peak_bytes: int = 0
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    sample: str = ""

    def tokens_per_second(self, tokens: int) -> float:
        """Speed of the median step, the first five left out."""
        return tokens / statistics.median(self.step_seconds[5:] or self.step_seconds)


def batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, next tokens), both [b, t]: the same sequence of batches for the same seed."""
    data = torch.frombuffer(bytearray(job.text), dtype=torch.uint8)
    length = job.model.positions
    generator = torch.Generator().manual_seed(job.seed)
    while True:
        starts = torch.randint(0, len(data) - length, (job.batch,), generator=generator).tolist()
        windows = torch.stack([data[start : start + length + 1] for start in starts]).long().to(job.device)
        yield windows[:, :-1], windows[:, 1:]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; a plain tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def average_over(group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
    """Replace every tensor by its mean over the group, with one all-reduce for them all."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(mean.view_as(tensor))


def train(job: Job, mesh: Any = None, e: SimpleNamespace | None = None, progress: Progress | None = None) -> Record:
    """One rank's run over `mesh` with axes dp and tp; without a mesh, the run in one process."""
    torch.manual_seed(job.seed)  # every rank makes the same model, then keeps its part
    model = Llama(job.model).to(job.device, getattr(torch, job.dtype))
    dp, rows, loss_context = None, slice(None), contextlib.nullcontext
    if mesh is not None and e is not None:
        shard(model, mesh["tp"], e)
        loss_context = e.loss_parallel
        if mesh.size(0) > 1:  # each position of the dp axis takes its rows of the batch
            dp = mesh["dp"].get_group()
            share, position = job.batch // mesh.size(0), mesh.get_local_rank("dp")
            rows = slice(position * share, (position + 1) * share)

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=job.rate, betas=(0.9, 0.95), weight_decay=0.1)

    # Only over ranks, and only where the engine has it: the run in one process is what it is compared with.
    fused = e.linear_cross_entropy if job.fused_loss and e is not None else None

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        if fused is not None:  # the last layer's logits are made and dropped piece by piece
            return fused(model.features(tokens), model.logits.weight, targets)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def step(tokens: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with loss_context():  # the softmax over classes that are spread over the ranks
            loss = loss_of(tokens[rows], targets[rows])
            loss.backward()
        value = full(loss.detach()).clone()
        if dp is not None:
            # The ranks of a dp group hold the same parts of the parameters, so the mean of their parts is
            # the part of the mean.
            average_over(dp, [local(p.grad) for p in parameters] + [value])
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return value.item()

    record = Record(parameter_bytes=sum(local(p.detach()).nbytes for p in parameters))
    for i, (tokens, targets) in zip(range(job.steps), batches(job)):
        warm, cool = (i + 1) / 10, (job.steps - i) / job.steps
        optimizer.param_groups[0]["lr"] = job.rate * min(1.0, warm, 0.1 + cool)
        began = time.perf_counter()
        record.losses.append(step(tokens, targets))
        record.step_seconds.append(time.perf_counter() - began)
        if progress is not None:
            progress.show(i + 1, record.losses[-1])

    record.sample = generate(model, job)
    with measured(record, parameters, optimizer):
        step(*next(batches(job)))
    return record


@contextlib.contextmanager
def measured(record: Record, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Fill in `record` what the training step inside the `with` moves and holds."""
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    with Meter(local(t.detach()) for t in [*parameters, *states]) as meter, simulated_traffic(meter):
        yield
    record.traffic, record.peak_bytes = meter.traffic, meter.peak


@contextlib.contextmanager
def simulated_traffic(meter: Meter) -> Iterator[None]:
    """Simulated ranks exchange tensors through memory, so their collectives are reported, not dispatched."""
    if "dtensor" not in sys.modules:
        yield
        return
    from dtensor.comm.observers import observers

    observers.append(meter.received)
    try:
        yield
    finally:
        observers.remove(meter.received)


@torch.no_grad()
def generate(model: Llama, job: Job) -> str:
    """Some text after a prompt. Every rank draws the same bytes, as all have the same logits and seed."""
    length, generator = job.model.positions, torch.Generator().manual_seed(job.seed)
    text = list(b"The ")
    for _ in range(job.sample):
        window = text[-length:]
        tokens = torch.tensor(window + [0] * (length - len(window)), device=job.device)  # later positions are not seen
        logits = full(model(tokens[None]))[0, len(window) - 1]
        chances = torch.softmax(logits.double().cpu() / 0.7, -1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode("utf-8", "replace")


def run_rank(job: Job, engine_name: str) -> Record:
    """One rank of the distributed run, in a process or simulated: everything below here is per rank."""
    e = engine(engine_name)
    mesh = e.init_device_mesh(job.device, job.mesh, mesh_dim_names=("dp", "tp"))
    leads = mesh.get_coordinate() == [0, 0] or mesh.get_coordinate() == (0, 0)
    return train(job, mesh, e, Progress(f"{job.ranks} ranks, {engine_name}", job.steps) if leads else None)


def process(rank: int, job: Job, engine_name: str, rendezvous: str, results: Any) -> None:
    """Body of one of the processes that `in_processes` starts."""
    torch.set_num_threads(1)  # as the run in one process: a rank is one thread
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=job.ranks, timeout=timedelta(minutes=5)
    )
    results.put((rank, asdict(run_rank(job, engine_name))))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(job: Job, engine_name: str) -> list[Record]:
    """Every rank in a process of its own on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(process, (job, engine_name, f"{folder}/rendezvous", results), nprocs=job.ranks)
        found = dict(results.get() for _ in range(job.ranks))
    return [Record(**found[rank]) for rank in range(job.ranks)]


def simulated(job: Job) -> list[Record]:
    """Every rank a thread of this process."""
    import dtensor

    return list(dtensor.simulate(job.ranks)(run_rank, job, "ours"))


def under_torchrun(job: Job, engine_name: str) -> list[Record]:
    """This process is one rank of many; every one gets all the records."""
    records: list[Any] = [None] * job.ranks
    dist.all_gather_object(records, run_rank(job, engine_name))
    return records


def read_text(path: str | None) -> bytes:
    """The file's bytes, or the topics of Python's built-in help."""
    if path is not None:
        return Path(path).read_bytes()
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def parse(argv: list[str]) -> tuple[argparse.Namespace, Job]:
    """The command line, with every mistake that can be told before a rank starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of ranks (default 4, under torchrun its own)")
    parser.add_argument("--mesh", help="data-parallel and tensor-parallel ranks, e.g. 2,2 (default 1,RANKS)")
    parser.add_argument("--simulated", action="store_true", help="ranks as threads of this process")
    parser.add_argument("--compare", action="store_true", help="run torch's own DTensor as well")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs torchrun")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=120, help="bytes of text to generate")
    parser.add_argument("--fused-loss", action="store_true", help="over ranks, the last layer and the loss in one")
    parser.add_argument("--text", metavar="FILE", help="train on this file (default: Python's help topics)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(argv)

    launched = int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else None
    try:
        mesh = tuple(int(n) for n in options.mesh.split(",")) if options.mesh else None
    except ValueError:
        parser.error(f"--mesh {options.mesh}: two numbers are needed, DP,TP, e.g. --mesh 2,2")
    ranks = options.ranks or launched or (math.prod(mesh) if mesh else 4)
    dp, tp = mesh if mesh and len(mesh) == 2 else (1, ranks)
    model = ModelConfig()
    if mesh and len(mesh) != 2:
        parser.error(f"--mesh {options.mesh}: two numbers are needed, DP,TP, e.g. --mesh 2,2")
    if min(dp, tp, ranks, options.steps, options.batch) < 1 or options.sample < 0:
        parser.error("--ranks, --mesh, --steps and --batch take positive numbers, --sample zero or more")
    if dp * tp != ranks:
        parser.error(f"--mesh {dp},{tp} has {dp * tp} ranks, but there are {ranks}")
    if launched not in (None, ranks):
        parser.error(f"--ranks {ranks}: torchrun started {launched}")
    for what, number in (("heads", model.heads), ("key and value heads", model.kv_heads)):
        if number % tp:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if model.heads % n == model.kv_heads % n == 0)
            parser.error(f"{tp} tensor-parallel ranks cannot share {number} {what} evenly; possible are {fitting}")
    if options.batch % dp:
        parser.error(f"--batch {options.batch} cannot be dealt evenly to {dp} data-parallel ranks")
    if options.device == "cuda" and launched is None:
        parser.error(f"--device cuda: start it as torchrun --nproc-per-node {ranks} {sys.argv[0]} --device cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.simulated and launched is not None:
        parser.error("--simulated starts its own ranks: run it without torchrun")
    try:
        text = read_text(options.text)
    except OSError as error:
        parser.error(f"--text {options.text}: {error.strerror}")
    if len(text) <= model.positions:
        parser.error(f"--text {options.text}: {len(text)} bytes, more than {model.positions} are needed")

    return options, Job(
        text=text,
        mesh=(dp, tp),
        steps=options.steps,
        batch=options.batch,
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        sample=options.sample,
        fused_loss=options.fused_loss,
        model=model,
    )


def main(argv: list[str]) -> int:
    """Run, report, and say by the exit code whether the two runs agree."""
    options, job = parse(argv)
    launched = "LOCAL_RANK" in os.environ
    leads = not launched or os.environ["RANK"] == "0"
    if launched:
        if job.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        else:
            dist.init_process_group("gloo")

    torch.set_num_threads(1)
    run = under_torchrun if launched else in_processes
    sharded = simulated(job) if options.simulated else run(job, "ours")
    other = run(job, "torch") if options.compare else None

    agree = True
    if leads:
        single = train(job, progress=Progress("one process", job.steps))
        tolerance = TOLERANCE[job.dtype]
        agree = print_report(job, sharded, single, other, tolerance)
        if options.json:
            runs = {"sharded": sharded, "torch": other or [], "single": [single]}
            figures = {name: [asdict(record) for record in records] for name, records in runs.items()}
            facts = {"torch": torch.__version__, "cores": os.cpu_count(), "mesh": job.mesh, "tolerance": tolerance}
            Path(options.json).write_text(json.dumps({**facts, "agree": agree, **figures}, indent=1))
    if launched:
        dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
