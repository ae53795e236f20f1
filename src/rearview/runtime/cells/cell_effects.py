"""Effects of a cell other than changed variables: reading the clock, starting processes, changing libraries.

`CellEffects.problem` returns the reason why the results of a cell cannot be reused. `CellEffects.setup` returns
statements, such as `plt.style.use("…")`, that must run even if the stored results of their cell are reused.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rearview.model.cell_lineage import CellLineage
from rearview.runtime.cells.cell_analysis import FILE_QUESTIONS, CellAnalysis
from rearview.runtime.cells.cell_inputs import Lineage
from rearview.runtime.cells.library_state import digest_of
from rearview.runtime.cells.state_digests import (
    NotebookState,
    changes_definitions,
    definition_state,
)
from rearview.runtime.sandbox import entropy
from rearview.runtime.sandbox.clock import Clock
from rearview.runtime.sandbox.entropy import after_import
from rearview.state.variable_fingerprints import fingerprints
from rearview.state.variable_groups import BY_REFERENCE

OWN_TIMERS = (
    *("sklearn.", "joblib.", "xgboost.", "lightgbm.", "statsmodels.", "scipy.", "torch.", "tqdm."),
    *("threadpoolctl.", "matplotlib."),
)
"""Prefixes of modules that time their own work: their readings of the clock are no inputs of a cell."""
QUIET_MODULES = frozenset(
    {
        *("numpy", "pandas", "scipy", "sklearn", "statsmodels", "torch", "xgboost", "lightgbm"),
        *("matplotlib", "mpl_toolkits", "seaborn", "PIL", "IPython", "tqdm", "networkx"),
        *("joblib", "pickle", "json", "csv", "h5py", "pyarrow", "polars"),
        *("builtins", "collections", "copy", "itertools", "operator", "math", "heapq", "bisect"),
        *("random", "time", "gc", "pprint"),
    }
)
"""Modules whose functions change nothing but their arguments, unless their name begins as in `SETTERS`."""
HARDWARE_QUESTIONS = frozenset({"lscpu", "uname", "sysctl"})
"""Programs that only describe the machine; a cell may start them. joblib runs one of them to count cores."""
SETTERS = (
    *("set", "use", "config", "register", "enable", "disable", "style", "init", "install", "reset"),
    *("filter", "simplefilter", "option", "theme", "patch"),
)
"""Prefixes of names of functions that change settings, also in `QUIET_MODULES`."""


class ProjectModules:
    """Finds the loaded modules that belong to the project.

    Thousands of modules may be loaded, so each is checked only once.
    """

    def __init__(self, belongs: Callable[[str], bool]) -> None:
        self._belongs = belongs
        self._checked_ids: dict[str, int] = {}
        self._project_modules: dict[str, types.ModuleType] = {}
        self._count = 0

    def of_project(self) -> list[tuple[str, types.ModuleType]]:
        """Return (name, module) of each loaded module of the project, without `__main__`."""
        modules = self._project_modules
        unchanged = all(sys.modules.get(name) is module for name, module in modules.items())
        if unchanged and self._count == len(sys.modules):
            return [*modules.items()]
        self._count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if self._checked_ids.get(name) == id(module) or name == "__main__":
                continue
            self._checked_ids[name] = id(module)
            modules.pop(name, None)
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and self._belongs(file):
                modules[name] = module
        return [(name, module) for name, module in modules.items() if name in sys.modules]


@dataclass(frozen=True, slots=True)
class SetUp:
    """The statements of a cell that change state outside the notebook's variables, such as settings of libraries."""

    digest: str
    """Hash of these statements, and of the variables and files that they can reach."""
    text: str
    """These statements with the imports and definitions of the cell; empty if the whole cell has to run."""


