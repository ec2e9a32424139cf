"""The `DTensor` class: a global tensor, of which every rank of a mesh holds a part.

A DTensor is a wrapper: its shape, stride and dtype are the global ones, its data is the local tensor of this
rank. Operations on it mean what they mean on the global tensor; how they are carried out is decided by the
sharding rules (`dtensor.rules.choice`) and run by `dtensor.dispatch.hit`.

Names and signatures follow `torch.distributed.tensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from dtensor.comm.communicator import traced
from dtensor.dispatch import constants as _constants  # noqa: F401 - catches what it lists
from dtensor.dispatch import handlers as _specials  # noqa: F401 - registers its handlers
from dtensor.dispatch import hit as _dispatch
from dtensor.dispatch import late
from dtensor.dispatch import miss as _dispatch_miss  # noqa: F401 - binds itself to dispatch
from dtensor.dispatch.materialized import GivenSpec, ViewOf, note_input, settled_spec, spec_to_compile
from dtensor.errors import expect, explain_error, refuse_layout, short
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.executor.run import known_move, remember_move
from dtensor.rules.deferred import DeferredSpec
from dtensor.spec import Spec, in_order, normalize_placements
from dtensor.tensor_methods import compiled as _compiled
from dtensor.tensor_methods import memory as _memory
from dtensor.tensor_methods.autograd import (
    FromLocal,
    Redistribute,
    ToLocal,
    apply_move,
    check_parts,
    read_part,
    redistributed,
    transformed,
    watch,
)

__all__ = ["DTensor"]

_compiling = torch.compiler.is_dynamo_compiling
_native_new: Callable[..., Any] | None = getattr(torch.Tensor, "_dtensor__new__", None)


def _python_new(cls: type, local: torch.Tensor, spec: Spec, *, requires_grad: bool) -> Any:
    meta = spec.tensor_meta
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device, layout=local.layout,
        requires_grad=requires_grad,
    )  # fmt: skip
    made._local_tensor, made._spec = local, spec
    return made


class _Absent:
    """A private name of torch's class that programs ask for: an AttributeError that says what stands for it."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"DTensor.{self._name} is of torch's engine; here {self._instead}")


new: Callable[..., Any] = _native_new if _native_new is not None else _python_new
"""`new(cls, local, spec, requires_grad=)`: the wrapper, unchecked and without autograd."""


if TYPE_CHECKING:
    from dtensor.tensor_methods.typed import Tensor as _Tensor
else:
    _Tensor = torch.Tensor


