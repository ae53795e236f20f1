"""State of a notebook's process outside its variables: random states, settings of libraries, packages, folders."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import pickle
import platform
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

from rearview.runtime.cells.result_store import FORMAT
from rearview.runtime.sandbox.entropy import after_import
from rearview.state.code_lookup import PatchedBuiltin
from rearview.state.codecs.rng import read_random_state, write_random_state


def digest_of(*parts: object) -> str:
    """Return a hash of `parts`, which are values with a deterministic `repr`."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def listing(folder: str) -> str:
    """Return a hash of the names of the non-hidden files in a folder, or `gone` if the folder cannot be listed."""
    try:
        names = (entry.name for entry in os.scandir(folder))
        return digest_of(sorted(name for name in names if not name.startswith(".")))
    except OSError:
        return "gone"


def base_digest() -> str:
    """Return a hash of inputs that all cells have: interpreter, machine, packages, current folder, threads."""
    packages: list[str] = []
    for folder in sys.path:
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except OSError:
            continue
        packages += [name for name in names if name.endswith((".dist-info", ".pth"))]
    threads = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    return digest_of(
        *(FORMAT, sys.version, platform.machine(), sorted(packages), os.getcwd()),  # noqa: PTH109
        *(sorted(threads.items()), os.cpu_count(), os.environ.get("PYTHONHASHSEED", "")),
    )


_NUMBERED = ("sklearn.utils._repr_html.estimator", "sklearn.utils._estimator_html_repr")
"""Modules of scikit-learn, one per range of versions, that number the estimators in HTML output."""
_COUNTERS = ("_CONTAINER_ID_COUNTER", "_ESTIMATOR_ID_COUNTER")
NUMBERS = "numbers of scikit-learn"
"""Key of the counters of scikit-learn's HTML output among the random states: showing an estimator changes them."""


def _random_states() -> dict[str, Any]:
    """Return library -> random state on the CPU, and the counters of scikit-learn's HTML output."""
    states = {name: state for name, state in read_random_state().items() if name != "devices"}
    return {**states, NUMBERS: [counter.count for counter in _counters()] or [0] * len(_COUNTERS)}


def _counters() -> list[Any]:
    """Return the counter objects by which scikit-learn numbers estimators in HTML output; empty if not loaded."""
    modules = filter(None, map(sys.modules.get, _NUMBERED))
    counters = [getattr(module, name, None) for module in modules for name in _COUNTERS]
    return [counter for counter in counters if hasattr(counter, "count")][: len(_COUNTERS)]


def random_bytes(library: str) -> bytes:
    """Return the pickled random state of a library."""
    return pickle.dumps(_random_states()[library], protocol=5)


def random_digests() -> dict[str, str]:
    """Return library -> digest under which its present random state would be stored."""
    return {library: _digest(state) for library, state in _random_states().items()}


def _digest(state: Any) -> str:
    import xxhash

    return str(xxhash.xxh3_128(pickle.dumps(state, protocol=5)).hexdigest())


def set_random(library: str, state: Any) -> None:
    """Set the random state of `library` to `state`, as `_random_states` returned it."""
    if library != NUMBERS:
        write_random_state({library: state})
        return
    if "sklearn" in sys.modules and not _counters():
        for name in _NUMBERED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    for counter, count in zip(_counters(), state, strict=False):
        counter.count = count


