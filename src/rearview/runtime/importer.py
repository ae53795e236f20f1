"""Import hook: load the project's modules with their loops instrumented.

Instrumented code calls functions of Rearview by names that Rearview adds to Python's builtins, so that the program's
globals stay unchanged. But joblib, Ray and Dask send functions of `__main__` to other processes as bytecode,
with the globals that these functions use. Once joblib, Ray or Dask is loaded, the names are put into the globals of
instrumented modules too, and their values unpickle as plain Python functions: the other processes need no Rearview.

`ImportTimes` measures how long a program waits for installed libraries.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import importlib.util
import itertools
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from time import perf_counter
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rearview.runtime.loops import LoopHistory, direct_iterator
from rearview.runtime.sandbox.entropy import after_import
from rearview.runtime.sandbox.file_view import FileView, PathUse
from rearview.source.cells import ENTER, cell_starts, has_markers, mark_cells, split_into_cells
from rearview.source.instrument import HOOK, ITER, PARTS, WALK, instrument, without_targets
from rearview.source.isolate_probes import PROBE_HOOK, TRACK, WITHOUT_RANDOM, Places, isolate_probes
from rearview.source.library_loops import LOOPS, loops_of
from rearview.state.codecs.data_loaders import watch_loaders
from rearview.state.codecs.suspended_generators import LoopIterator
from rearview.state.object_numbers import without_weak_references

if TYPE_CHECKING:
    from rearview.runtime.base_session import Session


SHORTEST = 0.01
"""Imports that took fewer seconds are not reported."""


class ImportTimes:
    """Measures how long the program's imports of installed libraries take, including the imports that these make."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Module -> seconds that its import took."""
        self._busy = False

    def watch(self, name: str, loader: Any) -> None:
        """Measure how long `loader` takes to execute the module `name`, unless another library is importing it."""
        if self._busy or type(loader) not in {SourceFileLoader, ExtensionFileLoader}:
            return
        execute = loader.exec_module

        def load(module: ModuleType) -> None:
            self._busy, was_busy = True, self._busy
            begun = perf_counter()
            try:
                execute(module)
            finally:
                self._busy = was_busy
                if not was_busy:
                    self.seconds[name] = perf_counter() - begun
                if vars(loader).get("exec_module") is load:
                    del loader.exec_module

        loader.exec_module = load

    def facts(self) -> dict[str, float]:
        """Return module -> rounded seconds of its import, for each import of at least `SHORTEST` seconds."""
        return {
            name: round(seconds, 3) for name, seconds in self.seconds.items() if seconds >= SHORTEST
        }


_PLAIN_SOURCES = {
    HOOK: (
        "type('loop', (), {"
        "'__call__': lambda self, site, items:"
        " __import__('itertools').repeat(None) if items is None else"
        " map(next, __import__('itertools').repeat(items)),"
        " 'scalar': staticmethod(lambda name, value: None)})()"
    ),
    PARTS: "lambda site, numbers: (numbers,)",
    WALK: (
        "lambda items: items if items is None or type(items) is type(_ for _ in ()) else"
        " map(next, __import__('itertools').repeat(items))"
    ),
    PROBE_HOOK: (
        "type('probe', (), {"
        "'__call__': lambda self, *_: __import__('contextlib').nullcontext(),"
        f" {WITHOUT_RANDOM!r}: staticmethod(lambda *_: __import__('contextlib').nullcontext()),"
        f" {TRACK!r}: staticmethod(lambda *_, **__: None)}})()"
    ),
}
"""Name of a function that instrumented code calls -> source of a plain function for processes without Rearview."""

_PICKLERS = ("cloudpickle", "joblib.externals.cloudpickle", "ray.cloudpickle", "dill")
"""Libraries that pickle a function as bytecode, to send it to other processes."""

_offered: dict[str, Any] = {}
"""Name that instrumented code uses -> value that Rearview provides for it."""
_modules: list[weakref.ref[ModuleType]] = []
"""Weak references to the modules whose code is instrumented."""
_senders: set[str] = set()
"""Libraries of `_PICKLERS` that the program has loaded."""


