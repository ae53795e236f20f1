"""Restore a recorded state into the live objects, in place: `restore`.

`restore` unpickles the skeleton, in which live *anchors* (objects that existed when the loop was entered) take the
places of their numbers, and writes the recorded content into each anchor. `Restoration` has a method for each
*builder*: a function that a skeleton names, and that builds an object which the loop had created. Running a suspended
generator to its recorded yield changes objects: therefore a state with generators is restored in two passes.
"""

from __future__ import annotations

import importlib
import io
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.state import code_lookup
from rearview.state.capture import split
from rearview.state.codecs import (
    arrays,
    data_loaders,
    external_resources,
    suspended_generators,
    tensors,
)
from rearview.state.codecs.base import NAMES, Lost, layout_of, prelude
from rearview.state.codecs.containers import (
    CONTAINERS,
    READ_ONLY,
    WEAK_CONTAINERS,
    fill_set,
)
from rearview.state.codecs.instances_and_functions import AttributedKind, ObjectKind
from rearview.state.codecs.rng import write_global
from rearview.state.codecs.tensors import plain_access
from rearview.state.memory_blocks import Block, RestoredMemory
from rearview.state.object_numbers import Anchors
from rearview.state.stored_id_numbers import set_content


class Restoration:
    """One running restore, with a `build_…` method for each builder that a skeleton may name."""

    def __init__(self, anchors: Anchors, alive: Sequence[Any], memory: RestoredMemory) -> None:
        self.anchors = anchors
        self.alive = alive
        self.memory = memory
        self.afterwards: list[Callable[[], None]] = []
        """Functions to call when all objects exist."""
        self.generators: list[tuple[Any, Sequence[Any], dict[str, Any]]] = []
        """Generators, each with (status, number of the yield at which it was suspended) and its local variables."""
        self.loaders: list[tuple[Any, Any]] = []
        """Iterators of data loaders, each with the recorded draws (`data_loaders.loader_state`)."""
        self.new_generators: list[Any] = []
        """Generators that this pass created, in order."""
        self.addressed: dict[int, Any] = {}
        """`id` -> object whose `id` is part of the state, so that no equal object may replace the object."""
        self.driven: list[Any] = []
        """In the second pass: generators that the first pass created, and that were then run to their yields."""
        self.generator_states: dict[int, Sequence[Any]] = {}
        """`id` of a new generator -> (status, number of the yield at which it was suspended)."""

    def path(self, obj: object) -> str:
        """Return the path to an anchor, for messages."""
        number = self.anchors.index.get(id(obj))
        return "an object created in the loop" if number is None else self.anchors.path(number)

    def build_anchor(self, number: int) -> Any:
        """Return the anchor with this number: an array that `capture` recognised by its `id`."""
        return self.alive[number]

    def build_tensor(self, cls: type, *content: Any) -> Any:
        """Return a tensor that uses its recorded memory block."""
        *body, requires_grad, grad, extra = content
        return self._finish_tensor(
            cls, tensors.tensor_on(self.memory, body), requires_grad, grad, extra
        )

    def build_special_tensor(
        self, cls: type, form: Sequence[Any], requires_grad: bool, grad: Any, extra: Any
    ) -> Any:
        """Return a sparse, quantized or wrapper tensor; `form` is what `tensors.special_form` returned."""
        import torch

        wrapped = form[0] == "wrapper"
        tensor = tensors.from_special(form)
        return self._finish_tensor(
            torch.Tensor if wrapped else cls, tensor, requires_grad, grad, extra
        )

    def _finish_tensor(
        self, cls: type, tensor: Any, requires_grad: bool, grad: Any, extra: Any
    ) -> Any:
        import torch

        attrs, hooks, late_hooks, lost_graph, flags = extra or (
            {},
            None,
            None,
            False,
            (False, False),
        )
        if cls is not torch.Tensor:
            tensor = torch.Tensor._make_subclass(cls, tensor, requires_grad and not lost_graph)
        if flags[0]:
            torch._C._set_conj(tensor, True)
        if flags[1]:
            torch._C._set_neg(tensor, True)
        if lost_graph:
            tensor = tensors.with_lost_graph(tensor, lost_graph)
        elif requires_grad:
            tensor.requires_grad_(True)
        if grad is not None:
            self.afterwards.append(lambda: setattr(tensor, "grad", grad))
        if attrs:
            tensor.__dict__.update(attrs)
        if hooks is not None and not lost_graph:
            tensor._backward_hooks = hooks
        if late_hooks is not None:
            tensor._post_accumulate_grad_hooks = late_hooks
        return tensor

    def build_array(self, *body: Any) -> Any:
        """Return an array that uses its recorded memory block; `body` is what `arrays.describe` returned."""
        return arrays.array_on(self.memory, body)

    def build_small_array(self, *form: Any) -> Any:
        """Return a small array that shares its memory with no other array."""
        return arrays.small_array(*form)

    def build_function(
        self,
        location: code_lookup.CodeLocation,
        names: Sequence[str],
        cells: Sequence[Any],
        *own_values: Any,
    ) -> Any:
        """Return a function with the code at `location` in the running program, and with the recorded closure."""
        defaults, kwdefaults, attrs = own_values
        code = code_lookup.code_at(location)
        by_name = dict(zip(names, cells, strict=True))
        closure = tuple(by_name.get(name) or types.CellType() for name in code.co_freevars)
        module = vars(importlib.import_module(location[0]))
        function = types.FunctionType(code, module, code.co_name, defaults, closure)
        function.__kwdefaults__ = kwdefaults
        function.__dict__.update(attrs)
        return function

    def build_cell(self, running: bool = False) -> types.CellType:
        """Return an unbound closure variable, which `_pass` binds at the end.

        If the variable belonged to a `running` function, bind it to a `Lost`, because a new closure variable would not
        get the values that the running function assigns.
        """
        if running:
            return types.CellType(
                Lost("a variable of a running function, seen by one made in its loop")
            )
        return types.CellType()

    def build_method(self, function: Any, owner: Any) -> Any:
        """Return the bound method of `owner` that calls `function`."""
        return types.MethodType(function, owner)

    def build_weakref(self, target: Any) -> Any:
        """Return a weak reference to `target`: a WeakMethod for a bound method, to which nothing else refers."""
        if isinstance(target, types.MethodType):
            return weakref.WeakMethod(target)
        return weakref.ref(_Nothing() if target is None else target)

    def build_proxy(self, target: Any) -> Any:
        """Return a weak proxy of `target`."""
        return weakref.proxy(target)

    def build_address(self, target: Any) -> int:
        """Return the `id` of `target` in this process."""
        self.addressed[id(target)] = target
        return id(target)

    def build_weak(self, cls: type) -> Any:
        """Return an empty weak container of the class `cls`."""
        return cls()

    def build_fill_weak(self, obj: Any, content: Any) -> None:
        """Set the recorded content of a weak container."""
        kind = next(kind for base, kind in WEAK_CONTAINERS.items() if isinstance(obj, base))
        kind.write(obj, content, self)

    def build_instance(self, cls: type, shared: str = "") -> Any:
        """Return an instance of `cls` without attributes or items.

        If `shared` is not empty, the class attribute of this name is the `__dict__` of all instances.
        """
        base: Any = layout_of(cls).base
        instance = base.__new__(cls)
        if shared:
            instance.__dict__ = getattr(cls, shared)
        return instance

    def build_fill(self, obj: Any, content: Any) -> None:
        """Set the attributes and items of an instance."""
        layout = layout_of(type(obj))
        inner = CONTAINERS.get(layout.base)
        kind = ObjectKind(layout) if inner is None else AttributedKind(inner, layout)
        kind.write(obj, content, self)

    def build_file(self, state: Sequence[Any] | None) -> Any:
        """Return a file opened again at its recorded position; if `state` is None, a closed file."""
        if state is None:
            import io

            closed = io.TextIOWrapper(io.BytesIO())  # the next capture must find a closed file
            closed.close()
            return closed
        return external_resources.reopen(state)

    def build_lock(self, name: str) -> Any:
        """Return a new lock that is not held; `name` is the name of its class."""
        return threading.RLock() if name == "RLock" else threading.Lock()

    def build_module(self, name: str) -> Any:
        """Return the module with this name."""
        return importlib.import_module(name)

    def build_named(self, module: str, name: str) -> Any:
        """Return the attribute of `module` that has the dotted name `name`."""
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def build_view(self, mapping: dict[Any, Any], name: str) -> Any:
        """Return a view of a mapping: its keys, values or items, or a read-only proxy of the mapping."""
        return types.MappingProxyType(mapping) if name == READ_ONLY else getattr(mapping, name)()

    def build_torch_generator(self, device: str, state: bytes) -> Any:
        """Return a random generator of torch on `device`, in the recorded state."""
        import torch

        generator = torch.Generator(device)
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return generator

    def build_generator(self) -> Iterator[None]:
        """Return a generator that has ended."""
        generator = (None for _ in ())
        next(
            generator, None
        )  # end the generator: the next capture would otherwise store it as not started
        return generator

    def build_live_generator(
        self,
        function: Any,
        arguments: Sequence[tuple[str, Any]],
        count: int,
        state: Sequence[Any],
    ) -> Any:
        """Return a new generator of `function`; in the second pass, the generator that the first pass created."""
        driven = self.driven
        generator = (
            driven.pop(0)
            if driven
            else suspended_generators.make_generator(function, arguments, count)
        )
        self.new_generators.append(generator)
        self.generator_states[id(generator)] = state
        return generator

    def build_fill_generator(self, obj: Any, values: dict[str, Any]) -> None:
        """Append a generator, with its recorded local variables, to `generators`; `restore` runs it to its yield."""
        self.generators.append((obj, self.generator_states[id(obj)], values))

    def build_walk(self) -> suspended_generators.LoopIterator:
        """Return the iterator of a loop in a generator, without the source from which the iterator takes items."""
        return suspended_generators.LoopIterator(None)

    def build_fill_walk(
        self, obj: suspended_generators.LoopIterator, content: Sequence[Any]
    ) -> None:
        """Set the source of the iterator and the number of items that the loop has taken."""
        source, count = content
        obj.continue_with(source, count)

    def build_loader(self, cls: type) -> Any:
        """Return the iterator of a data loader, without attributes."""
        return object.__new__(cls)

    def build_fill_loader(self, obj: Any, content: Sequence[Any]) -> None:
        """Set the attributes of a data loader's iterator; append it to `loaders` with the random numbers that it drew."""
        data_loaders.LOADER.write(obj, content, self)

    def build_lost(self, reason: str) -> Lost:
        """Return a `Lost`, which takes the place of an object that was not captured."""
        return Lost(reason)


