"""Every registered rule is held to the laws: some sample reaches it, or another test does, or no CPU kernel exists."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers.laws import HELD, Sample, _run_once, all_samples, check_layouts, check_strategies, in_turn, named
from helpers.samples import rest as samples_rest

import dtensor
from dtensor import tensor as tensor_module
from dtensor.rules.registry import entries, lookup

ELSEWHERE = {
    r"_foreach_": "rules/test_rules_lists.py",
    r"(bernoulli|binomial|cauchy|exponential|geometric|log_normal|multinomial)": "dispatch/test_random.py",
    r"(normal|poisson|rand|random|uniform)": "dispatch/test_random.py",
    r"(_fused_dropout|native_dropout|_sample_dirichlet|_standard_gamma|rrelu_with_noise$)": "dispatch/test_random.py",
    r"(nll_loss|_log_softmax)": "loss/test_loss_rules.py",
    r"_scaled_dot_product_(flash_attention(_backward)?$|efficient|cudnn|fused)": "kernels of accelerators only",
    r"(_scaled_mm|_fused_rms_norm|_fused_rms_norm_backward)$": "kernels of accelerators only",
    r"_thnn_fused_(gru|lstm)_cell$": "kernels of accelerators only",
    r"(_stack|_index_put_impl)$": "torch calls it from stack, from index_put's gradient, on accelerators",
}


def test_every_rule_is_reached(monkeypatch) -> None:
    seen: set[str] = set()
    plain = tensor_module._run

    def run(func, args, kwargs):
        entry = lookup(func)
        if entry is not None:
            seen.add(entry.name)
        return plain(func, args, kwargs)

    monkeypatch.setattr(tensor_module, "_run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in all_samples():
            dtensor.simulate(1)(_run_once, sample, (1,))
    # other tests register rules of their own operators, and another torch may not have all ops
    ours = [n for n in entries() if n.startswith("aten.") and hasattr(torch.ops.aten, n.split(".")[1])]
    missing = [n for n in ours if n not in seen and not any(re.match(rf"aten\.{p}", n) for p in ELSEWHERE)]
    assert not missing, f"no sample reaches {missing}"
    for reason in ELSEWHERE.values():
        assert not reason.endswith(".py") or (Path(__file__).resolve().parents[1] / reason).exists()


@pytest.mark.parametrize(("sample", "mesh"), in_turn([*samples_rest.SAMPLES, *samples_rest.INFERENCE]), ids=named)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize(
    "sample", [s for s in samples_rest.SAMPLES if s.name not in samples_rest.NO_STRATEGIES], ids=lambda s: s.name
)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=20, held=HELD).must_hold()
