"""Matrix products: the contracted dim is missing in the output, so sharding it leaves a pending sum."""

from dtensor.registry import pattern, register

register("aten.mm", pattern("m k, k n -> m n", linear="0|1"))