class _ImportDraws:
    """Records how installed libraries change the state of Python's `random` while they are imported.

    Such changes (`rich` draws a random number) have no effect on the results of a cell.
    """

    def __init__(self) -> None:
        self.draws: dict[str, str] = {}
        """Digest of the state of `random` before an import -> digest of its state after the import."""
        self._loading = False
        finder: Any = self
        sys.meta_path.insert(0, finder)

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of an installed module, changed to compare the state of `random` before and after the import.

        Return None for all other modules, and for an import during another import.
        """
        del path, target
        if self._loading:
            return None
        self._loading = True
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None  # Python's other finders raise the error
        finally:
            self._loading = False
        loader = spec.loader if spec is not None else None
        if spec is None or type(loader) is not SourceFileLoader:
            return None
        if "-packages" not in (spec.origin or ""):
            return None
        execute = loader.exec_module

        def load(module: types.ModuleType) -> None:
            before = random.getstate()
            self._loading = True
            try:
                execute(module)
            finally:
                self._loading = False
                if random.getstate() != before:
                    self.draws[_digest(before)] = random_digests()["random"]

        loader.exec_module = load  # type: ignore[method-assign]
        return spec

    def explain(self, before: str | None, after: str) -> bool:
        """Return True if imports alone changed `random` from the state with digest `before` to that with `after`."""
        imports = 0
        while before in self.draws and imports <= len(self.draws):
            before, imports = self.draws[before], imports + 1
        return imports > 0 and before == after


class RandomUse:
    """Finds out for each cell from which random states of libraries it draws, and which random states it leaves."""

    def __init__(self) -> None:
        self.states = random_digests()
        """Library -> digest of the random state that the cells so far have left."""
        self.seeds = self.states["random"]
        """Digest of the first state of Python's `random`: equal for runs whose generators begin in the same states."""
        self.loaded: dict[str, str] = {}
        """Library that the current cell has imported -> digest of the first state of its random generator."""
        self.due_states: dict[str, str] = {}
        """Library -> digest of the random state that skipped cells left, to be set before the next cell runs."""
        self._before: dict[str, str] = {}
        self._states_before: dict[str, Any] = {}
        self._first_states: dict[str, Any] = {}
        self._seeded: set[str] = set()
        self.only_imports_drew = True
        """Whether nothing but imports has drawn from Python's `random` or set its state since the process began."""
        self.by_imports = ""
        """Digest of the state of `random` before the last cell, if only imports drew from it there; else empty."""
        self._imports = _ImportDraws()
        for name in ("random", "numpy.random", "torch"):
            after_import(name, self._watch_seed)

    def begin(self) -> None:
        """Remember the random states of all libraries before a cell runs."""
        self._seeded.clear()
        self.loaded = {}
        self._imports.draws = {}
        self._states_before = _random_states()
        self._before = {name: _digest(state) for name, state in self._states_before.items()}
        self.states |= {k: self.states.get(k, v) for k, v in self._before.items()}

    def take(self, put: Callable[[bytes], str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests (library -> state from which the last cell drew, library -> state that it left).

        `put` stores a pickled state and returns its digest.
        """
        drawn_states: dict[str, str] = {}
        left_states: dict[str, str] = {}
        self.by_imports = ""
        for library, digest in random_digests().items():
            before = self._before.get(library)
            if digest == before:
                continue
            if library == "random" and self._imports.explain(before, digest):
                self.by_imports = before or ""
                left_states[library] = put(random_bytes(library))
                self.states[library] = left_states[library]
                continue
            if library == "random":
                self.only_imports_drew = False
            if before is not None and library not in self._seeded:
                drawn_from = {**self._first_states, **self._states_before}[library]
                drawn_states[library] = put(pickle.dumps(drawn_from, protocol=5))
            if before is not None or library in self._seeded:
                left_states[library] = put(random_bytes(library))
                self.states[library] = left_states[library]
            else:
                self.states[library] = digest
        return drawn_states, left_states

    @contextlib.contextmanager
    def set_temporarily(self, states: Mapping[str, Any]) -> Iterator[None]:
        """Set the random states `states` (by library) while the body runs, and restore all random states after it."""
        before = _random_states()
        for library, state in states.items():
            set_random(library, state)
        try:
            yield
        finally:
            for library, state in _random_states().items():
                earlier_state = before.get(library, self._first_states.get(library, state))
                if _digest(earlier_state) != _digest(state):
                    set_random(library, earlier_state)

    def _watch_seed(self, module: types.ModuleType) -> None:
        """Wrap the seed function of a module, to find cells that seed its generator before they draw from it."""
        library = {"numpy.random": "numpy"}.get(module.__name__, module.__name__)
        name = "manual_seed" if library == "torch" else "seed"
        real = getattr(module, name)
        # just after the import, nothing has been drawn from the generator
        self._first_states[library] = _random_states()[library]
        first = _digest(self._first_states[library])
        self._before.setdefault(library, first)
        self.states.setdefault(library, first)
        self.loaded[library] = first

        def seed(*args: Any, **kwargs: Any) -> Any:
            if random_digests().get(library) == self._before.get(library):
                self._seeded.add(library)
            return real(*args, **kwargs)

        setattr(module, name, PatchedBuiltin(seed, real))


_PANDAS_OPTIONS = (
    *("display.max_rows", "display.max_columns", "display.precision", "display.width"),
    *("display.float_format", "display.max_colwidth", "display.min_rows"),
    "display.expand_frame_repr",
)


def _settings(library: str) -> dict[str, Any] | None:
    """Return setting -> value of a library, or None if the library is not loaded."""
    module: Any = sys.modules.get(library)
    if library == "matplotlib" and hasattr(module, "rcParams"):
        return {k: v for k, v in dict.items(module.rcParams) if not k.startswith("backend")}
    if library == "numpy" and hasattr(module, "get_printoptions"):
        return {"print": module.get_printoptions(), "errors": module.geterr()}
    if library == "pandas" and hasattr(module, "options"):
        return {name: module.get_option(name) for name in _PANDAS_OPTIONS}
    if library == "torch" and hasattr(module, "get_default_dtype"):
        return {
            "dtype": module.get_default_dtype(),
            "threads": module.get_num_threads(),
            "gradients": module.is_grad_enabled(),
            "deterministic": module.are_deterministic_algorithms_enabled(),
        }
    return None


def library_settings() -> dict[str, str]:
    """Return library -> hash of its settings, for the loaded ones of matplotlib, NumPy, pandas and torch."""
    settings = {
        library: _settings(library) for library in ("matplotlib", "numpy", "pandas", "torch")
    }
    return {
        library: digest_of(sorted((name, repr(value)) for name, value in values.items()))
        for library, values in settings.items()
        if values is not None
    }


def settings_bytes(library: str) -> bytes:
    """Return the pickled settings of a loaded library; empty bytes if they cannot be pickled."""
    try:
        return pickle.dumps(_settings(library), protocol=5)
    except Exception:
        return b""


def set_settings(library: str, data: bytes) -> None:
    """Set the settings of a loaded library to `data`, which `settings_bytes` returned."""
    module: Any = sys.modules[library]
    values = pickle.loads(data) if data else {}
    if library == "matplotlib":
        dict.update(module.rcParams, values)
    elif library == "numpy" and values:
        module.set_printoptions(**values["print"])
        module.seterr(**values["errors"])
    elif library == "pandas":
        for name, value in values.items():
            module.set_option(name, value)
    elif library == "torch" and values:
        module.set_default_dtype(values["dtype"])
        module.set_num_threads(values["threads"])
        module.set_grad_enabled(values["gradients"])
        module.use_deterministic_algorithms(values["deterministic"])
