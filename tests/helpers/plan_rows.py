"""What each style sends, forward and backward, over 4 ranks with x = f32[2,8,16] and the sum of the local output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtensor import Partial, Placement, Replicate, Shard
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)  # fmt: skip
from helpers.modules import MLP, Attention, Block

R, P, S, C, W = Replicate(), Partial(), Shard, ColwiseParallel, RowwiseParallel


def linear() -> nn.Module:
    return nn.Linear(16, 16)


def embedding() -> nn.Module:
    return nn.Embedding(32, 16)


def move(a: Placement, b: Placement, out: bool) -> Any:
    if out:
        return PrepareModuleOutput(output_layouts=a, desired_output_layouts=b)
    return PrepareModuleInput(input_layouts=a, desired_input_layouts=b)


@dataclass
class Row:
    """`init`, `forward`, `backward` count collectives as "scatter 2, all_reduce 1"; `x` is the dim x is sharded on."""

    make: Callable[[], nn.Module]
    plan: Any
    x: int | None
    init: str
    forward: str
    out: tuple[int, ...]
    backward: str
    grads: tuple[Placement | None, ...]


WHOLE, SEQ, CUT = (2, 8, 16), (2, 2, 16), (2, 8, 4)
SS, SR = (S(0), S(0)), (S(1), R)
ROWS: dict[str, Row] = {
    "Colwise": Row(linear, C(), None, "scatter 2", "", CUT, "all_reduce 1", SS),
    "Colwise input S1": Row(linear, C(input_layouts=S(1)), 1, "scatter 2", "all_gather 1", CUT, "reduce_scatter 1", SS),
    "Colwise output R": Row(linear, C(output_layouts=R), None, "scatter 2", "all_gather 1", WHOLE, "all_reduce 1", SS),
    "Colwise output S1": Row(
        linear, C(output_layouts=S(1)), None, "scatter 2", "all_to_all 1", SEQ, "all_reduce 1, all_to_all 1", SS),
    "Rowwise": Row(linear, W(), 2, "broadcast 1, scatter 1", "all_reduce 1", WHOLE, "", SR),
    "Rowwise output S1": Row(
        linear, W(output_layouts=S(1)), 2, "broadcast 1, scatter 1", "reduce_scatter 1", SEQ, "all_gather 1", SR),
    "Rowwise input R": Row(
        linear, W(input_layouts=R), None, "broadcast 1, scatter 1", "all_reduce 1", WHOLE, "all_gather 1", SR),
    "Rowwise input S1": Row(
        linear, W(input_layouts=S(1)), 1, "broadcast 1, scatter 1", "all_reduce 1, all_to_all 1", WHOLE,
        "all_to_all 1", SR),
    "MLP": Row(MLP, {"a": C(), "b": W()}, None, "broadcast 1, scatter 3", "all_reduce 1", WHOLE, "all_reduce 1",
               (*SS, *SR)),
    "MLP of a sequence": Row(
        MLP, {"a": C(input_layouts=S(1)), "b": W(output_layouts=S(1))}, 1, "broadcast 1, scatter 3",
        "all_gather 1, reduce_scatter 1", SEQ, "all_gather 1, reduce_scatter 1", (*SS, *SR)),
    "attention": Row(
        Attention, {"[qkv]": C(), "o": W()}, None, "broadcast 1, scatter 7", "all_reduce 1", WHOLE, "all_reduce 1",
        (*SS, *SS, *SS, *SR)),
    "block": Row(
        Block, {"att.[qkv]": C(), "att.o": W(), "mlp.a": C(), "mlp.b": W()}, None, "broadcast 2, scatter 10",
        "all_reduce 2", WHOLE, "all_reduce 2", (None, None, *SS, *SS, *SS, *SR, None, None, *SS, *SR)),
    "block of a sequence": Row(
        Block, {"norm?": SequenceParallel(), "att": move(S(1), R, False), "att.[qkv]": C(),
                "att.o": W(output_layouts=S(1)), "mlp.a": C(input_layouts=S(1)), "mlp.b": W(output_layouts=S(1))}, 1,
        "broadcast 2, scatter 10", "all_gather 2, reduce_scatter 2", SEQ, "all_gather 2, reduce_scatter 2",
        (P, P, *SS, *SS, *SS, *SR, P, P, *SS, *SR)),
    "block of a sequence, gathered by each": Row(
        Block, {"norm?": SequenceParallel(), "att.[qkv]": C(), "att.o": W(output_layouts=S(1)), "mlp.a": C(),
                "mlp.b": W(output_layouts=S(1))}, 1, "broadcast 2, scatter 10", "all_gather 2, reduce_scatter 2", SEQ,
        "all_gather 2, reduce_scatter 2", (P, P, *SS, *SS, *SS, *SR, P, P, *SS, *SR)),
    "LayerNorm": Row(lambda: nn.LayerNorm(16), SequenceParallel(), 1, "", "", SEQ, "", (P, P)),
    "RMSNorm": Row(lambda: nn.RMSNorm(16), SequenceParallel(), 1, "", "", SEQ, "", (P,)),
    "Dropout": Row(nn.Dropout, SequenceParallel(), 1, "", "", SEQ, "", ()),
    "Embedding Colwise": Row(embedding, C(), None, "scatter 1", "", CUT, "", (S(1),)),
    "Embedding Colwise R": Row(embedding, C(output_layouts=R), None, "scatter 1", "all_gather 1", WHOLE, "", (S(1),)),
    "Embedding Rowwise R": Row(embedding, W(input_layouts=R), None, "scatter 1", "all_reduce 1", WHOLE, "", (S(0),)),
    "Embedding Rowwise S1": Row(
        embedding, W(input_layouts=R, output_layouts=S(1)), None, "scatter 1", "reduce_scatter 1", SEQ, "all_gather 1",
        (S(0),)),
    "Embedding Rowwise": Row(embedding, W(), 1, "scatter 1", "all_gather 1, all_reduce 1", WHOLE, "", (S(0),)),
    "head": Row(
        lambda: nn.Linear(16, 32, bias=False), C(input_layouts=S(1), use_local_output=False), 1, "scatter 1",
        "all_gather 1", (2, 8, 8), "reduce_scatter 1", (S(0),)),
    "input S1 to R": Row(nn.Identity, move(S(1), R, False), 1, "", "all_gather 1", WHOLE, "", ()),
    "input R to S1": Row(nn.Identity, move(R, S(1), False), None, "", "", SEQ, "all_gather 1", ()),
    "input S1 to S2": Row(nn.Identity, move(S(1), S(2), False), 1, "", "all_to_all 1", CUT, "all_to_all 1", ()),
    "output R to S1": Row(nn.Identity, move(R, S(1), True), None, "", "", SEQ, "all_gather 1", ()),
    "output S1 to R": Row(nn.Identity, move(S(1), R, True), 1, "", "all_gather 1", WHOLE, "", ()),
    "output P to S1": Row(nn.Identity, move(P, S(1), True), None, "", "reduce_scatter 1", SEQ, "all_gather 1", ()),
}  # fmt: skip