class _Nothing:
    """Target of a weak reference whose target had been deleted when the state was recorded."""


BufferReaders = tuple[Callable[[str], Any], Callable[[str, Any], None] | None]
"""The parameters `buffers` and `into` of `restore`."""


class StateUnpickler(pickle.Unpickler):
    """Unpickles the stream of a skeleton. A number in the stream means an item of `objects`: builders, then anchors."""

    def __init__(self, stream: io.BytesIO, objects: Sequence[Any], buffers: Iterator[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._objects: Sequence[Any] = objects

    def forget(self) -> None:
        """Drop all references: newer versions of Python free an unpickler only at the next garbage collection."""
        self._objects = ()
        self.memo.clear()

    def persistent_load(self, pid: Any) -> Any:
        """Return the builder or live anchor with the number `pid`."""
        return self._objects[pid]


def restore(
    anchors: Anchors,
    roots: Mapping[str, object],
    skeleton: bytes,
    buffers: Callable[[str], Any],
    into: Callable[[str, Any], None] | None = None,
) -> dict[str, object]:
    """Write a recorded state into the live anchors, and return the recorded values of the variables, by name.

    `roots` maps the names of the variables that are bound now to their values. `buffers` returns the bytes of the
    buffer with a key. `into(key, memory)`, if given, reads the bytes of a buffer directly into `memory`.

    The result lacks variables that were unbound when the state was captured. After a StateError the live objects
    are partly restored: start the program again.
    """
    header, stream = split(skeleton)
    if header["anchors"] != len(anchors):
        raise StateError(
            f"The checkpoint was taken of {header['anchors']} objects, and {len(anchors)} exist now: "
            "the set-up differs. Replay from the start instead.",
            slug="state-anchors",
        )
    with plain_access():
        return _restore(anchors, roots, header, stream, (buffers, into))


def _restore(
    anchors: Anchors,
    roots: Mapping[str, object],
    header: dict[str, Any],
    stream: memoryview,
    readers: BufferReaders,
) -> dict[str, object]:
    values, first_pass = _pass(anchors, roots, header, stream, readers)
    if not first_pass.generators and not first_pass.loaders:
        return values
    # running a generator to its yield runs code of the program, which changes objects: restore the state a second time
    for obj, state, _ in first_pass.generators:
        suspended_generators.drive_to_yield(obj, state, getattr(obj, "__qualname__", "?"))
    for obj, draws in first_pass.loaders:
        data_loaders.draw(obj, draws)
    values, second_pass = _pass(anchors, roots, header, stream, readers, first_pass)
    for (old, _), (new, draws) in zip(first_pass.loaders, second_pass.loaders, strict=True):
        data_loaders.hand_over(old, new, draws)
    for obj, state, local_values in second_pass.generators:
        if state[0] == "suspended":
            suspended_generators.set_locals(obj, local_values)
    return values


def _pass(
    anchors: Anchors,
    roots: Mapping[str, object],
    header: dict[str, Any],
    stream: memoryview,
    readers: BufferReaders,
    first_pass: Restoration | None = None,
) -> tuple[dict[str, object], Restoration]:
    """Unpickle the state and write it into the live objects; do not run generators or samplers.

    Return the recorded values of the variables, and the `Restoration` with the generators and loaders.
    """
    alive = anchors.alive(roots)
    table = [Block(*row) for row in header["blocks"]]
    buffers, into = readers
    memory = RestoredMemory(table, buffers, lambda number: alive[number], anchors.path, into)
    restoring = Restoration(anchors, alive, memory)
    if first_pass is not None:
        restoring.driven = list(first_pass.new_generators)
    memory.fill_live_memory()
    try:
        values, contents, classes, rng, cells = _read(header, stream, alive, restoring, buffers)
    except StateError:
        raise
    except Exception as exc:
        raise StateError(
            f"The state cannot be read back ({type(exc).__name__}: {exc}). "
            "Replay from an earlier checkpoint.",
            slug="state-read",
        ) from exc
    for number, cls in classes:
        object.__setattr__(alive[number], "__class__", cls)
    _keep_texts(alive, contents, restoring.addressed)
    _write(anchors, alive, contents, restoring)
    for cell, cell_values in cells:
        if cell_values:
            cell.cell_contents = cell_values[0]
    for action in restoring.afterwards:
        action()
    if rng is not None:
        write_global(rng)
    alive.clear()
    return dict(values), restoring


def _read(
    header: dict[str, Any],
    stream: memoryview,
    alive: Sequence[Any],
    restoring: Restoration,
    buffers: Callable[[str], Any],
) -> tuple[Any, ...]:
    """Unpickle a skeleton: return (variables, contents, changed classes, random state, values of closure variables)."""
    builders = [getattr(restoring, f"build_{name}") for name in NAMES]
    outside = (bytearray(buffers(key)) for key in header["outside"])
    objects = [*builders, *alive]
    data = io.BytesIO(prelude(len(objects)) + bytes(stream))
    unpickler = StateUnpickler(data, objects, outside)
    body = unpickler.load()
    values, contents, classes, rng = body
    cells: list[Any] = []
    sets: list[Any] = []
    addresses: list[Any] = []
    later_batches = {"cells": cells, "contents": contents, "sets": sets, "addresses": addresses}
    while (batch := unpickler.load()) is not None:
        later_batches[batch[0]].extend(batch[1])
    for live, content in addresses:
        if not set_content(live, content):
            restoring.build_fill(live, content)
    for live, recipe in sets:
        fill_set(live, recipe)
    unpickler.forget()
    objects.clear()
    return values, contents, classes, rng, cells


def _keep_texts(
    alive: Sequence[Any], contents: Sequence[Any], addressed: Mapping[int, Any]
) -> None:
    """Replace recorded texts in `contents` by equal live texts, so that equal texts are one object, as in the run.

    Example: one text is a dict key and also an item of a list. A restore keeps the live key. If the list got the
    unpickled text, which is another object, a pickle that the program writes would contain the text twice, and would
    differ from the file that an uninterrupted run writes. Texts in `addressed` (`id` -> text) are not replaced: their
    `id` is part of the state.
    """
    live_texts: dict[int, str] = {}
    holders = []
    for _, numbers, group in contents:
        for position, (number, content) in enumerate(zip(numbers, group, strict=True)):
            live = alive[number]
            if type(content) is list and type(live) is list:
                pairs: Iterable[tuple[Any, Any]] = zip(content, live, strict=False)
            elif type(content) is dict and all(type(key) is str for key in content):
                live_items = live if isinstance(live, dict) else getattr(live, "__dict__", None)
                if not isinstance(live_items, dict):
                    continue
                pairs = [
                    *zip(content, live_items, strict=False),
                    *((new, dict.get(live_items, key)) for key, new in content.items()),
                ]
            else:
                continue
            holders.append((group, position))
            for new, old in pairs:
                if type(new) is str and type(old) is str and new is not old and new == old:
                    live_texts.setdefault(id(new), old)
    for number in addressed:
        live_texts.pop(number, None)
    for group, position in holders if live_texts else ():
        content = group[position]
        if type(content) is list:
            content[:] = [live_texts.get(id(item), item) for item in content]
        else:
            group[position] = {
                live_texts.get(id(key), key): live_texts.get(id(item), item)
                for key, item in content.items()
            }


def _write(
    anchors: Anchors, alive: Sequence[Any], contents: Sequence[Any], restoring: Restoration
) -> None:
    for last in (False, True):
        for _, numbers, group in contents:
            for number, content in zip(numbers, group, strict=True):
                obj, kind = alive[number], anchors.kinds[number]
                if kind.restored_last is not last or obj is None:
                    continue
                try:
                    kind.write(obj, content, restoring)
                except StateError:
                    raise
                except Exception as exc:
                    raise StateError(
                        f"{anchors.path(number)} cannot be given its recorded state "
                        f"({type(exc).__name__}: {exc}). Replay from the start of the loop.",
                        slug="state-write",
                    ) from exc
