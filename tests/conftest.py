"""What every test shares: one thread, a seed, and no process group left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several processes share few cores

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes come first: xdist gives them to one worker, so that few processes share the cores."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """The same random numbers whatever ran before; a process group that a test made ends with it."""
    torch.manual_seed(0)
    had_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