class DTensor(_Tensor):
    """A tensor distributed over a `DeviceMesh`.

    Make one with `distribute_tensor`, `DTensor.from_local` or the factories. `DTensor(local_tensor, spec, *,
    requires_grad)` is the raw constructor: not differentiable, not checked.
    """

    _local_tensor: torch.Tensor
    _spec: Spec  # no slots: a plain parameter can become a DTensor in place (torch.utils.swap_tensors, Module._apply)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        if not isinstance(local_tensor, torch.Tensor) or not isinstance(spec, Spec):
            raise TypeError(
                explain_error(
                    "DTensor(local_tensor, spec)", f"{type(local_tensor).__name__} and spec={short(spec)}",
                    "this raw constructor takes a tensor and a Spec",
                    "distribute_tensor(tensor, mesh, placements), or DTensor.from_local(part, mesh, placements)",
                )
            )  # fmt: skip
        made: DTensor = new(cls, local_tensor, spec, requires_grad=False)
        return made.requires_grad_() if requires_grad else made

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        return _run(func, args, kwargs)

    _op_dispatcher = _Absent(
        "dtensor.dispatch.hit.dispatch runs an op, dtensor.rules.registry.lookup(op) gives its rule, "
        "dtensor.experimental.register_sharding and dtensor.rules.register take one"
    )
    _propagator = _Absent("dtensor.rules.choice decides where an op runs, dtensor.rules.registry holds the rules")
    _custom_dispatch_ops = _Absent("dtensor.dispatch.special registers a function that handles an op as a whole")
    _raise_if_contains_partial_placements = _Absent("x._spec.has_partial() tells whether a reduction is pending")

    # ------------------------------------------------------------ what it is
    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor lives on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.placements

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"DTensor(local_tensor={self._local_tensor}, device_mesh={self._spec.mesh}, "
            f"placements={self._spec.placements})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    # ------------------------------------------------------------ local <-> global
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | Sequence[int] | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """A DTensor of which `local_tensor` is this rank's part. Differentiable; shares memory.

        Args:
            local_tensor: this rank's part; moved to the mesh's device type unless it is a meta tensor. Of a rank
                outside the mesh it says the shape only: its part is empty.
            device_mesh: default: the mesh of the enclosing `with mesh:`.
            placements: one per mesh axis; default all `Replicate()`.
            run_check: compare what the mesh's ranks pass, which raises ValueError on all of them where they differ
                or one refuses its arguments, and broadcast along replicated axes.
            shape, stride: of the global tensor, both or neither. Without them the shards are taken as even.
            grad_placements: layout of the incoming gradient; default: these placements with Partial as
                Replicate. The part's gradient is what the reduction makes of it: all of it for a sum, one k-th for an
                average of k, that of the position that holds the extreme for a maximum or minimum, and so on.

        Raises:
            RuntimeError: local_tensor is a DTensor; shape without stride or the reverse; a shape that gives
                this rank another part than local_tensor.
            ValueError, IndexError, TypeError: bad placements.
        """
        if _compiling() and isinstance(device_mesh, DeviceMesh) and not run_check:
            return _compiled.from_local(local_tensor, device_mesh, placements, shape, stride, grad_placements)
        mesh = as_mesh(device_mesh)
        given = placements, shape, stride, grad_placements
        if run_check:
            from dtensor.tensor_methods.run_check import run_checks

            local_tensor = run_checks(lambda: _describe(local_tensor, mesh, *given)[:2], mesh, shape is None)
        local, spec, grads = _describe(local_tensor, mesh, *given)
        if local.requires_grad:
            if torch.is_grad_enabled():
                return cast(DTensor, FromLocal.apply(local, spec, grads))
            local = local.detach()
        return cast(DTensor, new(DTensor, local, spec, requires_grad=False))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, sharing memory. Differentiable.

        `grad_placements` is the layout of the gradient that will come back for the local tensors; default:
        the tensor's own, Partial as Replicate.
        """
        if _compiling():
            return _compiled.to_local(self, grad_placements)
        grads = None
        if grad_placements is not None:
            grads = normalize_placements(grad_placements, self._spec.mesh, self.ndim, "to_local(grad_placements=)")
        if not torch.is_grad_enabled() or not _get_requires_grad(self):
            read_part(self)
            return self._local_tensor
        if grads is not None:
            check_parts(self._spec, grads, "to_local")
        return cast(torch.Tensor, ToLocal.apply(self, grads))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor in another layout, on its mesh or on another. Differentiable, any number of times.

        Args:
            device_mesh: None for the tensor's own mesh. For another, all ranks of both meshes must call; a slice of a
                mesh (`mesh["tp"]`) stands for the mesh, replicated along the axes that it leaves out.
            placements: one per mesh axis. `Partial` only where the tensor has it already.
            async_op: leave the last collective running; using the result waits for it.
            forward_dtype: cast to it before anything is sent; the result stays in it.
            backward_dtype: the gradient is cast to it for its collectives, and back to the input's dtype.

        Raises:
            RuntimeError: no placements, or a Partial that is not there already.
            MeshError: another mesh of another device type.
            ValueError, IndexError, TypeError: bad placements.
        """
        if _compiling() and (device_mesh is None or isinstance(device_mesh, DeviceMesh)):
            return _compiled.redistribute(self, device_mesh, placements, forward_dtype, backward_dtype)
        if type(self._local_tensor) is not torch.Tensor:
            _compiled.refuse_export("redistribute")
        grad = torch.is_grad_enabled() and _get_requires_grad(self)
        if device_mesh is None and placements is not None and not async_op and forward_dtype is None:
            move = known_move(self._spec, placements, self._local_tensor)
            if move is not None and not grad:
                moved = move.run(self._local_tensor, False)
                return cast(DTensor, new(DTensor, moved, move.target, requires_grad=False))
            if move is not None and backward_dtype is None and not transformed():
                return cast(DTensor, apply_move(self, move))
        for dtype in (forward_dtype, backward_dtype):
            if dtype is not None:
                expect("redistribute", "forward_dtype and backward_dtype", dtype, torch.dtype, "dtypes", "torch.half")
        own = self._spec.mesh
        mesh = own if device_mesh is None else as_mesh(device_mesh)
        if placements is None:
            raise RuntimeError("redistribute: placements are needed\n  fix: x.redistribute(placements=[Replicate()])")
        if type(self._spec) is DeferredSpec and mesh == own and tuple(placements) == self._spec.placements:
            return cast(DTensor, torch.ops.aten.alias.default(self))  # goes on waiting
        placed = normalize_placements(placements, mesh, self.ndim, "redistribute")
        known = self._spec.placements if mesh == own else (None,) * len(placed)
        for axis, (src, dst) in enumerate(zip(known, placed, strict=True)):
            if isinstance(dst, Partial) and src is not dst:
                raise RuntimeError(
                    f"redistribute: {self._spec} to {dst!r} on mesh axis {mesh.axis_name(axis)}, where it is {src!r}: "
                    "a pending reduction cannot be asked for\n"
                    "  fix: Replicate() or Shard(dim) instead; a pending tensor is made by "
                    "DTensor.from_local(summand, mesh, placements) or "
                    "distribute_tensor(x.full_tensor(), mesh, placements)"
                )
        if grad:
            made = cast(DTensor, Redistribute.apply(self, placed, async_op, forward_dtype, backward_dtype, mesh))
            if device_mesh is None and forward_dtype is None and not async_op:
                remember_move(self._spec, placements, made._spec)
            return made
        result = redistributed(self, placed, async_op, forward_dtype, mesh)
        if device_mesh is None and forward_dtype is None:
            remember_move(self._spec, placements, result._spec)
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank, as a plain torch.Tensor. Differentiable.

        `grad_placements`: layout of the gradient that will come back; default: replicated, that is, the
        gradient is taken to be the same on all ranks.
        """
        if _compiling():
            return _compiled.full_tensor(self, grad_placements)
        whole = self.redistribute(placements=(Replicate(),) * self._spec.mesh.ndim)
        return _waited(whole.to_local(grad_placements=grad_placements))

    # ------------------------------------------------------------ leaves and their gradients
    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """As `torch.Tensor.requires_grad_`; a leaf's gradient will have the leaf's layout."""
        super().requires_grad_(requires_grad)
        if requires_grad:
            watch(self)
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on this tensor."""
        return _get_requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        _set_requires_grad(self, flag)
        if flag:
            watch(self)

    @property
    def data(self) -> DTensor:
        """The tensor without autograd history, sharing memory. Setting it takes over another DTensor's data."""
        return cast(DTensor, _get_data(self))

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, DTensor):
            raise TypeError(
                f"x.data = y: y must be a DTensor, got {type(other).__name__}; "
                "use x.data = distribute_tensor(y, x.device_mesh, x.placements)"
            )
        _set_data(self, other)
        self._local_tensor, self._spec = other._local_tensor, other._spec
        if self.requires_grad:
            watch(self)

    # ------------------------------------------------------------ values
    def tolist(self) -> Any:
        """The whole tensor as nested lists, the same on every rank (gathers)."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array, the same on every rank (gathers; a copy, which `to_local().numpy()` is not)."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a DTensor that requires grad: use x.detach().numpy()")
        with torch.no_grad():
            return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("an array of a DTensor is a copy, which copy=False forbids; use x.to_local().numpy()")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    apply_, map_, share_memory_, is_shared = _memory.apply_, _memory.map_, _memory.share_memory_, _memory.is_shared
    data_ptr = const_data_ptr = _memory.data_ptr
    storage, untyped_storage, _typed_storage = _memory.storage, _memory.untyped_storage, _memory.typed_storage
    __dlpack__ = __dlpack_device__ = _memory.no_dlpack
    __dlpack_c_exchange_api__ = None  # what finds none calls __dlpack__
    __cuda_array_interface__ = property(_memory.cuda_array)

    def __getitem__(self, index: Any) -> Any:
        return _get_item(self, _with_lists(self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        _set_item(self, _with_lists(self, index), value)

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    # ------------------------------------------------------------ protocols
    def __tensor_flatten__(self) -> tuple[list[str], Spec]:
        return ["_local_tensor"], spec_to_compile(self, settled_spec(self, "__tensor_flatten__"))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], spec: Spec, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> DTensor:
        shape, stride = tuple(map(int, outer_size)), tuple(map(int, outer_stride))
        own, local = spec.with_meta(shape, stride, spec.dtype), inner["_local_tensor"]
        if type(spec) is ViewOf and not traced(local):
            output = cast(_ViewOutput, new(_ViewOutput, local, own, requires_grad=False))
            output._view = spec
            return output
        made = cast(DTensor, new(DTensor, local, own, requires_grad=False))
        if type(spec) is GivenSpec and traced(local):
            GivenSpec.like(own, spec.is_view).stands_for(made)
        elif type(spec) is ViewOf:
            made._calls = spec.calls  # type: ignore[attr-defined]
        elif type(local).__name__ == "FunctionalTensor":
            note_input(made)
        return made

    def _stable_hash_for_caching(self) -> str:
        """What torch asks for the key of its cache of traced graphs, which no graph of DTensors may come from."""
        return _compiled.refuse_caching()

    def __coerce_tangent_metadata__(self) -> DTensor:
        if not self._spec.has_partial():
            return self
        return self.redistribute(
            placements=[Replicate() if isinstance(p, Partial) else p for p in self._spec.placements]
        )

    def __coerce_same_metadata_as_tangent__(self, context: Spec, expected_type: type | None = None) -> Any:
        return None if expected_type is not None else self.redistribute(placements=context.placements)

    def __reduce_ex__(self, protocol: Any) -> Any:
        spec = settled_spec(self, "pickle")
        return _rebuild, (self._local_tensor.detach(), spec, self.requires_grad, _own_attributes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment; use x.detach() first"
            )
        made: DTensor | None = memo.get(id(self))
        if made is None:
            spec = settled_spec(self, "deepcopy")
            made = DTensor(self._local_tensor.detach().clone(), spec, requires_grad=self.requires_grad)
            memo[id(self)] = made
            made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in _own_attributes(self).items()})
            if self.grad is not None:
                made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        from dtensor.tensor_methods.checkpoint import write_items

        return write_items(self, fqn, object)

    def __create_chunk_list__(self) -> Any:
        from dtensor.tensor_methods.checkpoint import chunk_list

        return chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from dtensor.tensor_methods.checkpoint import tensor_shard

        return tensor_shard(self, index)


_run = _dispatch.dispatch
_compiled.leave_alone(DTensor.__torch_dispatch__)


class _AsExpected:
    """Equal in `size()`, `stride()` and `storage_offset()` to anything."""

    def size(self) -> _AsExpected:
        """Itself, which is equal to any size; so for strides and offsets."""
        return self

    stride = storage_offset = size

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _ViewOutput(DTensor):
    """A view of an argument as a compiled graph gives it: a copy; torch asks it how to view again."""

    _view: ViewOf

    @property
    def _base(self) -> Any:  # type: ignore[override]
        """What the argument is compared with: guards have seen that it is laid out as the one that was traced."""
        return _AsExpected()

    def _view_func(self, base: DTensor) -> Any:
        """The view of the argument `base`."""
        for call in self._view.calls:
            got = call.func(base, *call.args, **call.kwargs)
            base = got if call.index is None else got[call.index]
        return base


late.give(DTensor=DTensor, new=new)
_get_item = torch.Tensor.__getitem__
_set_item = torch.Tensor.__setitem__
_get_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
_set_requires_grad = torch._C.TensorBase.requires_grad.__set__  # type: ignore[attr-defined]
_get_data = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


def _rebuild(local: torch.Tensor, spec: Spec, requires_grad: bool, state: dict[str, Any]) -> DTensor:
    made = DTensor(local, spec, requires_grad=requires_grad)
    made.__dict__.update(state)
    return made


def _with_lists(x: DTensor, index: Any) -> Any:
    """An index whose Python lists are replicated DTensors: torch would make plain tensors of them."""
    if isinstance(index, list):
        values = torch.tensor(index, device=x._local_tensor.device)
        if values.numel() == 0:
            values = values.long()
        mesh = x._spec.mesh
        return DTensor.from_local(values, mesh, (Replicate(),) * mesh.ndim)
    if isinstance(index, tuple) and any(isinstance(i, list) for i in index):
        return tuple(_with_lists(x, i) if isinstance(i, list) else i for i in index)
    return index


_MADE_ANEW = frozenset(
    {"_backward_hooks", "_calls", "_local_tensor", "_looked_at", "_memory", "_spec", "watch", "_watched"}
)


def _own_attributes(x: DTensor) -> dict[str, Any]:
    """What was set on this object, less what is made anew with a copy."""
    return {k: v for k, v in x.__dict__.items() if k not in _MADE_ANEW}


def _waited(t: torch.Tensor) -> torch.Tensor:
    return t.wait() if type(t).__name__ == "AsyncCollectiveTensor" else t  # type: ignore[attr-defined]


def _describe(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, shape: Sequence[int] | None,
    stride: tuple[int, ...] | None, grad_placements: Sequence[Placement] | None,
) -> tuple[torch.Tensor, Spec, tuple[Placement, ...] | None]:  # fmt: skip
    """The arguments of `from_local`, checked, as what a DTensor is made of; and the layout of its gradient."""
    if isinstance(local, DTensor):
        raise RuntimeError("from_local: got a DTensor; it is distributed already, use redistribute()")
    if not isinstance(local, torch.Tensor):
        raise TypeError(
            f"from_local: local_tensor must be a torch.Tensor, got {type(local).__name__}\n"
            "  fix: DTensor.from_local(torch.as_tensor(part), mesh, placements)"
        )
    refuse_layout("from_local", local)
    if type(local) is not torch.Tensor:
        _compiled.refuse_export("from_local")
    for name, value in (("shape", shape), ("stride", stride)):
        if value is not None:
            whole = isinstance(value, Sequence) and all(isinstance(n, int | torch.SymInt) for n in value)
            what, fix = "a tuple of ints", "shape=(8, 4), stride=(4, 1)"
            expect("from_local", name, value if whole else None, Sequence, f"{what}, got {short(value)}", fix)
    if (shape is None) != (stride is None):
        raise RuntimeError(
            "from_local: pass both shape and stride of the global tensor, or neither\n"
            "  fix: shape=(8, 4), stride=(4, 1)"
        )
    placed = normalize_placements(placements, mesh, local.ndim, "from_local")
    if local.device.type not in (mesh.device_type, "meta"):
        local = local.to(mesh.device_type)
    if stride is not None:
        local = in_order(local, stride)
    spec = _spec_of_local(local, mesh, placed, shape, stride)
    if mesh.coord is None and local.shape != spec.local_shape:
        local = local.new_empty(spec.local_shape, requires_grad=local.requires_grad)
    if grad_placements is None:
        return local, spec, None
    grads = normalize_placements(grad_placements, mesh, local.ndim, "from_local(grad_placements=)")
    check_parts(spec, grads, "from_local")
    return local, spec, grads


def _spec_of_local(
    local: torch.Tensor, mesh: DeviceMesh, placed: tuple[Placement, ...],
    shape: Sequence[int] | None, stride: Sequence[int] | None,
) -> Spec:  # fmt: skip
    """Spec of the global tensor that this local part belongs to; RuntimeError when a given shape contradicts it."""
    if shape is None:
        sizes, strides = list(local.shape), list(local.stride())
        if type(local) is not torch.Tensor:  # in a graph sizes may be symbols: a spec has numbers, and guards hold them
            sizes, strides = list(map(int, sizes)), list(map(int, strides))
        for p, k in zip(placed, mesh.shape, strict=True):
            if isinstance(p, (Shard, StridedShard)):
                sizes[p.dim] *= k
                for d in range(len(strides)):
                    if d != p.dim and strides[d] >= strides[p.dim]:
                        strides[d] *= k
        return Spec.make(mesh, placed, sizes, strides, local.dtype)
    ndim = len(shape) if mesh.coord is None else local.ndim  # a rank outside the mesh may give any empty tensor
    if stride is None or len(shape) != ndim or len(stride) != ndim:
        raise RuntimeError(
            f"from_local: shape {shape} and stride {stride} must have the local tensor's {ndim} dims\n"
            "  fix: shape and stride of the global tensor"
        )
    spec = Spec.make(mesh, placed, shape, stride, local.dtype)
    if mesh.coord is not None and spec.local_shape != local.shape:
        raise RuntimeError(
            f"from_local: a global tensor of shape {list(shape)} laid out as {spec} gives this rank a part of "
            f"{list(spec.local_shape)}, but local_tensor has {list(local.shape)}; leave shape and stride out for even "
            "shards, or pass torch.chunk's parts"
        )
    return spec


def register_with_torch() -> None:
    """Tell torch's optimizers that list ops work on DTensors, and `torch.load(weights_only=True)` to make them."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    from dtensor import placement, spec
    from dtensor.mesh import device_mesh

    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if DTensor not in types:
            types.append(DTensor)
    torch.serialization.add_safe_globals(
        [_rebuild, device_mesh.rebuild_mesh, spec.make_spec, Shard, Replicate, Partial, placement.strided]
    )
