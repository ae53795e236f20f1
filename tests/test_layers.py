"""The tree shows the architecture only if imports keep to it."""

import pytest

from imports import (
    MODULES,
    PUBLIC,
    all_imports,
    cycles,
    named_modules,
    own_imports,
    room_edges,
    room_of,
)

MAY_IMPORT = {
    "__init__": "_history background_logger checkpointer media runtime state/codecs",
    "__main__": "cli",
    "errors": "",
    "durable_files": "",
    "opened_files": "",
    "config": "errors",
    "model": "",
    "media": "errors",
    # pure: text in, text out; facts in, plan out
    "source": "errors model",
    "source/inspection": "source",
    "source/probes": "errors source",
    "source/propagate": "source source/probes",
    "plan": "errors model",
    "plan/versions": "errors",
    # live objects
    "state": "errors model state/codecs",
    "state/codecs": "errors state",
    # bytes elsewhere, green power
    "remote": "durable_files errors model",
    "energy": "durable_files errors",
    # at rest
    "store": "config durable_files errors media model source",
    "store/versions": "config errors model source store",
    "store/checkpoints": "durable_files errors model store",
    "store/tables": "config durable_files errors model store store/checkpoints store/versions",
    "store/maintenance": (
        "config errors model remote store store/checkpoints store/tables store/versions"
    ),
    # long jobs on batch systems; its callbacks are those of `frameworks` under published names
    "checkpointer": "durable_files errors frameworks model remote",
    "checkpointer/published": "checkpointer",
    # inside the user's process
    "runtime": (
        "checkpointer config energy errors model remote runtime/cells runtime/observed_values "
        "runtime/replay runtime/sandbox runtime/saving source source/probes state state/codecs store "
        "store/checkpoints store/maintenance store/versions"
    ),
    "runtime/cells": (
        "errors model runtime runtime/sandbox source state state/codecs store opened_files"
    ),
    "runtime/observed_values": "model runtime runtime/sandbox source store",
    "runtime/replay": (
        "checkpointer config errors model runtime runtime/sandbox source state/codecs store "
        "store/checkpoints store/tables"
    ),
    "runtime/sandbox": "model state state/codecs store store/checkpoints",
    "runtime/saving": "config errors model store store/checkpoints store/maintenance",
    # the way back
    "execute": "config errors model store store/checkpoints store/versions",
    "backfill": (
        "config durable_files errors execute model plan source source/probes source/propagate store "
        "store/checkpoints store/tables store/versions"
    ),
    "_history": (
        "backfill config errors execute model plan remote source source/inspection source/probes "
        "source/propagate state store store/checkpoints store/maintenance store/tables store/versions"
    ),
    # many versions as one tree
    "multiversion": (
        "config errors model plan/versions source store store/checkpoints store/versions "
        "opened_files"
    ),
    # a logger in another process: knows nothing of recorded runs
    "background_logger": "config errors model",
    # other trackers
    "bridges": "_history errors media model store store/checkpoints",
    # what people see
    "frameworks": "public",
    # the front end of a kernel, and what a live notebook offers
    "notebook": "_history errors execute model public source state state/codecs store",
    "web": "_history errors media model multiversion plan/versions public store store/checkpoints store/tables",
    # the power in the grid and submit files are asked about before there is any history
    "cli": (
        "_history bridges checkpointer cli/terminal config energy errors model multiversion public web"
    ),
    "cli/terminal": "_history cli errors model notebook",
}
"""Room -> the rooms it may import besides itself, exactly; `public` is `import rearview`."""

CYCLES: dict[str, str] = {}
"""Beginning of the names of modules that still import one another, with the reason. It only shrinks."""

BY_NAME = {
    ("__init__", "notebook"): "loaded only by `%load_ext rearview`, in a kernel",
    (
        "background_logger",
        "runtime",
    ): "asks the session of a recorded program; without one there is no such module",
    (
        "cli/terminal",
        "store",
    ): "shows a stored array if one was read; starting a command must be fast",
}
"""(room, other room) -> why it names a module of the other one in a string instead of importing it.
It only shrinks."""

HEAVY = {
    *("torch", "numpy", "ray", "pandas", "polars", "pyarrow", "duckdb", "rich", "fsspec", "keras"),
    *("lightning", "transformers", "starlette", "uvicorn", "submitit", "sklearn", "nbclient"),
    *("nbformat", "mlflow", "wandb", "tensorboard"),
}
IMPURE = {
    *("os", "io", "time", "pathlib", "subprocess", "socket", "shutil", "random", "sys", "tempfile"),
}
PURE = (
    "source",
    "source/inspection",
    "source/probes",
    "source/propagate",
    "plan",
    "plan/versions",
    "model",
)


def test_every_room_has_a_row_and_every_row_a_room():
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_exactly_what_it_may(room):
    allowed, used = set(MAY_IMPORT[room].split()), set(room_edges().get(room, ()))
    breaches = [
        f"{each.importer} imports {each.imported}"
        for each in own_imports()
        if room_of(each.importer) == room
        and _target(each.imported) != room
        and _target(each.imported) not in allowed
    ]
    assert not breaches, breaches
    assert not allowed - used, f"{room} may import {allowed - used} and does not"


def test_no_import_is_hidden_in_a_string():
    edges = room_edges()
    hidden = {
        (room_of(module), room_of(named))
        for module in MODULES
        for named in named_modules(module)
        if room_of(named) not in (room_of(module), *edges.get(room_of(module), ()))
    }
    assert hidden == set(BY_NAME), hidden ^ set(BY_NAME)


def _target(module):
    return PUBLIC if module == PUBLIC else room_of(module)


def test_recording_and_executing_never_import_each_other():
    for one, other in (("runtime", "execute"), ("execute", "runtime")):
        rooms = [room for room in MAY_IMPORT if room.split("/")[0] == one]
        assert not [room for room in rooms if other in MAY_IMPORT[room].split()]


def test_no_modules_import_one_another_but_those_with_a_reason():
    left = set(CYCLES)
    for cycle in cycles():
        reasons = {start for start in CYCLES if any(name.startswith(start) for name in cycle)}
        assert reasons, f"a new cycle: {sorted(cycle)}"
        left -= reasons
    assert not left, f"there is no such cycle any more: {left}"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_only_where_used(module):
    if room_of(module) == "frameworks":
        return
    heavy = {
        each.imported.split(".")[0]
        for each in all_imports()
        if each.importer == module and not each.own and each.at_top
    } & HEAVY
    assert not heavy, f"{module} imports {heavy} at the top"


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_touch_nothing_outside(room):
    breaches = [
        f"{each.importer} imports {each.imported}"
        for each in all_imports()
        if room_of(each.importer) == room and each.imported.split(".")[0] in IMPURE
    ]
    assert not breaches


def test_submit_files_are_written_without_looking_at_the_machine():
    imported = {
        each.imported for each in all_imports() if each.importer == "checkpointer.submit_files"
    }
    assert not imported & IMPURE
