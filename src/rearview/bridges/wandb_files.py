"""Import offline runs of Weights & Biases, and export runs as offline runs.

An offline run is a folder with a log of protocol buffers: a header of 7 bytes, then blocks of 32 KB. A block
contains chunks; a chunk consists of a checksum, a length, a kind and data. This module reads such logs itself, and
uses the package `wandb` to write them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rearview import media
from rearview.bridges.import_export import (
    Exported,
    ExportedRun,
    TrackedRun,
    TrackedValue,
    missing_library,
    nothing_found,
)
from rearview.errors import DamagedError
from rearview.store.stored_arrays_and_media import StoredValue

HEADER = b":W&B"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_EXPORT_FILE = "rearview.json"
"""Name of a file that `write_wandb` puts into the folder of an offline run: id of the run and hash of its content."""


def read_wandb(path: Path) -> Iterator[TrackedRun]:
    """Yield the offline runs in `path` and its subfolders, except runs that Rearview has exported.

    Raise if there are none, or if wandb is not installed.
    """
    try:
        import wandb.proto.wandb_internal_pb2  # noqa: F401
    except ImportError as exc:
        raise missing_library("wandb", "wandb", "Reading offline runs") from exc
    files = [path] if path.is_file() else sorted(path.rglob("*.wandb"))
    files = [file for file in files if not (file.parent / _EXPORT_FILE).exists()]
    if not files:
        raise nothing_found("W&B", path, "offline run (run-*.wandb)")
    for file in files:
        yield _read_run(file)


def _read_run(file: Path) -> TrackedRun:
    from wandb.proto.wandb_internal_pb2 import Record

    values: list[TrackedValue] = []
    arguments: dict[str, Any] = {}
    run_record: Any = None
    code: int | None = None
    latest = 0.0
    for data in log_records(file):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_record = record.run
            arguments.update(_config(record.run.config.update))
        elif kind == "config":
            arguments.update(_config(record.config.update))
        elif kind == "exit":
            code = int(record.exit.exit_code)
        elif kind == "history":
            row = _nested_dict(record.history.item)
            step = int(row.pop("_step", record.history.step.num))
            latest = float(row.pop("_timestamp", latest))
            values.extend(
                TrackedValue(name, value, step, latest)
                for name, raw in _flat(row)
                if (value := _read_value(raw, file.parent / "files")) is not None
            )
    started = 0.0
    if run_record is not None:
        started = run_record.start_time.seconds + run_record.start_time.nanos / 1e9
    return TrackedRun(
        "wandb",
        run_record.run_id if run_record is not None else file.stem.removeprefix("run-"),
        started,
        values,
        ended=latest or None,
        exit_code=code,
        name=run_record.display_name if run_record is not None else "",
        arguments=arguments,
        source=os.fspath(file.parent),
    )


def _nested_dict(items: Any) -> dict[str, Any]:
    """Return key -> decoded value of the items in a protocol buffer; an item with several keys becomes nested dicts."""
    out: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = out
        for name in outer:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[last] = json.loads(item.value_json)
    return out


def _config(items: Any) -> dict[str, Any]:
    """Return name -> value of the parameters in the items of a configuration, without W&B's own entries."""
    entries = _nested_dict(items)
    settings_by_name = {
        name: value["value"]
        if isinstance(value, dict) and "value" in value and set(value) <= {"value", "desc"}
        else value
        for name, value in entries.items()
    }
    return dict(
        _flat({name: value for name, value in settings_by_name.items() if name != "_wandb"})
    )


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) from nested dicts, with names joined by slashes; skip outer names that begin with `_`."""
    for name, value in row.items():
        if isinstance(value, dict) and "_type" not in value:
            yield from _flat(value, f"{prefix}{name}/")
        elif prefix or not name.startswith("_"):
            yield f"{prefix}{name}", value


def _read_value(raw: Any, files: Path) -> Any:
    if not isinstance(raw, dict) or "_type" not in raw:
        return (
            {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.get(
                raw, raw
            )
            if isinstance(raw, str)
            else raw
        )
    kind = raw["_type"]
    if kind == "histogram":
        if "bins" in raw:
            return media.Histogram(raw["values"], raw["bins"])
        start, size, count = raw["packedBins"].values()
        return media.Histogram(raw["values"], [start + k * size for k in range(count + 1)])
    path = (files / str(raw.get("path", ""))).resolve()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if path.is_relative_to(files.resolve()) and path.is_file():
            if kind == "image-file" and path.suffix == ".png":
                return media.Image(path.read_bytes())
            if kind == "table-file":
                table = json.loads(path.read_bytes())
                return media.DataTable(table["columns"], table["data"])
            if kind == "audio-file" and path.suffix == ".wav":
                return media.Audio(path.read_bytes())
    return raw


def log_records(file: Path) -> Iterator[bytes]:
    """Yield the encoded records of the offline log `file`; raise DamagedError if a checksum is wrong.

    A last record that is incomplete, because the program was killed, is left out.
    """
    data = file.read_bytes()
    if data[:4] != HEADER:
        raise DamagedError(
            f"{file} is not an offline run of W&B: it does not begin with {HEADER!r}. Name the folder "
            "that holds offline-run-* folders.",
            slug="import-damaged",
        )
    offset, parts = 7, b""
    while offset + 7 <= len(data):
        block_left = _BLOCK - offset % _BLOCK
        if block_left < 7:
            offset += block_left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, offset)
        chunk = data[offset + 7 : offset + 7 + length]
        if kind == 0 and length == 0:
            offset += block_left
            continue
        if len(chunk) < length:
            return
        if checksum != zlib.crc32(data[offset + 6 : offset + 7 + length]):
            raise DamagedError(
                f"{file} is damaged at byte {offset}: its checksum does not match. The values before "
                "that byte were not imported either; copy the file again.",
                slug="import-damaged",
            )
        offset += 7 + length
        if kind in {_FULL, _FIRST}:
            parts = chunk
        else:
            parts += chunk
        if kind in {_FULL, _LAST}:
            yield parts


def write_wandb(exported: ExportedRun, folder: Path, project: str) -> Exported:
    """Write a run as an offline run of W&B below `folder`, and return the result.

    `wandb sync` uploads it to W&B's project `project`, with the id that the run has in Rearview.
    """
    try:
        import wandb
    except ImportError as exc:
        raise missing_library("wandb", "wandb", "Writing offline runs") from exc
    run = exported.run
    rows: dict[int, dict[str, Any]] = {}
    left_out = 0
    for value in exported.values:
        converted = _value_for_wandb(value.value)
        if converted is None:
            left_out += 1
        else:
            rows.setdefault(value.step, {})[value.name] = converted
    count = sum(map(len, rows.values()))
    export_facts = {"run": run.id, "content": _digest(exported), "values": count}
    target = folder.absolute()
    for old_export in sorted(target.glob(f"wandb/offline-run-*-{run.id}")):
        if (old_export / _EXPORT_FILE).is_file():
            if json.loads((old_export / _EXPORT_FILE).read_text()) == export_facts:
                return Exported(run.id, os.fspath(old_export), 0, left_out)
            shutil.rmtree(old_export)  # an earlier export, before the values changed
    target.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
    )
    wandb_run = wandb.init(
        project=project,
        id=run.id,
        name=run.name or run.id,
        config={name: value for name, value in run.args.items()},  # noqa: C416 - a copy of its own
        notes=run.note or None,
        tags=list(run.tags) or None,
        dir=os.fspath(target),
        mode="offline",
        reinit="create_new",
        settings=settings,
    )
    for step in sorted(rows):
        wandb_run.log(rows[step], step=step)
    place = Path(wandb_run.dir).parent
    wandb_run.finish(exit_code=run.exit_code or 0)
    (place / _EXPORT_FILE).write_text(json.dumps(export_facts))
    return Exported(run.id, os.fspath(place), count, left_out)


def _value_for_wandb(value: Any) -> Any:
    import wandb

    if isinstance(value, (int, float, str)):
        return value
    if not isinstance(value, StoredValue):
        return None
    if value.kind == "histogram":
        counts, edges = value.histogram()
        return wandb.Histogram(np_histogram=(counts, edges)) if len(counts) <= 512 else None
    if value.kind == "image":
        image = value.load()
        return None if isinstance(image, bytes) else wandb.Image(image)
    if value.kind == "table":
        table = value.load()
        return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
    return None


def _digest(exported: ExportedRun) -> str:
    parts = [
        (
            value.name,
            value.step,
            value.value.oid if isinstance(value.value, StoredValue) else value.value,
        )
        for value in exported.values
    ]
    text = repr((sorted(exported.run.args.items()), exported.run.name, parts))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
