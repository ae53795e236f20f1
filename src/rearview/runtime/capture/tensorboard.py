"""Capture the values that a program logs to TensorBoard: `SummaryWriter` of torch and tensorboardX."""

from __future__ import annotations

import io
from collections.abc import Mapping
from time import thread_time
from types import ModuleType
from typing import Any

from rearview.model.run import Origin
from rearview.runtime.capture.logger_calls import LoggerCalls
from rearview.runtime.capture.parameters import Parameters
from rearview.runtime.sandbox.entropy import after_import

_MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_MEDIA = ("add_histogram", "add_histogram_raw", "add_image", "add_images", "add_figure")
"""Methods whose values are taken from what TensorBoard has encoded for its file."""


def capture_tensorboard(calls: LoggerCalls, parameters: Parameters) -> None:
    """Record scalars, texts, histograms and images given to writers made from now on."""
    for name in _MODULES:
        after_import(name, lambda module: _watch(module, calls, parameters))


def _watch(module: ModuleType, calls: LoggerCalls, parameters: Parameters) -> None:
    writer, origin = module.SummaryWriter, Origin.TENSORBOARD

    def scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, value, step = _arguments(args[1:], kwargs, "tag", "scalar_value", "global_step")
        calls.keep(origin, {str(tag): value}, step)

    def scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, values, step = _arguments(
            args[1:], kwargs, "main_tag", "tag_scalar_dict", "global_step"
        )
        calls.keep(origin, {f"{tag}/{key}": value for key, value in dict(values).items()}, step)

    def text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tag, value, step = _arguments(args[1:], kwargs, "tag", "text_string", "global_step")
        calls.keep(origin, {str(tag): value}, step)

    def hparams(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hparams_given, metrics, _ = _arguments(args[1:], kwargs, "hparam_dict", "metric_dict", "")
        parameters.keep(dict(hparams_given or {}), origin.value)
        calls.keep(origin, dict(metrics or {}))

    calls.watch(writer, "add_scalar", origin, scalar)
    calls.watch(writer, "add_scalars", origin, scalars)
    calls.watch(writer, "add_text", origin, text)
    calls.watch(writer, "add_hparams", origin, hparams)
    _watch_media(module, calls)


def _watch_media(module: ModuleType, calls: LoggerCalls) -> None:
    """Take histograms and images from the summaries that the writer hands to its file."""
    summaries: list[Any] = []
    file_writer: Any = module.FileWriter
    original = file_writer.add_summary

    def add_summary(self: Any, summary: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_is_media(value) for value in summary.value) and calls.media.allows():
            summaries.append(summary)
            del summaries[:-10]
        return original(self, summary, *args, **kwargs)

    file_writer.add_summary = add_summary

    def media(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = thread_time()
        _, _, step = _arguments(args[1:], kwargs, "tag", "", "global_step")
        if step is None and len(args) > 3:
            step = args[3]
        for summary in summaries:
            calls.keep(Origin.TENSORBOARD, _encoded(summary), step)
        summaries.clear()
        calls.media.add(began)

    for name in _MEDIA:
        calls.watch(module.SummaryWriter, name, Origin.TENSORBOARD, media)


def _is_media(value: Any) -> bool:
    return bool(value.HasField("histo") or value.HasField("image"))


def _encoded(summary: Any) -> Mapping[str, Any]:
    """Return the histograms and images of a summary by their tags."""
    out: dict[str, Any] = {}
    for value in summary.value:
        if value.HasField("histo"):
            out[value.tag] = _histogram(value.histo)
        elif value.HasField("image") and (image := _image(value.image.encoded_image_string)):
            out[value.tag] = image
    return out


def _histogram(histo: Any) -> tuple[Any, Any]:
    """Return counts and edges; bins at both ends that hold nothing are left out."""
    import numpy as np

    limits, counts = list(histo.bucket_limit), list(histo.bucket)
    first = next((k for k, count in enumerate(counts) if count), 0)
    last = next((k for k in range(len(counts) - 1, -1, -1) if counts[k]), len(counts) - 1)
    low = limits[first - 1] if first else min(histo.min, limits[0])
    edges = [low, *limits[first : last + 1]]
    return np.asarray(counts[first : last + 1], dtype="f8"), np.asarray(edges, dtype="f8")


def _image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image.open(io.BytesIO(data))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, Any, Any]:
    """Return three arguments by their place or their name; None for one that is not given."""
    values = [*args[:3], *(kwargs.get(name) for name in names[len(args) :])]
    return values[0], values[1], values[2]
