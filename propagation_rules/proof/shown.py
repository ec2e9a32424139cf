"""A rule, as it is for one call: factors, linearity, kernels, and the strategies of one mesh axis as rows.

    aten.mm.default(float64[5, 4], float64[4, 3])
      rule      aten.mm   m k, k n -> m n   linear 0|1
      factors   a b, b c -> a c        a=5 b=4 c=3
      linear    P(sum|avg) in 0 -> P(sum|avg)
      ...
      strategies of one axis of 4
        factor a       S(0), R -> S(0)
"""

from __future__ import annotations

import string

from dtensor import init_device_mesh
from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import make_call
from dtensor.dispatch.lists import base_entry
from dtensor.dispatch.metadata import output_metas
from dtensor.placement import Partial, Replicate
from dtensor.redistribute.cost_model import current_cost_model
from dtensor.rules.registry import Call, Entry, rule_of
from dtensor.rules.rule import Choice, Dims, Linear, Rule, State, Want
from dtensor.simulation.simulate import fake_world

from .parts import pending_ops
from .recorded import RecordedCall
from .truth import wrapped

__all__ = ["shown"]


def shown(call: RecordedCall, k: int = 4) -> str:
    """The rule of this call on an axis of `k`, as text; why there is none where there is none."""
    info = hot.OpInfo(call.op)
    head = [str(call)]
    if info.special is not None:
        return f"{call}\n  handled as a whole, not by a rule"
    if info.kind == "lists":
        found = base_entry(info)
        each = f"{found.name}   {found.text}" if found else "none: it runs replicated"
        return f"{call}\n  rule       of each element: {each}"
    if info.entry is None:
        return f"{call}\n  no rule: it runs decomposed, or replicated"
    entry: Entry = info.entry
    head.append(f"  rule       {entry.name}   {entry.text}")
    with fake_world(k):
        mesh = init_device_mesh("cpu", (k,), mesh_dim_names=("x",))
        args, kwargs = wrapped(call, mesh, [(_R,)] * len(call.tensors), cut=False)
        metas = output_metas(call.op, args, kwargs)
        if metas is None:
            return "\n".join([*head, "  the shape of the result depends on the data: it runs replicated"])
        given = make_call(call.op, args, kwargs, metas[1])
        rule = rule_of(entry, given)
        if rule is None:
            return "\n".join([*head, "  the rule says nothing about this call: it runs decomposed, or replicated"])
        return "\n".join([*head, *_facts(rule), *_strategies(rule, given, k)])


_R = Replicate()


def _name(f: int) -> str:
    return string.ascii_letters[f] if f < 52 else f"f{f}"


def _facts(rule: Rule) -> list[str]:
    def dims(t: Dims) -> str:
        def dim(d: tuple[int, ...]) -> str:
            inner = " ".join(f"[{_name(f)}]" if f in rule.whole else _name(f) for f in d)
            return "1" if not d else inner if len(d) == 1 else f"({inner})"

        return " ".join(map(dim, t)) or "()"

    ins, outs = ", ".join(map(dims, rule.inputs)), ", ".join(map(dims, rule.outputs))
    sizes = " ".join(f"{_name(f)}={n}" for f, n in enumerate(rule.sizes))
    lines = [f"  factors    {ins} -> {outs}        {sizes}"]
    if rule.whole:
        lines.append(f"  whole      {' '.join(_name(f) for f in sorted(rule.whole))}")
    if rule.reduce:
        lines.append("  reduce     " + " ".join(f"{_name(f)}:{op}" for f, op in sorted(rule.reduce.items())))
    if rule.addends:
        lines.append(f"  addends    {sorted(rule.addends)}")
    lines += [f"  linear     {_group(g)}" for g in rule.linear]
    lines += [
        f"  kernel     {k.name} shards {' '.join(map(_name, sorted(k.factors)))}, outputs {', '.join(k.outputs)}, "
        f"{f'{k.collectives} x {k.moves} of {k.elements} elements' if k.collectives else 'no communication'}"
        for k in rule.kernels
    ]
    own = [n for n, there in (("localize", rule.localize), ("bind", rule.bind), ("local", rule.local)) if there]
    if own:
        lines.append(f"  local op   changed by {', '.join(own)}")
    return lines


def _group(group: Linear) -> str:
    ops = "; ".join(f"P({'any' if a == '*' else a}) -> P({'the same' if b == '*' else b})" for a, b in group.ops)
    whole = f", outputs {sorted(group.whole_outputs)} replicated" if group.whole_outputs else ""
    return f"inputs {'+'.join(map(str, sorted(group.inputs)))}: {ops}{whole}"


def _strategies(rule: Rule, call: Call, k: int) -> list[str]:
    start = State.start(rule)
    width = call.inputs[0].dtype.itemsize if call.inputs else 4
    lines = [f"  strategies of one axis of {k}"]
    pending = sorted({op for s in call.inputs for op in pending_ops(s.dtype)}) or ["sum"]
    for choice in rule.choices(pending):
        if choice.factor is not None and start.sharded(rule, choice.factor, k) is None:
            continue
        row = ", ".join(_places(choice.inputs, rule.inputs, start)) + " -> "
        row += ", ".join(_places(choice.outputs, rule.outputs, start))
        cost = ""
        if choice.kernel is not None and choice.kernel.collectives:
            send = getattr(current_cost_model(), choice.kernel.moves)
            seconds = choice.kernel.collectives * send(k, max(choice.kernel.elements, 1) * width)
            cost = f"   {choice.kernel.collectives} x {choice.kernel.moves}, about {seconds * 1e6:.1f} us"
        lines.append(f"    {_label(choice):24s} {row}{cost}")
    return lines


def _label(choice: Choice) -> str:
    if choice.factor is None:
        return "replicate" if choice.label == "R" else choice.label
    return f"{choice.kernel.name if choice.kernel else 'factor'} {_name(choice.factor)}"


def _places(wants: tuple[Want, ...], tensors: tuple[Dims, ...], start: State) -> list[str]:
    def one(want: Want, dims: Dims) -> str:
        p = start.placement(dims, want) if isinstance(want, int) else want
        return "as is" if p is None else "P" if p == Partial("sum") else str(p)

    return [one(w, d) for w, d in zip(wants, tensors, strict=True)]
