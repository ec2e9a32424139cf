"""Elements in another order, with padding, or repeated: dims that are rearranged stay whole, the others are free.

    flip(dims=1)       a [b] -> a [b]
    pad of dim 1       a [b] -> a [b']
    repeat(2, 1)       a b -> (copies a) b              a may be cut: its copies are cut alike
    pixel_shuffle      b (c r s) h w -> b c (h r) (w s)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from dtensor.factors import Rule, linear, passes
from dtensor.registry import Call, register
from propagation_rules.labelled import Labels, but, every_dim, labelled, shares_value

MOVES = (passes(0),)


def flip(call: Call) -> Rule:
    """The flipped dims stay whole."""
    n = call.inputs[0].ndim
    kept = but(n, *(d % n for d in call["dims"])) if n else []
    return labelled(call, [kept], [kept], linear=MOVES)


def roll(call: Call) -> Rule:
    """The rolled dims stay whole; without dims the flattened tensor is rolled, so all do."""
    n = call.inputs[0].ndim
    kept = but(n, *(d % n for d in call["dims"] or range(n))) if n else []
    return labelled(call, [kept], [kept], linear=MOVES)


def rot90(call: Call) -> Rule:
    """The plane that turns stays whole."""
    n = call.inputs[0].ndim
    kept = but(n, *(d % n for d in call["dims"]))
    return labelled(call, [kept], [kept], linear=MOVES)


def pad(call: Call) -> Rule:
    """Padded dims stay whole; the padding is shared out among pending parts."""
    n, given = call.inputs[0].ndim, call["pad"]
    padded = [n - 1 - i for i in range(len(given) // 2) if given[2 * i] or given[2 * i + 1]]
    kept = but(n, *padded)
    return shares_value(call, labelled(call, [kept], [kept]), "value")


def repeat(call: Call) -> Rule:
    """By hand: a repeated dim is (copies, part), of which the part may be cut; new dims are nobody's."""
    shape, times = call.inputs[0].shape, call["repeats"]
    new = len(times) - len(shape)
    count = {d: int(times[new + d]) for d in range(len(shape))}
    ins = [(("part", d),) if count[d] else None for d in range(len(shape))]
    outs = [
        None if d < new or not times[d] else (("part", d - new),) if times[d] == 1
        else (("times", d - new), ("part", d - new))
        for d in range(len(times))
    ]  # fmt: skip
    sizes: dict[Hashable, int] = {("part", d): n for d, n in enumerate(shape)}
    sizes |= {("times", d): n for d, n in count.items()}
    return labelled(call, [ins], [outs], sizes=sizes, whole=[("times", d) for d in count], linear=MOVES)


def edge_pad(call: Call) -> Rule:
    """Reflection and replication: the padded dims are the last ones."""
    n = call.inputs[0].ndim
    kept = but(n, *range(n - len(call["padding"]) // 2, n))
    return labelled(call, [kept], [kept], filled=True, linear=MOVES)


def edge_pad_backward(call: Call) -> Rule:
    """Of the input only the shape counts."""
    n = call.inputs[0].ndim
    kept = but(n, *range(n - len(call["padding"]) // 2, n))
    return labelled(call, [kept, kept], [kept], filled=True, linear=(linear(0),))


# ------------------------------------------------------------ shuffles
def _shuffle(call: Call, inputs: Labels, output: Labels, sizes: Mapping[Hashable, int]) -> Rule:
    lead = every_dim(call.inputs[0].ndim - len(inputs))
    alone = [(label,) for label in lead]
    every = dict(sizes) | {d: call.inputs[0].shape[d] for d in range(len(lead))}
    return labelled(
        call, [[*alone, *inputs]], [[*alone, *output]], sizes=every, whole=("r", "s"), filled=True, linear=MOVES
    )  # fmt: skip


def pixel_shuffle(call: Call) -> Rule:
    """Channels become pixels."""
    r, (c, h, w) = int(call["upscale_factor"]), call.inputs[0].shape[-3:]
    sizes: dict[Hashable, int] = {"c": c // (r * r), "r": r, "s": r, "h": h, "w": w}
    return _shuffle(call, [("c", "r", "s"), ("h",), ("w",)], [("c",), ("h", "r"), ("w", "s")], sizes)


def pixel_unshuffle(call: Call) -> Rule:
    """Pixels become channels."""
    r, (c, h, w) = int(call["downscale_factor"]), call.inputs[0].shape[-3:]
    sizes: dict[Hashable, int] = {"c": c, "r": r, "s": r, "h": h // r, "w": w // r}
    return _shuffle(call, [("c",), ("h", "r"), ("w", "s")], [("c", "r", "s"), ("h",), ("w",)], sizes)


def channel_shuffle(call: Call) -> Rule:
    """Groups of channels are interleaved; the dims after them are free."""
    shape, r = call.inputs[0].shape, int(call["groups"])
    after: list[Hashable] = [(d,) for d in range(2, len(shape))]
    sizes: dict[Hashable, int] = {d: n for d, n in enumerate(shape) if d != 1} | {"r": r, "c": shape[1] // r}
    return labelled(
        call, [[(0,), ("r", "c"), *after]], [[(0,), ("c", "r"), *after]], sizes=sizes, whole=("r",), filled=True,
        linear=MOVES,
    )  # fmt: skip


_EDGES = [f"aten.{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)]

register("aten.flip", flip)
register("aten.roll", roll)
register("aten.rot90", rot90)
register("aten.constant_pad_nd", pad, values="value")
register("aten.repeat", repeat)
register(_EDGES, edge_pad)
register([f"{name}_backward" for name in _EDGES], edge_pad_backward)
register("aten.pixel_shuffle", pixel_shuffle)
register("aten.pixel_unshuffle", pixel_unshuffle)
register("aten.channel_shuffle aten.native_channel_shuffle", channel_shuffle)