class CellEffects:
    """Observes the effects of the current cell other than changed variables."""

    def __init__(
        self,
        state: NotebookState,
        lineage: Lineage,
        modules: ProjectModules,
        clock: Clock | None,
        stream_position: list[Any],
    ) -> None:
        self._state = state
        self._lineage = lineage
        self._modules = modules
        self._stream_position = stream_position
        self._clock_readers: set[str] = set()
        if clock is not None:
            clock.listeners[:] = [self._clock_readers.add]
        self._bytes_before = 0
        self._seed_bytes_before = 0
        entropy.overwritten[:] = [0]
        self._module_data: dict[str, str] = {}
        self._definition_states: dict[str, str] = {}
        self._threads: set[int | None] = set()

    def begin(self, analysis: CellAnalysis) -> None:
        """Before a cell runs, remember the state of the process that `problem` and `setup` compare afterwards."""
        self._clock_readers.clear()
        self._bytes_before = entropy.bytes_used(self._stream_position)
        self._seed_bytes_before = entropy.seeding[0]
        self._module_data = self._project_data()
        self._definition_states = self._states_of_definitions()
        for name in analysis.imports - sys.modules.keys():
            after_import(name, self._note_imported)
        self._threads = {thread.ident for thread in threading.enumerate()}

    def _note_imported(self, module: types.ModuleType) -> None:
        """Remember a digest of the variables of a module that was just imported, if it belongs to the project."""
        if dict(self._modules.of_project()).get(module.__name__) is module:
            self._module_data[module.__name__] = _data_digest(module)

    def draws_seeds(self) -> bool:
        """Return True if the cell has drawn seeds from the system: it created random generators without a seed."""
        return self._seed_bytes_before != entropy.seeding[0]

    def problem(self, analysis: CellAnalysis, lineage: CellLineage | None) -> str:
        """Return the reason why the results of the cell that has just run cannot be reused; empty if they can."""
        if lineage is None:
            return "its inputs were not recorded"
        if analysis.refused and not analysis.only_preamble:
            return analysis.refused
        if self._lineage.unrepeatable_effect:
            return self._lineage.unrepeatable_effect
        kinds = {event[0]: event for event in lineage.events}
        for kind in ("unseen", "more"):
            if kind in kinds:
                return f"its inputs are not all known ({kinds[kind][1]})"
        if analysis.only_preamble:
            return ""  # the cell only imports and defines: what libraries do while they are imported does not count
        reached = (
            self._state.reached if self._state.reached is not None else set(self._state.definitions)
        )
        for name in sorted(reached & self._state.definitions.keys()):
            questions = self._state.definitions[name][0].attributes & FILE_QUESTIONS
            if questions:
                return f"{name} asks the file system ({min(questions)})"
        harmless = OWN_TIMERS if analysis.reads_clock else (*OWN_TIMERS, "timeit.")
        readers = sorted(
            each for each in self._clock_readers if not f"{each}.".startswith(harmless)
        )
        if readers:
            return f"it reads the clock ({'the cell' if readers[0] == '__main__' else readers[0]})"
        if self._bytes_before != entropy.bytes_used(self._stream_position):
            return "it draws randomness of the system"
        started = [event for event in lineage.events if event[0] == "process"]
        unknown = [event for event in started if event[1] not in HARDWARE_QUESTIONS]
        if unknown:
            return f"it starts a process ({' '.join(unknown[0][1:])[:60]})"
        if "socket" in kinds:
            return f"it opens a connection ({kinds['socket'][1]})"
        new_threads = [
            thread
            for thread in threading.enumerate()
            if thread.ident not in self._threads and not thread.daemon
        ]
        if new_threads:
            return f"it leaves a thread running ({new_threads[0].name})"
        changed = [
            name
            for name, value in self._project_data().items()
            if name in self._module_data and self._module_data[name] != value
        ]
        return f"it changes data of the module {changed[0]}" if changed else ""

    def setup(
        self,
        analysis: CellAnalysis,
        messages: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, str],
        outside: str,
    ) -> SetUp | None:
        """Return the statements of a cell that change state outside the variables, or None if it changes no such state.

        `inputs` are the digests of the variables that the cell can use, by name. `outside` is a hash of its other inputs,
        such as files.
        """
        reached = (
            self._state.reached if self._state.reached is not None else set(self._state.definitions)
        )
        for name in (reached | _own_used(analysis)) & self._state.definitions.keys():
            if any(map(self._sets_library, self._state.definitions[name][0].calls)):
                return SetUp(digest_of(analysis.digest, sorted(inputs.items()), outside), "")
        changed = self._changed_outside_variables(analysis)
        if changed:
            return SetUp(digest_of(changed), "")
        shows = any(message["type"] == "execute_result" for message in messages)
        effects = [
            effect
            for effect in analysis.effects
            if self._sets_library(effect.call)
            and not (shows and effect.call == analysis.last_call not in analysis.calls)
        ]
        if not effects and not analysis.setup_magics:
            return None
        names = {name for effect in effects for name in effect.names}
        reached_names = self._state.reach(names)
        reached_inputs = sorted(
            (name, value)
            for name, value in inputs.items()
            if reached_names is None or name in reached_names
        )
        digest = digest_of(
            [magic for _, magic in analysis.setup_magics],
            [each.digest for each in effects],
            reached_inputs,
            outside if effects else "",
        )
        uses_no_variables = all(
            isinstance(self._state.namespace.get(name, len), BY_REFERENCE)
            and name not in self._state.definitions
            for name in names
        )
        return SetUp(digest, analysis.setup_text(effects) if uses_no_variables else "")

    def _states_of_definitions(self) -> dict[str, str]:
        """Return name -> digest of the state, for each function and class of the notebook that the cell can reach."""
        references = self._state.references()
        return {
            name: definition_state(self._state.namespace[name], references)
            for name in self._state.definitions
            if name in self._state.namespace and self._state.touches((name,))
        }

    def _changed_outside_variables(self, analysis: CellAnalysis) -> list[tuple[str, str]]:
        """Return (name, new digest) of each function, class and project module whose state the cell has changed."""
        defined = {each.name for each in analysis.definitions}
        states = {**self._states_of_definitions(), **self._project_data()}
        states_before = {**self._definition_states, **self._module_data}
        changed = [
            (name, states[name])
            for name in sorted(states_before.keys() & states.keys() - defined)
            if states_before[name] != states[name]
        ]
        effects = [each.call for each in analysis.effects]
        loaded = self._state.namespace
        if changes_definitions(analysis.definitions, effects, _own_used(analysis), loaded):
            references = self._state.references()
            changed += [
                (name, definition_state(loaded[name], references))
                for name in sorted(defined & loaded.keys())
            ]
        return changed

    def _sets_library(self, call: str) -> bool:
        """Return True if `call` may change a library: a call such as `plt.style.use`, or an assignment `np.x=`."""
        root, _, attribute = call.partition(".")
        value = self._state.namespace.get(root.rstrip("="))
        if call.endswith("="):
            library_class = isinstance(value, type | types.FunctionType) and root != "type"
            return isinstance(value, types.ModuleType) or (
                library_class and value.__module__ != "__main__"
            )
        if isinstance(value, types.ModuleType):
            module = value.__name__
        elif isinstance(value, type) or callable(value):
            module = str(getattr(value, "__module__", None) or "")
            if attribute and not isinstance(value, type):
                return False  # a method of an object in a variable, which is no library
        else:
            return False
        if module == "__main__":
            return False  # a function or class of the notebook: the calls in its body are checked separately
        name = call.rpartition(".")[2]
        return module.partition(".")[0] not in QUIET_MODULES or name.startswith(SETTERS)

    def _project_data(self) -> dict[str, str]:
        """Return name -> digest of the variables, for each loaded module of the project."""
        return {name: _data_digest(module) for name, module in self._modules.of_project()}


def _own_used(analysis: CellAnalysis) -> set[str]:
    """Return the names of functions and classes that a cell defines and its other statements use, also indirectly."""
    names_in_bodies = {each.name: each.names for each in analysis.definitions}
    used: set[str] = set()
    todo = [name for name in analysis.statement_names if name in names_in_bodies]
    while todo:
        name = todo.pop()
        used.add(name)
        todo += [
            each for each in names_in_bodies[name] if each in names_in_bodies and each not in used
        ]
    return used


def _data_digest(module: types.ModuleType) -> str:
    """Return a digest of a module's variables, without functions, classes and modules."""
    data = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("__") and not isinstance(value, BY_REFERENCE)
    }
    prints = fingerprints(data, 0.05)
    return digest_of(sorted((k, prints.get(k, str(id(v)))) for k, v in data.items()))
