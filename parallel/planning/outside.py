"""What an error says that a module raises below a plan: which module it was, and whether the plan names it.

A plan that names some layers and not their neighbours fails inside of torch, in a layer that nobody named: "mat1 and
mat2 shapes cannot be multiplied". `parallelize_module` puts a hook on every module above a styled one, which is called
after an error too, looks for the module in the error's traceback, and adds to the text what the plan says of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from dtensor.errors import LayoutError, NoRuleError, bounded, listed
from dtensor.tensor import DTensor

from .undo import PATH, STYLES

__all__ = ["explain_errors"]


def explain_errors(root: nn.Module) -> None:
    """Have errors below `root` name the module that they come from."""
    for path, module in root.named_modules():
        above = any(STYLES in part.__dict__ for part in module.modules() if part is not module)
        if above:
            module.__dict__[PATH] = path
        if above and _explain not in module._forward_hooks.values():
            module.register_forward_hook(_explain, always_call=True)


def _explain(module: nn.Module, args: tuple[object, ...], output: object) -> None:
    if torch.compiler.is_compiling() or output is not None:
        return
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or not error.args or not isinstance(error.args[0], str):
        return
    paths = {id(part): path for path, part in module.named_modules()}
    found = [part for part in _modules(error) if id(part) in paths]
    if not found or found[0] is not module or getattr(error, "_explained", False):
        return
    error._explained = True  # type: ignore[attr-defined]  # modules further out have nothing to add
    path = f"{module.__dict__.get(PATH, '')}.{paths[id(found[-1])]}".strip(".")
    more = "\n".join(_facts(path, found[-1], isinstance(error, (LayoutError, NoRuleError))))
    error.args = (bounded(f"{error.args[0].rstrip()}\n{more}"), *error.args[1:])


def _modules(error: BaseException) -> Iterator[nn.Module]:
    """The modules whose methods an error came through, the outermost first."""
    step = error.__traceback__
    while step is not None:
        part = step.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            yield part
        step = step.tb_next


def _facts(path: str, module: nn.Module, ours: bool) -> Iterator[str]:
    """What to add to an error of `module`; `ours`: an error that says already what is wrong with layouts."""
    where = f"{path!r} ({type(module).__name__})" if path else f"the module itself ({type(module).__name__})"
    styles = module.__dict__.get(STYLES)
    if styles:
        yield f"  in: {where}, which the plan lays out by {', '.join(map(repr, styles))}"
        return
    yield f"  in: {where}, which the plan does not name"
    below = [n for n, m in module.named_modules() if any(s.gives_pieces for s in m.__dict__.get(STYLES, ()))]
    if below and not ours:
        yield (
            f"  rule: what {listed(below)} gives is this rank's piece: sizes in the code are those of pieces\n"
            "  fix: leave the number of heads to each rank: view(b, t, -1, head_dim), not view(b, t, heads, -1)"
        )
    elif not below and any(p is not None and not isinstance(p, DTensor) for p in module._parameters.values()):
        yield (
            "  rule: it has whole plain parameters and takes whole plain inputs; a column-wise layer before it gives "
            f"this rank's piece, or a DTensor\n  fix: name it in the plan, e.g. {path!r}: RowwiseParallel() behind a "
            "ColwiseParallel(); or have the layer before give all: ColwiseParallel(output_layouts=Replicate())"
        )
