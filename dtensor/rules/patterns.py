"""The pattern language: the factors of an op's tensors as one line of text.

    m k, k n -> m n             names are factors, a tensor's dims are parted by spaces, tensors by commas
    (a b) c -> a b c            a dim of several factors, major to minor
    b [n], [n] -> b [n], b 1    [n] must stay replicated; 1 is a dim that carries no factor
    ..., ... -> ...             any number of leading dims, broadcast
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtensor.rules.rule import Dims

__all__ = ["factor_names", "parse_pattern"]

_TOKEN = re.compile(r"\(|\)|\[|\]|\.\.\.|[A-Za-z_]\w*|1")


def parse_pattern(
    pattern: str, shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int] | None]
) -> tuple[tuple[Dims, ...], tuple[Dims, ...], tuple[int, ...], frozenset[int], dict[str, int]]:
    """Inputs, outputs, sizes, whole factors and the names of a pattern such as `b [n], [n] -> b [n]`.

    `name` is a dim of one factor, `(a b)` a dim of several, `[n]` a whole one, `1` a dim without factor,
    `...` any number of leading dims, aligned right and broadcast: where a tensor has size 1 and another
    has more, it carries no factor there. Sizes come from the shapes; raises ValueError when they do not fit.
    """
    left, _, right = pattern.partition("->")
    names: dict[str, int] = {}
    sizes: list[int] = []
    whole: set[int] = set()
    lists = [t.strip() for t in left.split(",")], [t.strip() for t in right.split(",")]
    if len(lists[0]) != len(shapes) or len(lists[1]) != len(out_shapes):
        raise ValueError(
            f"pattern {pattern!r} has {len(lists[0])} inputs and {len(lists[1])} outputs, "
            f"the call {len(shapes)} and {len(out_shapes)}"
        )
    tensors = [(t, s) for t, s in zip([*lists[0], *lists[1]], [*shapes, *out_shapes], strict=True)]
    parsed = [_tokens(t) for t, _ in tensors]
    spread: dict[int, int] = {}  # distance from the end of `...` -> largest size
    for toks, (_, shape) in zip(parsed, tensors, strict=True):
        if shape is not None and ("...",) in toks:
            for j, n in enumerate(_ellipsis(toks, shape)):
                spread[j] = n if spread.get(j, 1) == 1 else spread[j]

    def number(name: str, size: int | None) -> int:
        if name not in names:
            names[name] = len(sizes)
            sizes.append(-1)
        f = names[name]
        if size is not None:
            if sizes[f] not in (-1, size):
                raise ValueError(f"pattern {pattern!r}: {name} is {sizes[f]} in one tensor and {size} in another")
            sizes[f] = size
        return f

    def dims_of(toks: list[tuple[str, ...]], shape: Sequence[int] | None) -> Dims:
        if shape is None:
            return ()
        dims: list[tuple[int, ...]] = []
        at = 0
        for tok in toks:
            if tok == ("...",):
                lead = _ellipsis(toks, shape)
                for j in range(len(lead) - 1, -1, -1):
                    size = spread[j]
                    dims.append((number(f"...{j}", size),) if lead[j] == size else ())
                    at += 1
                continue
            if at >= len(shape):
                raise ValueError(f"pattern {pattern!r} has more dims than a tensor of shape {tuple(shape)}")
            if tok == ("1",):
                dims.append(())
            else:
                bare = [t.strip("[]") for t in tok]
                fs = tuple(number(b, shape[at] if len(tok) == 1 else None) for b in bare)
                whole.update(f for f, t in zip(fs, tok, strict=True) if t.startswith("["))
                dims.append(fs)
            at += 1
        if at != len(shape):
            raise ValueError(f"pattern {pattern!r} has fewer dims than a tensor of shape {tuple(shape)}")
        return tuple(dims)

    all_dims = [dims_of(toks, shape) for toks, (_, shape) in zip(parsed, tensors, strict=True)]
    if -1 in sizes:
        raise ValueError(f"pattern {pattern!r}: the size of a factor is not known from the shapes")
    n = len(shapes)
    return tuple(all_dims[:n]), tuple(all_dims[n:]), tuple(sizes), frozenset(whole), names


def factor_names(pattern: str) -> tuple[list[list[str]], list[list[str]], set[str]]:
    """Per input and per output the factors that its dims name, `...` among them; those that are marked whole.

    ValueError for text that is no pattern.
    """
    left, arrow, right = pattern.partition("->") if isinstance(pattern, str) else ("", "", "")
    rest = re.sub(_TOKEN, "", f"{left},{right}").replace(",", "").strip()
    if not arrow or rest or any(_odd(t) for t in (*left.split(","), *right.split(","))):
        raise ValueError(f"pattern {pattern!r} is not of the form 'm k, k n -> m n'; see dtensor.rules.patterns")
    whole: set[str] = set()
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    for side, text in zip(sides, (left, right), strict=True):
        for tensor in text.split(","):
            names = [t for tok in _tokens(tensor) for t in tok if t != "1"]
            whole.update(t.strip("[]") for t in names if t.startswith("["))
            side.append([t.strip("[]") for t in names])
    return *sides, whole


def _odd(tensor: str) -> bool:
    """True where the brackets of a tensor's text do not match, or `...` stands in it twice."""
    brackets = re.sub(r"[^()\[\]]", "", tensor)
    return re.fullmatch(r"(\[\]|\((\[\])*\))*", brackets) is None or tensor.count("...") > 1


def _tokens(text: str) -> list[tuple[str, ...]]:
    """`b [n] (x y)` -> [("b",), ("[n]",), ("x", "y")]."""
    out: list[tuple[str, ...]] = []
    group: list[str] | None = None
    inside = False
    for tok in _TOKEN.findall(text):
        if tok == "(":
            group = []
        elif tok == ")":
            out.append(tuple(group or ()))
            group = None
        elif tok in "[]":
            inside = tok == "["
        else:
            name = f"[{tok}]" if inside else tok
            if group is not None:
                group.append(name)
            else:
                out.append((name,))
    return out


def _ellipsis(toks: list[tuple[str, ...]], shape: Sequence[int]) -> list[int]:
    """Sizes that `...` stands for, last dim first."""
    at = toks.index(("...",))
    after = len(toks) - at - 1
    return [shape[j] for j in range(len(shape) - after - 1, at - 1, -1)]
