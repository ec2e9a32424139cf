"""Shapes of results that are known without torch are those that torch tells."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from dtensor import DTensor, Replicate, init_device_mesh, simulate
from dtensor.dispatch import metadata
from dtensor.dispatch.metadata import _LIKE_FIRST, _LIKE_FIRSTS, known_metas, output_metas

SHAPES = ((4, 6), (), (0, 3), (5, 1, 2), (1,))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64)


def slowly(func: Any, args: Any, kwargs: Any) -> Any:
    with mock.patch.object(metadata, "known_metas", lambda *_: None):
        try:
            return output_metas(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as e:
            return type(e)


def overload(name: str) -> Any:
    packet, kind = name.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, packet), kind)


def calls(name: str, make: Any) -> list[tuple[Any, ...]]:
    """Argument lists for an op, good ones and bad ones."""
    params = overload(name)._schema.arguments
    out = []
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = make(shape, dtype)
        others = [
            x,
            make(shape, torch.float32),
            make((), dtype),
            make((6,), dtype),
            make((1, 6), dtype),
            2,
            1.5,
            2j,
            True,
        ]
        if "foreach" in name:
            lists = [[x, make((3,), dtype)]]
            second = [2.0, 1, 2j] if name.endswith("Scalar") else [[x, make((3,), dtype)], [x], [x, x]]
            out += [(lists[0],)] if len(params) == 1 else [(lists[0], s) for s in second]
        elif len(params) == 1 or params[1].kwarg_only:
            out.append((x,))
        elif name.endswith("threshold_backward.default"):
            out += [(x, o, 0.5) for o in others[:4]]
        else:
            out += [(x, o) for o in (others if name.endswith("Tensor") else others[:4])]
        if len(shape) > 1:
            out.append((x.t() if len(shape) == 2 else x.permute(2, 0, 1), *out[-1][1:]))
    return out


@pytest.mark.parametrize("name", sorted(_LIKE_FIRST | _LIKE_FIRSTS))
def test_what_is_known_is_what_torch_tells(name: str) -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (1,))
        make = lambda shape, dtype: DTensor.from_local(torch.ones(shape, dtype=dtype), mesh, [Replicate()])  # noqa: E731
        used = 0
        for args in calls(name, make):
            known = known_metas(name, args, {})
            if known is not None:
                used += 1
                assert known == slowly(overload(name), args, {}), args
        assert used

    simulate(1)(f)


def test_layer_norm() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (1,))
        make = lambda shape, dtype=torch.float32: DTensor.from_local(  # noqa: E731
            torch.ones(shape, dtype=dtype), mesh, [Replicate()]
        )
        used, func = 0, torch.ops.aten.native_layer_norm.default
        for dtype, shape, normal in itertools.product(
            DTYPES[:3], ((4, 6), (2, 4, 6), (0, 6), (6,), (2, 1, 6)), ([6], [4, 6], [5])
        ):
            for weight in (None, make(normal, dtype), make((7,), dtype)):
                args = (make(shape, dtype), normal, weight, weight, 1e-5)
                known = known_metas("aten.native_layer_norm.default", args, {})
                if known is not None:
                    used += 1
                    assert known == slowly(func, args, {}), args
        assert used > 10

    simulate(1)(f)
