"""The rules of the operators with the device's own kernels: the laws, on simulated ranks and on real ones."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator

import torch
from environment import Environment, Skip, close, placed, swapped
from helpers import laws

from dtensor import DTensor, Placement, init_device_mesh

FAMILIES = ("pointwise", "matmul", "reduce", "norm", "embedding", "attention", "view", "nn")


def _samples(env: Environment) -> Iterator[laws.Sample]:
    for family in FAMILIES:
        found = importlib.import_module(f"helpers.samples.{family}")
        samples = getattr(found, "SAMPLES", None) or [
            s for value in vars(found).values() if isinstance(value, list) for s in value if isinstance(s, laws.Sample)
        ]
        for sample in samples[:: 40 if env.quick else 3]:
            yield dataclasses.replace(sample, tensors=[t.to(env.device) for t in sample.tensors], atol=1e-3)


def _can(sample: laws.Sample) -> bool:
    """False for samples that make tensors of their own on the CPU, and for ops that the device has not."""
    try:
        sample.fn(*[t.clone() for t in sample.tensors])
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def case_laws(env: Environment) -> None:
    """Forward and backward of every sample in many layouts, on four simulated ranks that share this device."""
    if env.world > 1:
        raise Skip("it is run in the world of one")
    cotangent = laws._cotangent
    on = lambda device, *a, **k: init_device_mesh(env.device.type, *a, **k)  # noqa: E731
    near = lambda t, i: cotangent(t.cpu(), i).to(t.device)  # noqa: E731
    left, wrong = [], []
    with swapped(laws, init_device_mesh=on, _cotangent=near):
        for sample in _samples(env):
            if not _can(sample):
                left.append(sample.name)
                continue
            report = laws.check_layouts(sample, (4,), limit=3 if env.quick else 5)
            wrong += report.wrong and [f"{report.name}: {report.wrong[0]}"]
    print(f"    left out, as they make tensors on the CPU: {len(left)}: {', '.join(left[:12])}", flush=True)
    assert not wrong, "\n".join(wrong)


def case_real_ranks(env: Environment) -> None:
    """A few samples of each family on real ranks, inputs in random layouts, against the plain op on this device."""
    for mesh in env.meshes():
        for at, sample in enumerate(_samples(env)):
            if at % (6 if env.quick else 8) or sample.inplace or not _can(sample):
                continue
            want, grads = laws._reference(dataclasses.replace(sample, grads=False))
            assert not any(g is not None for g in grads)
            options = [laws.layouts_of(t, mesh.ndim, ()) for t in sample.tensors]
            cases: list[tuple[tuple[Placement, ...], ...]] = list(itertools.product(*options))
            for case in cases[:: max(1, len(cases) // 3)][:3]:
                ins = [placed(t, mesh, p) for t, p in zip(sample.tensors, case)]
                try:
                    outs = laws.flat(sample.fn(*ins))
                except (*laws.REFUSALS, TypeError):
                    if sample.may_refuse:
                        continue
                    raise
                for got, ref in zip(outs, want, strict=True):
                    whole = got.full_tensor() if isinstance(got, DTensor) else got
                    if sample.name not in ("empty", "empty_like"):
                        close(whole, ref, 1e-3, 1e-3, (sample.name, case))
    if env.cuda:
        torch.cuda.synchronize()
