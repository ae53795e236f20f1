"""Codec of torch tensors: captures their storages, which views and tied weights share.

An *anchor* is an object that existed when the loop was entered (`object_numbers`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, refuse
from rearview.state.memory_blocks import PROCESS_MEMORY, SMALL, Blocks, RestoredMemory, bytes_of

PlainReader = Callable[[Any, int], tuple[Any, ...] | None]
"""Type of the function that `plain_reader` returns; its arguments are a tensor and the number of its anchor, or -1."""


def plain_access() -> AbstractContextManager[Any]:
    """Return a context manager in whose body instances of tensor subclasses behave like plain torch tensors."""
    torch = sys.modules.get("torch")
    make_context = getattr(getattr(torch, "_C", None), "DisableTorchFunctionSubclass", nullcontext)
    context: AbstractContextManager[Any] = make_context()
    return context


def _host_bytes(storage: Any) -> Any:
    return bytes_of(storage if storage.device.type == "cpu" else storage.cpu())


def memory_of(anchors: Iterable[Any]) -> int:
    """Return how many bytes of memory the plain CPU tensors among `anchors` use; a shared storage counts once."""
    torch: Any = sys.modules.get("torch")
    plain = {getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)}
    sizes: dict[int, int] = {}
    for obj in anchors:
        # checked by type, so that no method of a user's object is called
        if type(obj) in plain and not is_special(obj) and obj.is_cpu:
            storage = obj.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def describe(tensor: Any, blocks: Blocks, anchor_number: int) -> tuple[Any, ...]:
    """Return (number of its memory block, dtype, shape, stride, offset) of a strided tensor.

    `anchor_number` is the number of the tensor as an anchor, or -1. The memory block is added to `blocks` if it is new.
    """
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if tensor.is_cpu:
        address, device = storage.data_ptr(), "cpu"
    elif tensor.is_meta:
        address, device = 0, "meta"
    else:
        address, device = storage.data_ptr(), str(tensor.device)
    block = blocks.index.get((address, nbytes)) if address else None
    if block is None:
        block = blocks.add(
            address,
            nbytes,
            lambda: _host_bytes(storage),
            anchor_number=anchor_number,
            device=device,
            likely_unchanged=anchor_number >= 0 and not tensor.requires_grad,
        )
    # tensors of equal shape share one tuple, which pickle then writes once
    shapes, shape, stride = blocks.shapes, tensor.shape, tensor.stride()
    if shape not in shapes:
        shapes[shape] = tuple(shape)
    stride = shapes.setdefault(stride, stride)
    return block, tensor.dtype, shapes[shape], stride, tensor.storage_offset()


def plain_reader(blocks: Blocks) -> PlainReader:
    """Return a function that reads a plain leaf tensor on the CPU, and returns None for any other tensor.

    The function returns (number of the memory block, dtype, shape, stride, offset, requires_grad, gradient). It is
    written for speed: training waits while the function reads thousands of tensors.
    """
    torch = sys.modules["torch"]
    classes, dtypes, strided = {torch.Tensor, torch.nn.Parameter}, _plain_dtypes(), torch.strided
    index, table, shapes = blocks.index, blocks.table, blocks.shapes

    def read(tensor: Any, anchor_number: int) -> tuple[Any, ...] | None:
        dtype, requires_grad = tensor.dtype, tensor.requires_grad
        if (
            type(tensor) not in classes
            or dtype not in dtypes
            or not tensor.is_cpu
            or tensor.layout is not strided
            or (requires_grad and not tensor.is_leaf)
            or tensor._backward_hooks is not None
            or tensor._post_accumulate_grad_hooks is not None
            or tensor.__dict__
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        location = address, nbytes = storage.data_ptr(), storage.nbytes()
        block = index.get(location)
        if block is None:
            if not address or not nbytes:
                return None
            if nbytes <= SMALL:
                block = index[location] = len(table)
                table.append(
                    (None, nbytes, PROCESS_MEMORY[address : address + nbytes], anchor_number, "cpu")
                )
            else:
                block = blocks.add_host(
                    location,
                    storage,
                    anchor_number,
                    likely_unchanged=anchor_number >= 0 and not requires_grad,
                )
        # tensors of equal shape share one tuple, which pickle then writes once
        size, stride = tensor.shape, tensor.stride()
        shape = shapes.get(size)
        if shape is None:
            shape = shapes[size] = tuple(size)
        stride = shapes.setdefault(stride, stride)
        return block, dtype, shape, stride, tensor.storage_offset(), requires_grad, tensor.grad

    return read


@functools.cache
def _plain_dtypes() -> frozenset[Any]:
    torch = sys.modules["torch"]
    names = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
    return frozenset(getattr(torch, name) for name in names.split())


def operation_of(tensor: Any) -> str:
    """Return the name of the operation that computed a tensor, as the `repr` of the tensor shows it."""
    try:
        operation = tensor.grad_fn
    except RuntimeError:  # a view that can no longer be differentiated
        return "Invalid"
    name = type(operation).__name__
    # all operations without a Python class have the class CppFunction
    return str(operation.name()).rpartition("::")[2] if name == "CppFunction" else name


def extras(tensor: Any, *, lost_graph: str) -> tuple[Any, ...] | None:
    """Return the attributes, hooks and flags of a tensor (the *extras*), or None if there are none, which is usual.

    `lost_graph` is the name of the operation that computed the tensor, if its autograd graph cannot be captured, or
    empty.
    """
    attrs, hooks = tensor.__dict__, tensor._backward_hooks
    late_hooks = None if lost_graph else tensor._post_accumulate_grad_hooks
    conj, neg = tensor.dtype.is_complex and tensor.is_conj(), tensor.is_neg()
    if lost_graph or conj or neg or attrs or hooks is not None or late_hooks is not None:
        return dict(attrs), hooks, late_hooks, lost_graph or False, (conj, neg)
    return None


def special_form(tensor: Any) -> tuple[Any, ...] | None:
    """Return (form, parts…) of a wrapper, sparse or quantized tensor, or None for any other tensor."""
    import torch

    cls = type(tensor)
    if hasattr(cls, "__tensor_flatten__"):
        names, meta = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        return "wrapper", cls, inner, meta, tuple(tensor.shape), tensor.stride()
    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        return "coo", plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        plain = tensor.detach()
        return "rows", plain.crow_indices(), plain.col_indices(), plain.values(), *_form(plain)
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        plain = tensor.detach()
        return "columns", plain.ccol_indices(), plain.row_indices(), plain.values(), *_form(plain)
    if tensor.is_quantized:
        if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
            return (
                "quantized",
                _by_value(tensor.int_repr()),
                tensor.q_scale(),
                tensor.q_zero_point(),
            )
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        parts = (_by_value(tensor.int_repr()), _by_value(scales), _by_value(zeros))
        return "channels", *parts, tensor.q_per_channel_axis()
    return None


def _by_value(tensor: Any) -> tuple[Any, ...]:
    # torch builds a quantized tensor from values, so its memory cannot be filled later
    return tensor.contiguous().numpy().tobytes(), tensor.dtype, tuple(tensor.shape)


def _from_value(form: Sequence[Any]) -> Any:
    import torch

    data, dtype, shape = form
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _form(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.layout


def from_special(form: Sequence[Any]) -> Any:
    """Return a tensor, given the parts that `special_form` returned."""
    import torch

    match form:
        case ("wrapper", cls, inner, meta, shape, stride):
            return cls.__tensor_unflatten__(inner, meta, torch.Size(shape), stride)
        case ("coo", indices, values, shape, coalesced):
            # skip torch's checks, which would read indices whose memory is filled later
            return torch.sparse_coo_tensor(
                indices, values, shape, is_coalesced=coalesced, check_invariants=False
            )
        case ("rows" | "columns", outer, inner, values, shape, layout):
            return torch.sparse_compressed_tensor(
                outer, inner, values, shape, layout=layout, check_invariants=False
            )
        case ("quantized", ints, scale, zero):
            return torch._make_per_tensor_quantized_tensor(_from_value(ints), scale, zero)
        case ("channels", ints, scales, zeros, axis):
            parts = (_from_value(ints), _from_value(scales), _from_value(zeros))
            return torch._make_per_channel_quantized_tensor(*parts, axis)
    raise StateError(
        f"This version of Rearview does not know the tensor form {form[0]!r}. "
        "Replay with the version that recorded the run.",
        slug="state-format",
    )


def tensor_on(memory: RestoredMemory, body: Sequence[Any]) -> Any:
    """Return a new tensor, given its description `body` from `describe`; the tensor uses the block in `memory`."""
    import torch

    block, dtype, shape, stride, offset = body
    device = memory.table[block].device
    tensor = torch.empty(0, dtype=dtype, device=device)
    return tensor.set_(memory.storage(block), offset, shape, stride)


def with_lost_graph(value: Any, operation: str | bool = True) -> Any:
    """Return a tensor equal to `value`, with an autograd graph that raises StateError when a gradient flows through it.

    A tensor with a graph, such as the last loss, exists at most boundaries, and programs rarely use it again. Its
    value can be restored, and its graph cannot. A program that differentiates through the tensor must get an error, and
    not a silently wrong gradient. The `repr` of the tensor shows `operation`, the name of the operation that computed
    the recorded tensor; older checkpoints have True in place of this name.
    """
    import torch

    with torch.enable_grad():
        return _lost_graph_function(operation).apply(torch.zeros((), requires_grad=True), value)


@functools.cache
def _lost_graph_function(operation: str | bool) -> Any:
    """Return the autograd function, a class, that takes the place of a graph that could not be captured."""
    import torch

    class LostGraph(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_ctx: Any, _source: Any, value: Any) -> Any:
            return value.detach()

        @staticmethod
        def backward(_ctx: Any, *_grads: Any) -> Any:
            refuse(
                StateError(
                    "A gradient flows through the iteration boundary at which this replay started, "
                    "and an autograd graph cannot be saved. Replay from the start of the loop.",
                    slug="state-graph",
                )
            )

    if isinstance(operation, str):
        LostGraph._backward_cls.__name__ = operation
    return LostGraph


class TensorKind(Kind):
    """Codec of torch tensors that existed when the loop was entered."""

    name = "tensor"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield steps to the gradient, hooks, attributes, parts of a wrapper tensor, and a class that is local."""
        if obj.is_leaf and obj.grad is not None:
            yield PathStep(".", "grad", obj.grad)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(obj, name) if obj.is_leaf or name == "_backward_hooks" else None
            if hooks is not None:
                yield PathStep(".", name, hooks)
        for name, value in obj.__dict__.items():
            yield PathStep(".", name, value)
        if hasattr(type(obj), "__tensor_flatten__"):
            for name in obj.__tensor_flatten__()[0]:
                yield PathStep(".", name, getattr(obj, name))
        if rules.is_local(type(obj)):
            yield PathStep("<", "class", type(obj))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (description, requires_grad, gradient, extras) of each tensor; None for an unreadable tensor.

        The description is what `describe` returns, or `special_form` if the tensor `is_special`.
        """
        read, index = capturing.plain_tensor, capturing.anchors.index
        contents: list[Any] = []
        for obj in objs:
            try:
                plain = read(obj, index[id(obj)])
            except Exception:
                plain = None
            if plain is None:
                contents.append(self._read(obj, capturing))
            else:
                contents.append((plain[:5], plain[5], plain[6], None))
        return contents

    @staticmethod
    def _read(obj: Any, capturing: Capturing) -> tuple[Any, ...] | None:
        try:
            leaf = obj.is_leaf
            lost_graph = "" if leaf or capturing.anchors.has_same_graph(obj) else operation_of(obj)
            form = special_form(obj) if is_special(obj) else None
            anchor_number = capturing.anchors.index[id(obj)]
            body = describe(obj, capturing.blocks, anchor_number) if form is None else form
            grad = obj.grad if leaf else None
            return body, obj.requires_grad, grad, extras(obj, lost_graph=lost_graph)
        except Exception as exc:
            capturing.report_missing(obj, f"the tensor cannot be read ({exc})")
            return None

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Restore the memory of the tensor, then its gradient, hooks and attributes."""
        import torch

        if content is None:
            return
        body, requires_grad, grad, extra = content
        attrs, hooks, late_hooks, lost_graph, _ = extra or ({}, None, None, False, None)
        with torch.no_grad():
            if isinstance(body[0], str):
                _write_special(obj, body)
            else:
                _write_body(obj, body, restoring.memory)
        if lost_graph:
            _attach_lost_graph(obj, restoring)
        elif obj.is_leaf:
            if obj.requires_grad != requires_grad:
                obj.requires_grad_(requires_grad)
            if obj.grad is not grad:
                obj.grad = grad
            if hooks is not obj._backward_hooks:
                obj._backward_hooks = hooks
            if late_hooks is not obj._post_accumulate_grad_hooks:
                obj._post_accumulate_grad_hooks = late_hooks
        if obj.__dict__ or attrs:
            obj.__dict__.clear()
            obj.__dict__.update(attrs)


def is_special(tensor: Any) -> bool:
    """Return True if a tensor is sparse, quantized, or a wrapper of other tensors."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return True
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    return hasattr(cls, "__tensor_flatten__")


def _attach_lost_graph(obj: Any, restoring: Restoring) -> None:
    import torch

    def later() -> None:
        value = obj.detach().clone()
        obj.detach_()
        with torch.enable_grad():
            obj.copy_(with_lost_graph(value))

    restoring.afterwards.append(later)


def _write_body(obj: Any, body: Sequence[Any], memory: RestoredMemory) -> None:
    block, dtype, shape, stride, offset = body
    is_in_place = (
        obj.dtype == dtype
        and tuple(obj.shape) == shape
        and obj.stride() == stride
        and obj.storage_offset() == offset
        and obj.untyped_storage()._cdata == memory.storage(block)._cdata
    )
    if not is_in_place:
        obj.data = tensor_on(memory, body)


def _write_special(obj: Any, form: Sequence[Any]) -> None:
    if form[0] == "wrapper":
        for name, inner in form[2].items():
            if getattr(obj, name) is not inner:
                setattr(obj, name, inner)
        return
    obj.data = from_special(form)