class _Named(partial[Any]):
    """A function of Rearview that unpickles as a plain Python function: the other process may not have Rearview."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (_PLAIN_SOURCES[self.name],)

    name: str


def watch_picklers() -> None:
    """From now on, notice when the program imports a library that sends functions to other processes.

    From then on, the names that instrumented code uses are put into the globals of the program's modules.
    """
    for name in _PICKLERS:
        after_import(name, _on_pickler_loaded)


def offer(name: str, call: Callable[..., Any], **attributes: Any) -> None:
    """Let instrumented code call `call` by `name`, also code that is loaded already.

    `attributes` become attributes of the function that instrumented code sees.
    """
    named = _Named(call)
    vars(named).update(name=name, **attributes)
    offer_value(name, named)


def offer_value(name: str, value: Any) -> None:
    """Let instrumented code use `value`, which must be picklable, by `name`."""
    _offered[name] = builtins.__dict__[name] = value
    if _senders:
        _put_names_into_globals()


def offer_plain_functions() -> None:
    """Let instrumented code run as under plain Python from now on: the interpreter is about to end.

    The plain functions need no other module. They are put into the program's globals, because the ending interpreter
    removes Rearview's names from the builtins before it clears the globals.
    """
    offer(HOOK, _loop_plainly, scalar=_ignore)
    offer(PARTS, _range_plainly)
    offer(WALK, _walk_plainly)
    _put_names_into_globals()


def _loop_plainly(_site: str, items: Any, repeat: Callable[[None], Any] = itertools.repeat) -> Any:
    return repeat(None) if items is None else items


def _range_plainly(_site: str, numbers: Any) -> Any:
    return (numbers,)


def _walk_plainly(items: Any) -> Any:
    return items


def _ignore(_name: str, _value: Any) -> None:
    return None


def register_module(module: ModuleType) -> None:
    """Remember `module`, which is about to execute instrumented code, so that its globals can get the needed names."""
    _modules.append(weakref.ref(module))
    if _senders:
        _put_names_into_globals()


def _on_pickler_loaded(library: ModuleType) -> None:
    _senders.add(library.__name__)
    _put_names_into_globals()


def _put_names_into_globals() -> None:
    for reference in _modules:
        module = reference()
        if module is not None:
            vars(module).update(_offered)


@dataclass
class Compiler:
    """Compiles the project's source with its loops instrumented."""

    session: Session
    autolog: bool = False
    watched: bool = True
    """Whether loops are instrumented; False under plain `python`, where the program names loops with `rearview.loop`."""
    ids: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """File -> line -> id that the loop in this line has in the recorded version."""
    probes: Mapping[str, Places] = field(default_factory=dict)
    """File -> positions of its probes, which are wrapped so that they leave the program's state unchanged."""
    sources: Mapping[str, bytes] = field(default_factory=dict)
    """File -> recorded source that is executed in place of the file in the work tree."""
    view: FileView | None = None
    """Translates file paths in a replay; None when recording."""
    import_times: ImportTimes | None = None
    """Measures the imports of libraries; None in a replay or a resumed run."""
    cells: str = ""
    """Path, relative to the project, of the script that is divided into cells; empty if no script is."""
    recorded: Path | None = None
    """Folder with the recorded source of the files that contain probes; None if the program is not replayed."""

    def compile(self, data: bytes, path: str) -> CodeType:
        """Return the instrumented code of the source file `path` with the bytes `data`; raise what Python would raise."""
        return self.code(self.instrumented(data, path), path)

    def code(self, tree: ast.Module, path: str, flags: int = 0) -> CodeType:
        """Return the compiled code of `tree`, a syntax tree from `instrumented`.

        `flags` are the compiler flags that `from __future__` imports set.
        """
        code: CodeType = compile(tree, path, "exec", flags, dont_inherit=True)
        return without_targets(code) if self.watched else code

    def instrumented(self, data: bytes, path: str) -> ast.Module:
        """Return the syntax tree of the source file `path` with its loops instrumented and its probes wrapped."""
        relative = os.path.relpath(os.path.realpath(path), self.session.root)
        data = self.sources.get(relative, data)
        tree = _parse(data, path)
        shielded = self.probes.get(relative)
        if shielded:
            tree = isolate_probes(tree, shielded)
        if self.watched:
            ids = self.ids.get(relative)
            for site in instrument(tree, relative, ids=ids, autolog=self.autolog):
                self.session.histories.setdefault(site.id, LoopHistory(site))
        if self.watched and relative == self.cells:
            self._mark_cells(tree, relative, data)
        if self.view is not None or relative in self.sources:
            # tracebacks must show the source that runs, which differs from the file in the work tree
            lines = importlib.util.decode_source(data).splitlines(keepends=True)
            linecache.cache[path] = (len(data), None, lines, path)
        return tree

    def _mark_cells(self, tree: ast.Module, relative: str, data: bytes) -> None:
        """Insert a call of `Session.enter_cell` into `tree` before each cell of the script.

        A script without cell markers (such as `# %%`) is divided into cells only if points begin with the cell.
        """
        if self.session.cells_in_points or has_markers(importlib.util.decode_source(data)):
            offer_value(ENTER, self.session.enter_cell)
            mark_cells(tree, self._cell_starts(relative, data))
            self.session.begin_cells(
                [cell.text for cell in split_into_cells(importlib.util.decode_source(data))]
            )

    def _cell_starts(self, relative: str, data: bytes) -> dict[int, int]:
        recorded_file = self.recorded / relative if self.recorded is not None else None
        recorded = (
            recorded_file.read_bytes()
            if recorded_file is not None and recorded_file.is_file()
            else data
        )
        return cell_starts(
            importlib.util.decode_source(recorded), importlib.util.decode_source(data)
        )

    def compile_library(self, data: bytes, path: str, module: str) -> CodeType:
        """Return the code of the module `module` of a library with its training loops instrumented."""
        tree = ast.parse(data, path)
        if self.watched:
            for site in instrument(tree, module, ids=loops_of(module, tree), only=True):
                self.session.histories.setdefault(site.id, LoopHistory(site))
            self.session.loop_files.add(path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return without_targets(code) if self.watched else code


def _parse(data: bytes, path: str) -> ast.Module:
    # not `ast.parse`: its frame would appear in the traceback of a program that does not parse
    tree: Any = compile(data, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


class _Loader(SourceFileLoader):
    """Compiles a project file each time it is loaded: instrumented code is never written to the bytecode cache.

    The file is also compiled and cached as Python does, so that the cache is equal to one made without Rearview.
    Python itself then reports a file that cannot be compiled, with its own traceback.
    """

    def __init__(self, fullname: str, path: str, compiler: Compiler) -> None:
        super().__init__(fullname, path)
        self._compiler = compiler

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        register_module(module)
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        if self._compiler.view is None:
            super().get_code(fullname)
        path = self.get_filename(fullname)
        return self._compiler.compile(self.get_data(path), path)

    def get_data(self, path: str) -> bytes:
        view = self._compiler.view
        return super().get_data(path if view is None else view.real(path, PathUse.RUN))


# A program sees the loader's name in `__spec__` and in reprs, so the loader is named like Python's own loader.
# Python recognises the frames of its import system by their file name and hides them in tracebacks.
_Loader.__name__ = _Loader.__qualname__ = SourceFileLoader.__name__
_Loader.__module__ = SourceFileLoader.__module__
for _method in (_Loader.get_code, _Loader.get_data):
    _method.__code__ = _method.__code__.replace(
        co_filename=SourceFileLoader.get_filename.__code__.co_filename
    )


class _LibraryLoader(_Loader):
    """Compiles a library's module with its training loops instrumented."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self._compiler.compile_library(self.get_data(path), path, fullname)


class Finder:
    """Import finder that precedes Python's own: it instruments modules of the project and some of libraries.

    It finds the files that Python's finder would find.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that Python would find for the module `name`, or None if there is no such module.

        The spec of a module whose loops are watched has a loader that instruments them.
        """
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return self._with_timed_loader(spec)
        view = self._compiler.view
        origin = spec.origin if view is None else view.program_path(spec.origin)
        if self._compiler.session.belongs(origin):
            loader = _Loader(name, origin, self._compiler)
        elif name in LOOPS:
            loader = _LibraryLoader(name, origin, self._compiler)
        else:
            # do not return None: the next finder would only search for the same spec again
            return self._with_timed_loader(spec)
        return importlib.util.spec_from_file_location(
            name, origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )

    def _with_timed_loader(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and self._compiler.import_times is not None:
            self._compiler.import_times.watch(spec.name, spec.loader)
        return spec


def install(compiler: Compiler) -> None:
    """Install the import hook: from now on, every project file is compiled with `compiler` when it is imported."""
    _offer_hooks(compiler.session, _is_never_compiling)
    watch_picklers()
    offer(WALK, LoopIterator)
    offer_value(ITER, iter)
    after_import("torch.utils", _allow_swap_tensors)
    after_import("torch.utils.data.dataloader", watch_loaders)
    after_import(
        "torch.compiler", lambda module: _offer_hooks(compiler.session, module.is_dynamo_compiling)
    )
    position = next(
        (i for i, f in enumerate(sys.meta_path) if f is importlib.machinery.PathFinder),
        len(sys.meta_path),
    )
    finder: Any = Finder(compiler)
    sys.meta_path.insert(position, finder)
    sys.meta_path.append(Published())


class Published:
    """Import finder that provides Rearview's copy of the package `checkpointer`, unless that package is installed."""

    folder = str(Path(__file__).parent.parent / "checkpointer" / "published")

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG003
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of the package `checkpointer`, or None if `name` is another name."""
        return PathFinder.find_spec(name, [cls.folder], target) if name == "checkpointer" else None


def _allow_swap_tensors(utils: ModuleType) -> None:
    """Let `torch.utils.swap_tensors` accept tensors to which Rearview holds weak references: torch refuses them."""
    swap = getattr(utils, "swap_tensors", None)  # absent in older releases
    if swap is None:
        return

    @functools.wraps(swap)
    def swap_tensors(t1: Any, t2: Any) -> None:
        with without_weak_references(t1, t2):
            swap(t1, t2)

    vars(utils)["swap_tensors"] = swap_tensors


def _is_never_compiling() -> bool:
    return False


def _offer_hooks(session: Session, compiling: Callable[[], bool]) -> None:
    """Offer the functions that instrumented code calls for each loop.

    While `torch.compile` traces a function (`compiling()` is True), the loops of the function are not watched.
    """
    unwatched = session.unwatched

    def plain_hook(site: str, items: Any) -> Any:
        if site in unwatched:
            return itertools.repeat(None) if items is None else direct_iterator(items)
        return session.hook(site, items, sys._getframe(1))

    def hook_unless_compiling(site: str, items: Any) -> Any:
        if compiling():
            return itertools.repeat(None) if items is None else items
        if site in unwatched:
            return itertools.repeat(None) if items is None else direct_iterator(items)
        return session.hook(site, items, sys._getframe(1))

    def plain_parts(site: str, numbers: Any) -> Any:
        if site in unwatched:
            return (numbers,)
        return session.parts(site, numbers, sys._getframe(1))

    def parts_unless_compiling(site: str, numbers: Any) -> Any:
        if compiling() or site in unwatched:
            return (numbers,)
        return session.parts(site, numbers, sys._getframe(1))

    if compiling is _is_never_compiling:
        hook, parts = plain_hook, plain_parts
    else:
        hook, parts = hook_unless_compiling, parts_unless_compiling
    offer(HOOK, hook, scalar=session.log_scalar)
    offer(PARTS, parts)
