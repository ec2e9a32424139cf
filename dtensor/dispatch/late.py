"""Late binding: what dispatch needs of modules that import it, by name, given by each of them when it is loaded.

    name         given by                    what it is
    DTensor      dtensor.tensor              the class of results
    new          dtensor.tensor              new(DTensor, local, spec, requires_grad=): the wrapper, unchecked
    miss         dtensor.dispatch.miss       what runs a call that has no cached plan
    with_plain   dtensor.dispatch.plain      what runs a call with plain tensors among its arguments
    is_constant  dtensor.lowering.record     is_constant(t, formula): whether a plain tensor of a trace is the same
                                         on all ranks; `formula`: a formula of autograd meets it
    retake       dtensor.dispatch.views      retake(spec): the local tensor of a materialized view, taken again

A module reads them as `late.DTensor` when it needs them, never at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DTensor", "give", "is_constant", "miss", "new", "retake", "with_plain"]


def _too_early(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an operation on DTensors before dtensor.tensor was imported")


DTensor: Any = None
new: Callable[..., Any] = _too_early
miss: Callable[..., Any] = _too_early
with_plain: Callable[..., Any] = _too_early
retake: Callable[..., Any] = _too_early
is_constant: Callable[[torch.Tensor, bool], bool] = lambda t, formula: formula  # noqa: E731


def give(**given: Any) -> None:
    """Bind some of the names above. AttributeError for a name that is not among them."""
    for name, value in given.items():
        if name not in __all__ or name == "give":
            raise AttributeError(f"{__name__} has no name {name!r} to be given")
        globals()[name] = value
