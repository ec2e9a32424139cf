"""The smallest program that goes wrong in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

from fuzz.draw import Program, Step
from fuzz.judge import Runner, Verdict, judge, runnable, simulated
from fuzz.side import DTYPES


def shrink(
    program: Program, found: Verdict, runner: Runner = simulated, seconds: float = 60.0
) -> tuple[Program, Verdict]:
    """Take away whatever the fault does not need: steps, what led to a tensor, axes of the mesh, layouts."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program, found
            smaller = runnable(smaller)[0]
            if _size(smaller) >= _size(program) or not smaller.steps:
                continue
            got = judge(smaller, runner)
            if got.found.kind == "wrong" and got.found.key == found.key and not got.refused:
                program, found, again = got.program, got.found, True
                break
    return program, found


def _size(program: Program) -> tuple[int, ...]:
    words = [w for s in program.steps for w in s.layout]
    made = sum(s.family != "leaf" for s in program.steps)
    return len(program.steps) + made, len(program.mesh), sum(w != "R" for w in words), sum(map(len, program.lines))


def _smaller(program: Program) -> Iterator[Program]:
    """What to try, the largest cuts first."""
    n = len(program.steps)
    size = n // 2
    while size:
        for start in range(n - size, -1, -size):
            yield program.without(*range(start, start + size))
        size //= 2
    put = lambda i, step: replace(program, steps=(*program.steps[:i], step, *program.steps[i + 1 :]))  # noqa: E731
    leaves = _shapes(program)
    for i, s in enumerate(program.steps):
        m = re.match(r"(t\d+),? = (?!leaf)", s.text)
        if m and m[1] in leaves:
            shape, dtype = leaves[m[1]]
            text = f"{m[1]} = leaf('normal', {shape}, {dtype!r}, {i}, LAYOUT, False)"
            yield put(i, Step(text, "leaf", ("R",) * len(program.mesh)))
    for axis in range(len(program.mesh) if len(program.mesh) > 1 else 0):
        cut = lambda words: words[:axis] + words[axis + 1 :]  # noqa: B023, E731
        steps = tuple(replace(s, layout=cut(s.layout)) for s in program.steps)
        yield replace(program, mesh=cut(program.mesh), steps=steps)
    for i, s in enumerate(program.steps):
        for axis, word in enumerate(s.layout):
            for simpler in ("R", word.partition("/")[0]):
                if simpler != word and word != "R":
                    yield put(i, replace(s, layout=(*s.layout[:axis], simpler, *s.layout[axis + 1 :])))
        plain = re.sub(r"^with torch\.\w+\(\): ", "", s.text)
        plain = re.sub(r", True\)$", ", False)", plain) if s.family == "leaf" else plain
        if plain != s.text:
            yield put(i, replace(s, text=plain))


def _shapes(program: Program) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the floating tensors of a program."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    moments = runnable(program)[1].moments
    return {
        k: (s.about[0], names[s.about[1]])
        for m in moments
        for k, s in m.items()
        if s.about and s.about[1].is_floating_point and "." not in k
    }
