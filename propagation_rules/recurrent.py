"""Cells of recurrent networks: the batch is free.

The gates of a cell lie side by side in one dim, so that dim is whole. Where no accelerator fuses them, torch takes
cells and layers apart into matmul, chunk and pointwise ops, which have rules of their own.
"""

from __future__ import annotations

from dtensor.rules.registry import pattern, register

register("aten._thnn_fused_lstm_cell", pattern("n [g], n [g], n [h], [g], [g] -> n [h], n [h], n [w]"))
register("aten._thnn_fused_gru_cell", pattern("n [g], n [g], n [h], [g], [g] -> n [h], n [w]"))
