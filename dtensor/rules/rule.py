"""The rule algebra: what the dims of an op mean, and the strategies that follow.

A *factor* is one iteration dimension of an op. A rule lists, for every tensor, the factors of each of its
dims, major to minor:

    mm      m k, k n -> m n         inputs  ((m,), (k,)), ((k,), (n,))     outputs ((m,), (n,))
    view    (a b) c -> a b c        inputs  ((a, b), (c,))                 outputs ((a,), (b,), (c,))

Over one mesh axis the strategies are: everything replicated; one factor sharded (tensors that have it are
sharded on it; inputs that lack it are replicated, or pending where they are addends; outputs that lack it are
pending in the factor's reduction); one linear group pending (those inputs and the outputs Partial, the
other inputs replicated); or one kernel. `mm` on one axis:

    m     S(0), R    -> S(0)
    n     R,    S(1) -> S(1)
    k     S(1), S(0) -> P(sum)
    0     P,    R    -> P
    1     R,    P    -> P
    R     R,    R    -> R

Over several axes a strategy is chosen per axis, left to right; each choice shards its factor, so the next axis
sees smaller local sizes. In a dim of several factors the sharded one must divide evenly, and the placement is
`Shard` when the factors before it have local size 1, else `StridedShard` with their local product as split
factor:

    (a=4 b=6) with b over an axis of 3      StridedShard(d, split_factor=4)
    the same after a was sharded over 2         StridedShard(d, split_factor=2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.intervals import local_sizes
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.rules.call import Call
from dtensor.rules.kernel import KernelContext
from dtensor.spec import Spec

__all__ = [
    "Bind", "Builder", "Choice", "Dims", "Entry", "Kernel", "Linear", "LocalPart", "Rule", "State", "Want",
    "antitone", "linear", "monotone", "passes", "refine",
]  # fmt: skip

Dims = tuple[tuple[int, ...], ...]
"""Per tensor dim its factors, major to minor; () for a dim of size 1 that carries none."""

Want = Placement | int | None
"""What a choice asks of a tensor: a placement, the number of the factor to shard it on, or None: to stay as it is."""

ANY = "*"
R = Replicate()


@dataclass(frozen=True, slots=True)
class Linear:
    """Inputs that may be pending together, the others replicated.

    `ops` maps the reduction of the inputs to that of the outputs; the key "*" stands for every reduction
    (ops that only move elements). An output in `whole_outputs` does not depend on those inputs and stays
    replicated.
    """

    inputs: frozenset[int]
    ops: tuple[tuple[str, str], ...]
    whole_outputs: frozenset[int] = frozenset()

    def out_op(self, op: str) -> str | None:
        """Reduction of the outputs when the inputs are pending in `op`; None when it does not pass."""
        for given, out in self.ops:
            if given == op:
                return out
            if given == ANY:
                return op
        return None


def linear(*inputs: int) -> Linear:
    """f is additive in these inputs together: passes sum and avg."""
    return Linear(frozenset(inputs), (("sum", "sum"), ("avg", "avg")))


def monotone(*inputs: int) -> Linear:
    """f is non-decreasing in these inputs together: passes max and min."""
    return Linear(frozenset(inputs), (("max", "max"), ("min", "min")))


def antitone(*inputs: int) -> Linear:
    """f is non-increasing in these inputs: turns max into min and min into max."""
    return Linear(frozenset(inputs), (("max", "min"), ("min", "max")))


def passes(*inputs: int) -> Linear:
    """f only moves elements of these inputs: passes every reduction."""
    return Linear(frozenset(inputs), ((ANY, ANY),))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A strategy with a local part of its own: `factors` may be sharded although they are replicated or reduce badly.

    Inputs that have the factor are sharded on it, the others replicated (addends pending). `outputs[i]` is
    "shard" (sharded on the factor), "replicate" (the kernel makes all positions agree), or a reduction.
    `run(ctx)` computes the local outputs, or a `dtensor.rules.deferred.Deferral` of several. It may communicate over
    `ctx.axes`: `collectives` times, with `elements` (of the first input's width) put in by the busiest rank, in
    collectives of the kind `moves`, a name of the cost model's.
    """

    name: str
    factors: frozenset[int]
    outputs: tuple[str, ...]
    run: Callable[[KernelContext], object]
    elements: int = 0
    collectives: int = 0
    moves: str = "all_reduce"


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy of one mesh axis: `factor` is sharded, with split factor `split` when that is not 0.

    `moves_only`: what is pending is only moved about, not computed with.
    """

    label: str
    inputs: tuple[Want, ...]
    outputs: tuple[Want, ...]
    factor: int | None = None
    kernel: Kernel | None = None
    split: int = 0
    moves_only: bool = False


Localize = Callable[[Sequence[Spec], Sequence[Spec | None]], Mapping[str, object]]
"""(input specs, output specs) -> values of static arguments for this rank's local op, by argument name."""


