"""Import runs from event files of TensorBoard, and export runs as event files."""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
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
from rearview.store.stored_arrays_and_media import StoredValue

MARK = "tfevents"
"""Text that the name of every event file contains."""


def read_tensorboard(path: Path) -> Iterator[TrackedRun]:
    """Yield one run for each folder that contains event files, among `path` and its subfolders.

    Raise if there are no event files, or if tensorboard is not installed.
    """
    try:
        import tensorboard  # noqa: F401 - fails before any file is read
    except ImportError as exc:
        raise missing_library("tensorboard", "tensorboard", "Reading event files") from exc
    files = [path] if path.is_file() else sorted(path.rglob(f"*{MARK}*"))
    folders: dict[Path, list[Path]] = {}
    for file in files:
        if file.is_file():
            folders.setdefault(file.parent, []).append(file)
    if not folders:
        raise nothing_found("TensorBoard", path, "event file (*tfevents*)")
    for folder, folder_files in folders.items():
        yield _read_folder(folder, sorted(folder_files, key=_file_order), path)


def _file_order(file: Path) -> list[str | int]:
    """Return a key that sorts event files by time: the parts of the file name, with digits as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.name)]


def _read_folder(folder: Path, files: list[Path], top: Path) -> TrackedRun:
    values: list[TrackedValue] = []
    arguments: dict[str, Any] = {}
    started, ended = float("inf"), 0.0
    for file in files:
        for event in _events(file):
            started, ended = min(started, event.wall_time), max(ended, event.wall_time)
            for value in event.summary.value:
                stored_value = _read_value(value, arguments)
                if stored_value is not None:
                    tag = value.tag.removesuffix("/text_summary")
                    values.append(TrackedValue(tag, stored_value, int(event.step), event.wall_time))
    name = folder.name if folder == top else os.fspath(folder.relative_to(top))
    return TrackedRun(
        "tensorboard",
        files[0].name,  # unique: it contains the time, the machine and the process
        0.0 if started == float("inf") else started,
        values,
        ended=ended,
        name=folder.name if name == "." else name,
        arguments=arguments,
        source=os.fspath(folder),
    )


def _events(file: Path) -> Iterator[Any]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    yield from EventFileLoader(os.fspath(file)).Load()


def _read_value(value: Any, arguments: dict[str, Any]) -> Any:
    """Return the value in an entry of a summary, or None if it has none that can be imported.

    If the entry contains hyper-parameters, add these to `arguments` and return None.
    """
    plugin = value.metadata.plugin_data.plugin_name
    if plugin == "hparams":
        arguments.update(_parameters(value.metadata.plugin_data.content))
        return None
    if not value.HasField("tensor"):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    if plugin in {"scalars", ""} and array.ndim == 0 and array.dtype.kind in "fiub":
        return float(array) if array.dtype.kind == "f" else int(array)
    if plugin == "histograms":
        rows = [row for row in array.tolist() if row[0] <= row[1]]
        if not rows:
            return None
        return media.Histogram([row[2] for row in rows], [rows[0][0], *(row[1] for row in rows)])
    if plugin == "images" and array.ndim == 1 and array.size > 2:
        data = bytes(array[2])
        return media.Image(data) if data.startswith(b"\x89PNG") else {"bytes": data}
    if plugin == "audio" and array.size:
        return media.Audio(bytes(array.reshape(-1)[0]))
    if plugin == "text":
        texts = [bytes(text).decode("utf-8", "replace") for text in array.reshape(-1).tolist()]
        return media.Text("\n".join(texts), "markdown")
    return array if array.dtype.kind in "fiub" else None


def _parameters(content: bytes) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin_data = HParamsPluginData.FromString(content)
    out: dict[str, Any] = {}
    for name, value in plugin_data.session_start_info.hparams.items():
        kind = value.WhichOneof("kind")
        out[name] = getattr(value, kind) if kind else None
    return out


def write_tensorboard(exported: ExportedRun, folder: Path) -> Exported:
    """Write a run as an event file in a subfolder of `folder` that is named like the run; return the result.

    The bytes of the file depend on the values alone, so a second export of equal values writes nothing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as exc:
        raise missing_library("tensorboard", "tensorboard", "Writing event files") from exc
    run = exported.run
    out = io.BytesIO()
    records = RecordWriter(out)
    records.write(Event(wall_time=run.started, file_version="brain.Event:2").SerializeToString())
    events = [_parameters_event(run)] if run.args else []
    written = left_out = 0
    order = sorted(exported.values, key=lambda each: (each.time, each.step))
    for value in order:
        summary = _summary(value.name, value.value)
        if summary is None:
            left_out += 1
            continue
        written += 1
        events.append(
            Event(wall_time=value.time, step=value.step, summary=Summary(value=[summary]))
        )
    for event in filter(None, events):
        records.write(event.SerializeToString())
    place = folder / (run.name or run.id)
    file = place / f"events.out.{MARK}.{int(run.started)}.{run.id}.rearview"
    if file.is_file() and file.read_bytes() == out.getvalue():
        return Exported(run.id, os.fspath(place), 0, left_out)
    place.mkdir(parents=True, exist_ok=True)
    part = place / f".{run.id}.{os.getpid()}"
    part.write_bytes(out.getvalue())
    part.replace(file)
    return Exported(run.id, os.fspath(place), written, left_out)


def _summary(name: str, value: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    if isinstance(value, (int, float)):
        return Summary.Value(tag=name, simple_value=float(value))
    if isinstance(value, str):
        return _text_summary(name, value)
    if not isinstance(value, StoredValue):
        return None
    if value.kind == "histogram":
        from tensorboard.compat.proto.summary_pb2 import HistogramProto

        counts, edges = value.histogram()
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
        squares = sum(count * middle**2 for count, middle in zip(counts, middles, strict=True))
        histogram = HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=total,
            sum_squares=squares,
            bucket_limit=edges,  # TensorBoard needs an empty first bucket, which ends where the first bin begins
            bucket=[0.0, *counts],
        )
        return Summary.Value(tag=name, histo=histogram)
    if value.kind == "image":
        data = value.raw()
        width, height = struct.unpack(">II", data[16:24])
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        return Summary.Value(tag=name, image=image)
    if value.kind == "audio":
        sound = Summary.Audio(
            sample_rate=float(value.facts.get("rate", 0)),
            num_channels=value.shape[1],
            length_frames=value.shape[0],
            encoded_audio_string=value.raw(),
            content_type="audio/wav",
        )
        return Summary.Value(tag=name, audio=sound)
    if value.kind == "text":
        return _text_summary(name, str(value.load()))
    return None


def _text_summary(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _parameters_event(run: Any) -> Any:
    """Return an event file's event with the arguments of a run as hyper-parameters; None if no argument has a value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2

    hyperparameters = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in sorted(run.args.items())
        if value is not None
    }
    if not hyperparameters:
        return None
    summary: Summary = summary_v2.hparams_pb(
        hyperparameters, trial_id=run.id, start_time_secs=run.started
    )
    return Event(wall_time=run.started, summary=summary)
