"""What reaches for a tensor's memory gets this rank's part, the whole, or an error: never the wrapper's."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, simulate

WHOLE = torch.arange(10.0).view(5, 2)
LAYOUTS: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()], [Partial("max")]]

REFUSED: dict[str, Callable[[Any], object]] = {
    "torch.from_dlpack": torch.from_dlpack,
    "torch.from_dlpack of a copy": lambda d: torch.from_dlpack(d, copy=True),
    "numpy.from_dlpack": np.from_dlpack,
    "to_dlpack": lambda d: torch.to_dlpack(d),  # looked up when called: these are replaced
    "utils.dlpack.to_dlpack": lambda d: torch.utils.dlpack.to_dlpack(d),
    "torch's own __dlpack__": lambda d: torch.Tensor.__dlpack__(d),
    "__dlpack__": lambda d: d.__dlpack__(),
    "__dlpack_device__": lambda d: d.__dlpack_device__(),
    "numpy without a copy": lambda d: np.asarray(d, copy=False),
    "a buffer": memoryview,
    "torch.frombuffer": lambda d: torch.frombuffer(d, dtype=torch.float32),
    "map2_": lambda d: d.map2_(d, d, lambda a, b, c: a),
}

PART: dict[str, Callable[[Any], int]] = {
    "data_ptr": lambda d: d.data_ptr(),
    "const_data_ptr": lambda d: d.const_data_ptr(),
    "untyped_storage": lambda d: d.untyped_storage().data_ptr(),
    "storage": lambda d: d.storage().data_ptr(),
    "_typed_storage": lambda d: d._typed_storage()._data_ptr(),
}

WHOLES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda d: d.numpy(),
    "asarray": np.asarray,
    "array, copied": lambda d: np.array(d, copy=True),
    "array of another dtype": lambda d: np.asarray(d, dtype=np.float64),
    "tolist": lambda d: d.tolist(),
    "torch.asarray": lambda d: torch.asarray(d).full_tensor(),
    "torch.as_tensor": lambda d: torch.as_tensor(d).full_tensor(),
    "share_memory_": lambda d: d.share_memory_().full_tensor(),
    "pickle": lambda d: pickle.loads(pickle.dumps(d)).full_tensor(),
}


def _views(placed: list[Placement]) -> dict[str, Callable[[], DTensor]]:
    """Tensors of `WHOLE`'s values, made in ways after which a part lies elsewhere or is not there yet."""
    mesh = init_device_mesh("cpu", (2,))
    held: list[Placement] = [Shard(0) if isinstance(placed[0], Partial) else placed[0]]

    def whole() -> DTensor:
        if held == placed:
            return distribute_tensor(WHOLE, mesh, held)
        return DTensor.from_local(WHOLE.clone(), mesh, placed, run_check=False)

    def a_view_whose_base_was_written() -> DTensor:
        base = whole() - 1
        view = base.view(2, 5).view(5, 2)  # parts move
        base.add_(1)
        return view

    return {
        "as it is": whole,
        "asynchronous": lambda: whole().redistribute(placements=[Replicate()], async_op=True),
        "a view": a_view_whose_base_was_written,
    }


@pytest.mark.parametrize("placed", LAYOUTS, ids=str)
def test_memory_is_the_parts_or_refused(placed: list[Placement]) -> None:
    def run() -> int:
        for way, make in _views(placed).items():
            for name, door in REFUSED.items():
                with pytest.raises((BufferError, TypeError, ValueError, RuntimeError)) as seen:
                    door(make())
                assert not isinstance(seen.value, AssertionError), f"{way}, {name}"
            for name, address in PART.items():
                x = make()
                at, local = address(x), x.to_local()
                assert at == (local.wait() if hasattr(local, "wait") else local).data_ptr() != 0, f"{way}, {name}"
            for name, read in WHOLES.items():
                got = torch.as_tensor(read(make())).float()
                assert torch.equal(got, WHOLE), f"{way}, {name}"
        return 1

    assert simulate(2)(run) == [1, 1]


def test_an_address_leads_to_the_part() -> None:
    def run() -> None:
        d = distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
        local, n = d.to_local(), d.to_local().numel()
        assert list((ctypes.c_float * n).from_address(d.data_ptr())) == local.flatten().tolist()
        assert d.untyped_storage().nbytes() == local.untyped_storage().nbytes()
        assert torch.equal(torch.zeros(0).set_(d.untyped_storage())[:n], local.flatten())

    simulate(2)(run)


def test_on_an_accelerator_there_is_no_array_interface() -> None:
    def run() -> None:
        d = distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(AttributeError, match=r"part\n.*f32\[5@0,2\]\n.*full_tensor"):
            d.__cuda_array_interface__  # noqa: B018
        assert type(d).__dlpack_c_exchange_api__ is None

    simulate(2)(run)


def test_plain_tensors_are_exported_as_ever() -> None:
    t = torch.arange(3.0)
    old, new = torch.utils.dlpack.to_dlpack(t), t.__dlpack__(max_version=(1, 0))
    for capsule in (torch.to_dlpack(t), old, t.__dlpack__(), new):
        assert torch.from_dlpack(capsule).data_ptr() == t.data_ptr()
    assert np.from_dlpack(t).tolist() == t.tolist()