Bind = Callable[[Sequence[Spec], Sequence[Spec | None]], Callable[..., object] | None]
"""(input specs, output specs) -> what runs on the local arguments instead of the op; None: the op itself."""


LocalPart = Callable[[Sequence[Spec], Sequence[Spec | None]], "Callable[[KernelContext], object] | None"]
"""(input specs, output specs) -> what computes this rank's outputs in the op's place; None: the op itself."""


PriceLater = Callable[[int, Choice], "tuple[str, int, int] | None"]
"""(mesh axis, strategy on it) -> what the results will need: a collective of the cost model, the elements that it is
given, and how many times that counts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one call of an op means. See the module's text.

    Attributes:
        inputs, outputs: factors of every tensor input and output (outputs that are None: ()).
        sizes: global size of each factor.
        whole: factors that no plain strategy may split.
        nonempty: factors that may be sharded only when no local shard is empty.
        reduce: reduction of a factor that outputs lack, where it is not sum.
        addends: inputs that are added to the reduced result: pending where a factor they lack is reduced.
        linear: what pending inputs pass through.
        kernels: strategies with a local part of their own.
        localize: static arguments that become local.
        bind: a function that runs in the op's place, with the op's arguments; made once per plan and rank.
        local: the local part of strategies without a kernel where it is not the op itself, e.g. the mean of a
            shard, which is its sum divided by the global count.
        rows: complete strategies given as placements (outputs, inputs), for rules written as tables.
        stays: inputs that no strategy moves, as the local part copes with any layout of theirs.
        price_later: what a strategy will cost later, where it is known what the results are wanted for; it counts.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: tuple[int, ...]
    whole: frozenset[int] = frozenset()
    nonempty: frozenset[int] = frozenset()
    reduce: Mapping[int, str] = field(default_factory=dict)
    addends: frozenset[int] = frozenset()
    linear: tuple[Linear, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    localize: Localize | None = None
    bind: Bind | None = None
    local: LocalPart | None = None
    rows: tuple[tuple[tuple[Placement, ...], tuple[Placement, ...]], ...] = ()
    stays: frozenset[int] = frozenset()
    price_later: PriceLater | None = None

    def choices(self, pending: Iterable[str], splits: Iterable[tuple[int, int]] = ()) -> tuple[Choice, ...]:
        """The strategies of one axis, in a fixed order.

        Linear groups are listed for the reductions in `pending` only, splits of a factor with a split factor
        for the pairs in `splits` only.
        """
        out: list[Choice] = []
        used = {f for dims in (*self.inputs, *self.outputs) for d in dims for f in d}
        for f in sorted(used):
            if f not in self.whole:
                out.append(self._cut(f, None))
        out += [replace(self._cut(f, None), label=f"factor {f}:{s}", split=s) for f, s in sorted(set(splits))]
        pending = sorted(set(pending))
        for group in self.linear:
            for op in pending:
                passed = group.out_op(op)
                if passed is not None:
                    out.append(self._pending(group, op, passed))
        for kernel in self.kernels:
            out += [self._cut(f, kernel) for f in sorted(kernel.factors)]
        out += [Choice(f"row {i}", ins, outs) for i, (outs, ins) in enumerate(self.rows)]
        out.append(Choice("R", (R,) * len(self.inputs), (R,) * len(self.outputs)))
        return tuple(map(self._staying, out)) if self.stays else tuple(out)

    def _staying(self, choice: Choice) -> Choice:
        return replace(choice, inputs=tuple(None if i in self.stays else w for i, w in enumerate(choice.inputs)))

    def _cut(self, f: int, kernel: Kernel | None) -> Choice:
        reduced = Partial(self.reduce.get(f, "sum"))
        adds = not all(_has(dims, f) for dims in self.outputs)
        ins: tuple[Want, ...] = tuple(
            f if _has(dims, f) else reduced if adds and i in self.addends else R for i, dims in enumerate(self.inputs)
        )
        if kernel is None:
            outs: tuple[Want, ...] = tuple(f if _has(dims, f) else reduced for dims in self.outputs)
            return Choice(f"factor {f}", ins, outs, f)
        outs = tuple(f if how == "shard" else R if how == "replicate" else Partial(how) for how in kernel.outputs)
        return Choice(f"{kernel.name} {f}", ins, outs, f, kernel)

    def _pending(self, group: Linear, op: str, passed: str) -> Choice:
        ins: tuple[Want, ...] = tuple(Partial(op) if i in group.inputs else R for i in range(len(self.inputs)))
        outs: tuple[Want, ...] = tuple(
            R if i in group.whole_outputs else Partial(passed) for i in range(len(self.outputs))
        )
        names = "+".join(map(str, sorted(group.inputs)))
        return Choice(f"P({op}) {names}", ins, outs, moves_only=group.ops[0][0] == ANY)


Builder = Callable[[Call], "Rule | None"]
"""A call -> its rule; None: this call has none."""


@dataclass(slots=True)
class Entry:
    """A registered rule.

    Attributes:
        name: `aten.mm` or `aten.mm.default`.
        build: the builder.
        values: arguments whose value changes neither layouts nor metadata (`"*"`: every number); they are
            represented by their type in the cache key and passed on as they come.
        random: the op draws random numbers.
        text: printed form, for the list of all rules.
        where: file and line of a program's rule; empty for the engine's own.
    """

    name: str
    build: Builder
    values: frozenset[str] = frozenset()
    random: bool = False
    text: str = ""
    where: str = ""


def _has(dims: Dims, f: int) -> bool:
    return any(f in d for d in dims)


@dataclass(frozen=True, slots=True)
class State:
    """Local sizes of the factors after the axes chosen so far: those that there are on the ranks, the largest first.

    The smallest part of a split need not come from the smallest of what is sharded: `dtensor.spec.local_sizes`.
    """

    sizes: tuple[tuple[int, ...], ...]

    @staticmethod
    def start(rule: Rule) -> State:
        """Nothing is sharded yet."""
        return State(tuple((n,) for n in rule.sizes))

    def sharded(self, rule: Rule, f: int, k: int, split: int = 0) -> State | None:
        """Split factor `f` over an axis of `k`; None where the law of even splits or non-empty shards forbids it."""
        before = self.sizes[f]
        n = before[0]
        after = sorted({part for size in before for part in local_sizes(size, k, split)}, reverse=True)
        if f in rule.nonempty and after[-1] == 0 and n > 0:
            return None
        if (len(before) > 1 or n % k or split) and _in_composite(rule, f):
            return None
        return State((*self.sizes[:f], tuple(after), *self.sizes[f + 1 :]))

    def placement(self, dims: Dims, f: int, split: int = 0) -> Placement:
        """The placement that shards factor `f` of a tensor with these dims, given what was sharded before."""
        for d, factors in enumerate(dims):
            if f in factors:
                if split:
                    return StridedShard(d, split_factor=split)
                before = math.prod(self.sizes[g][0] for g in factors[: factors.index(f)])
                return Shard(d) if before == 1 else StridedShard(d, split_factor=before)
        raise ValueError(f"no dim carries factor {f} in {dims}")


def _in_composite(rule: Rule, f: int) -> bool:
    """True when some dim has `f` beside another factor of size other than 1."""
    return any(
        f in d and any(g != f and rule.sizes[g] != 1 for g in d) for t in (*rule.inputs, *rule.outputs) for d in t
    )


# ------------------------------------------------------------ refinement
def refine(rule: Rule, specs: Sequence[Spec], only: Iterable[int] | None = None) -> Rule:
    """Split factors where an input arrives with a split factor, so that rules follow such layouts.

    `(8, 4)` with dim 1 sharded over an axis of 2 flattens to `32@x:8`. A pointwise op on it has the factor
    a = 32; splitting a into (8, 4) makes the second part the one that is sharded, and the output the same.
    Factors that are replicated, or that do not divide, are left alone (the input is then moved). `only`: look at
    these inputs only.
    """
    for i, spec in enumerate(specs):
        if only is not None and i not in only:
            continue
        for axis, p in enumerate(spec.placements):
            if isinstance(p, StridedShard) and p.split_factor > 1:
                split = _find_split(rule, i, spec, axis, p)
                if split is not None:
                    rule = _split_factor(rule, *split)
    return rule


def _find_split(rule: Rule, i: int, spec: Spec, axis: int, p: StridedShard) -> tuple[int, int] | None:
    """(factor, major part) to split so that `p`, on `axis` of input `i`, shards a whole factor; None if none."""
    factors = rule.inputs[i][p.dim]
    local = [rule.sizes[f] for f in factors]
    shape = spec.mesh.shape
    for left in range(axis):
        q = spec.placements[left]
        if isinstance(q, (Shard, StridedShard)) and q.dim == p.dim:
            at, before = 0, 1
            want = q.split_factor if isinstance(q, StridedShard) else 1
            while at < len(local) - 1 and before < want:
                before *= local[at]
                at += 1
            while at < len(local) - 1 and local[at] == 1:
                at += 1
            if before != want or at >= len(local) or local[at] % shape[left]:
                return None
            local[at] //= shape[left]
    before = 1
    for f, n in zip(factors, local, strict=True):
        if before == p.split_factor:
            return None
        if before * n > p.split_factor:
            part, rest = divmod(p.split_factor, before)
            if rest or n % part or (n // part) % shape[axis] or f in rule.whole:
                return None
            return f, part * (rule.sizes[f] // n)
        before *= n
    return None


def _split_factor(rule: Rule, f: int, major: int) -> Rule:
    new = len(rule.sizes)
    sub = lambda t: tuple(tuple(x for g in d for x in ((g, new) if g == f else (g,))) for d in t)  # noqa: E731
    sizes = (*rule.sizes[:f], major, *rule.sizes[f + 1 :], rule.sizes[f] // major)
    more = lambda s: s | {new} if f in s else s  # noqa: E731
    reduce = {**rule.reduce, **({new: rule.reduce[f]} if f in rule.reduce else {})}
    kernels = tuple(k for k in rule.kernels if f not in k.factors)
    return replace(
        rule, inputs=tuple(map(sub, rule.inputs)), outputs=tuple(map(sub, rule.outputs)), sizes=sizes,
        nonempty=more(rule.nonempty), reduce=reduce, kernels=kernels,
    )  # fmt: skip


def carried_splits(rule: Rule, specs: Sequence[Spec]) -> set[tuple[int, int]]:
    """(factor, split factor) of the inputs' split-factor shards that shard a dim of one factor, after `refine`.

    Where the dim does not divide by the split factor it cannot be refined; ops whose tensors all have that
    factor as a dim of its own follow the layout all the same.
    """
    return {
        (rule.inputs[i][p.dim][0], p.split_factor)
        for i, spec in enumerate(specs)
        for p in spec.placements
        if isinstance(p, StridedShard)
        and len(rule.inputs[i][p.dim]) == 1
        and rule.inputs[i][p.dim][0] not in rule.whole
    }
