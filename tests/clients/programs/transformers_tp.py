"""transformers: `from_pretrained(..., tp_plan="auto")` of tiny checkpoints, as a user calls it.

For each model: logits, greedy generation, the loss, every gradient, three steps of AdamW with clipping, and what
`save_pretrained` writes, read again without a plan. On one process the same without a plan.
"""

import torch
from record import Program
from tiny_models import CONFIGS, SCRATCH, barrier, checkpoint, loaded, tokens_of, trained

program = Program()


def everything(name):
    """What is recorded of one model."""
    folder = checkpoint(name)
    model = loaded(folder, tp_plan="auto").eval()
    tokens = tokens_of(model.config)
    values = {}
    with torch.no_grad():
        values["logits"] = model(input_ids=tokens).logits
        values["generated"] = model.generate(tokens[:, :4], max_new_tokens=6, do_sample=False)
    model.train()
    values["logits in training"] = model(input_ids=tokens).logits
    values |= trained(model, tokens)
    model.save_pretrained(SCRATCH / f"{name}-saved")
    barrier()
    again = loaded(SCRATCH / f"{name}-saved")
    with torch.no_grad():
        values["logits again"] = again(input_ids=tokens).logits
    return values | {f"saved {key}": x for key, x in again.state_dict().items()}


for name in CONFIGS:
    program.add(name, lambda name=name: everything(name))

if __name__ == "__main__":
    program.main()
