"""State of a process outside the variables: random states, settings of libraries, packages, folders."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import sys
import types
from collections.abc import Callable
from typing import Any

from rearview.runtime.cells.result_store import FORMAT
from rearview.runtime.sandbox.entropy import after_import
from rearview.state.code_lookup import PatchedBuiltin
from rearview.state.codecs.rng import read_random_state, write_random_state


def digest_of(*parts: object) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def listing(folder: str) -> str:
    """Return a hash of the names in a folder."""
    try:
        names = (entry.name for entry in os.scandir(folder))
        return digest_of(sorted(name for name in names if not name.startswith(".")))
    except OSError:
        return "gone"


def base_digest() -> str:
    """Return a hash of what all cells depend on: interpreter, machine, packages, folder, threads."""
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


def _random_states() -> dict[str, Any]:
    """Return the random states of libraries on the CPU, by library."""
    return {name: state for name, state in read_random_state().items() if name != "devices"}


def random_bytes(library: str) -> bytes:
    """Return the random state of a library as it is stored."""
    return pickle.dumps(_random_states()[library], protocol=5)


def random_digests() -> dict[str, str]:
    """Return the random states by library, each as the digest under which it is stored."""
    import xxhash

    return {
        library: str(xxhash.xxh3_128(pickle.dumps(state, protocol=5)).hexdigest())
        for library, state in _random_states().items()
    }


def set_random(library: str, state: Any) -> None:
    """Set the random state of a library."""
    write_random_state({library: state})


class RandomUse:
    """The random states of libraries, cell by cell: which ones a cell draws from, and which it leaves."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        """By library, as the cells so far have left them."""
        self.due: dict[str, str] = {}
        """States that skipped cells left: set before the next cell is run."""
        self._before: dict[str, str] = {}
        self._seeded: set[str] = set()
        for name in ("random", "numpy.random", "torch"):
            after_import(name, self._watch_seed)

    def begin(self) -> None:
        """Take note of the states before a cell is run."""
        self._seeded.clear()
        self._before = random_digests()
        self.states |= {k: self.states.get(k, v) for k, v in self._before.items()}

    def take(self, put: Callable[[bytes], str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the states that a cell drew from, and those that it left, by library.

        `put` stores a state and returns its digest.
        """
        used: dict[str, str] = {}
        after: dict[str, str] = {}
        for library, digest in random_digests().items():
            before = self._before.get(library)
            if digest == before:
                continue
            if before is not None and library not in self._seeded:
                used[library] = before
            if before is not None or library in self._seeded:
                after[library] = put(random_bytes(library))
                self.states[library] = after[library]
            else:
                self.states[library] = digest
        return used, after

    def _watch_seed(self, module: types.ModuleType) -> None:
        """Notice when a random state is set before anything was drawn from it in a cell."""
        library = {"numpy.random": "numpy"}.get(module.__name__, module.__name__)
        name = "manual_seed" if library == "torch" else "seed"
        real = getattr(module, name)
        # the state with which it was imported: nothing was drawn from it yet
        self._before.setdefault(library, random_digests()[library])

        def seed(*args: Any, **kwargs: Any) -> Any:
            if random_digests().get(library) == self._before.get(library):
                self._seeded.add(library)
            return real(*args, **kwargs)

        setattr(module, name, PatchedBuiltin(seed, real))


def library_settings() -> dict[str, str]:
    """Return the settings of libraries that are loaded, each as a hash."""
    found: dict[str, str] = {}
    plotting, numpy = sys.modules.get("matplotlib"), sys.modules.get("numpy")
    pandas, torch = sys.modules.get("pandas"), sys.modules.get("torch")
    if plotting is not None and hasattr(plotting, "rcParams"):
        chosen = {k: v for k, v in dict.items(plotting.rcParams) if not k.startswith("backend")}
        found["matplotlib"] = digest_of(sorted((k, repr(v)) for k, v in chosen.items()))
    if numpy is not None and hasattr(numpy, "get_printoptions"):
        found["numpy"] = digest_of(
            sorted(numpy.get_printoptions().items()), sorted(numpy.geterr().items())
        )
    if pandas is not None and hasattr(pandas, "options"):
        found["pandas"] = digest_of(
            [
                (name, repr(pandas.get_option(name)))
                for name in ("display.max_rows", "display.max_columns", "display.precision",
                             "display.width", "display.float_format", "display.max_colwidth",
                             "display.min_rows", "display.expand_frame_repr")
            ]
        )  # fmt: skip
    if torch is not None and hasattr(torch, "get_default_dtype"):
        found["torch"] = digest_of(
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )
    return found
