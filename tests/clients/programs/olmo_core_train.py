"""OLMo-core's train module: an OLMo2 with norms of queries and keys, over tensor parallelism, FSDP2, replicas and both.

The train module is driven as its trainer does it. What it records is kept by a stand-in for the trainer.
"""

import olmo_core.distributed.parallel
import torch
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, SkipStepAdamWConfig
from olmo_core.train.train_module import transformer as train
from record import Program

VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 8, 3
program = Program()


class Trainer:
    """What the train module asks of its trainer."""

    def __init__(self):
        self.recorded = {}

    def record_metric(self, name, value, reduce_type=None, namespace=None, **_):
        self.recorded[name] = (torch.as_tensor(value, dtype=torch.float32), reduce_type)

    def record_ce_loss(self, value, reduce_type=None):
        self.record_metric("CE loss", value, reduce_type)


def parts(program, degree):
    """Mine of the rows: with `degree` ranks to a layer, the ranks of one layer have the same."""
    count = program.world // degree
    return slice(program.rank // degree * ROWS // count, (program.rank // degree + 1) * ROWS // count)


def trained(tp=1, kind=None, replicas=None, optim=AdamWConfig, micro=1, checkpointed=False, **options):
    """Losses, norms and weights of some steps."""
    torch.manual_seed(0)
    tp = tp if program.parallel else 1
    olmo_core.distributed.parallel._WORLD_MESH = None  # one mesh a process, else
    module = train.TransformerTrainModule(
        model=TransformerConfig.olmo2_1M(VOCABULARY, n_layers=2, **options).build(init_device="cpu"),
        optim=optim(lr=3e-4),
        rank_microbatch_size=ROWS // (program.world // tp) // micro * LENGTH,
        max_sequence_length=LENGTH,
        dp_config=train.TransformerDataParallelConfig(
            name=kind or DataParallelType.fsdp,
            param_dtype=None,
            reduce_dtype=DType.float32,
            num_replicas=replicas,
        )
        if program.parallel
        else None,
        tp_config=train.TransformerTensorParallelConfig(degree=tp) if tp > 1 else None,
        ac_config=train.TransformerActivationCheckpointingConfig() if checkpointed else None,
        z_loss_multiplier=1e-3,
        max_grad_norm=1.0,
        device=torch.device("cpu"),
    )
    trainer = Trainer()
    module._trainer = trainer
    generator = torch.Generator().manual_seed(1)
    values = {}
    for step in range(STEPS):
        rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)[parts(program, tp)]
        module.zero_grads()
        module.train_batch({"input_ids": rows})
        module.optim_step()
        for name in ("CE loss", "Z loss", "total grad norm"):
            value, kind_of_mean = trainer.recorded[name]
            if kind_of_mean is not None and dist.is_initialized():
                dist.all_reduce(value)
                value = value / program.world
            values[f"{name} {step}"] = value
    return values | {f"weight {name}": p for name, p in module.model.named_parameters()}


program.add("tp", lambda: trained(tp=program.world))
program.add("fsdp", lambda: trained())
program.add("hsdp", lambda: trained(kind=DataParallelType.hsdp, replicas=2))
program.add("fsdp_tp", lambda: trained(tp=2))
program.add("accumulated", lambda: trained(tp=2, micro=2))
program.add("checkpointed", lambda: trained(tp=2, checkpointed=True))
program.add("skip_step", lambda: trained(tp=2, optim=SkipStepAdamWConfig))

if __name__ == "__main__":
    program.main()
