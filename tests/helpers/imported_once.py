"""What every process of a test needs, imported once by the server that they are forked from."""

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed

import dtensor.loss
import dtensor.parallel
import dtensor.swap  # noqa: F401
from dtensor.rules import registry
from helpers import laws  # noqa: F401

torch.set_num_threads(1)
registry.load()
