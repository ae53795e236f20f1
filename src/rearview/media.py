"""Audio, text, tables, confusion matrices, images and histograms as values for `rearview.log`.

Each is one object of the store: compact, stored once however often it is logged, and typed, so that
reading returns the same class. Tensors, arrays, PIL images and Matplotlib figures need no wrapper.
"""

from __future__ import annotations

import base64
import html
import io
import json
import struct
import wave
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rearview.errors import UsageError

_MOST_ROWS = 10
"""Rows of a table that a notebook shows."""
_LONGEST = 400
"""Characters of a text that a table in a notebook shows."""


def _refused(what: str, why: str) -> UsageError:
    return UsageError(f"{what} cannot be logged: {why}.", slug="media")


@dataclass(frozen=True)
class Audio:
    """Sound: samples of one channel, or a row per moment with a number per channel.

    Whole numbers are taken as 16-bit samples, others from -1 to 1. Kept as a WAV file of 16 bits.
    """

    samples: Any
    rate: int = 44100
    """Samples per second."""

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        ready = isinstance(self.samples, (bytes, bytearray))
        data = bytes(self.samples) if ready else self._wave()
        try:
            with wave.open(io.BytesIO(data)) as file:
                shape = [file.getnframes(), file.getnchannels()]
                facts = {"kind": "audio", "format": "wav", "rate": file.getframerate()}
        except (wave.Error, EOFError) as exc:
            raise _refused("Audio", f"its bytes are not a WAV file ({exc})") from exc
        return data, {**facts, "shape": shape}

    def _wave(self) -> bytes:
        import numpy as np

        array = self.samples.detach().cpu() if hasattr(self.samples, "detach") else self.samples
        array = np.asarray(array)
        if array.ndim not in {1, 2} or not array.size:
            raise _refused(
                "Audio", f"its samples have the shape {list(array.shape)}, not [n] or [n, channels]"
            )
        if array.dtype.kind == "f":
            array = np.round(np.nan_to_num(np.clip(array, -1, 1)) * 32767)
        array = np.clip(array, -32768, 32767).astype("<i2")
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(array.shape[1] if array.ndim == 2 else 1)
            file.setsampwidth(2)
            file.setframerate(int(self.rate))
            file.writeframes(array.tobytes())
        return out.getvalue()

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> Audio:  # noqa: ARG003 - as the others
        """Return the sound in stored bytes: 16-bit samples, one row per moment."""
        import numpy as np

        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return cls(data, file.getframerate())
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            channels = file.getnchannels()
            rate = file.getframerate()
        return cls(samples.reshape(-1, channels) if channels > 1 else samples, rate)

    def file(self) -> tuple[str, bytes]:
        """Return the file name suffix and the content of a file for people."""
        return ".wav", self.encoded()[0]

    def _repr_html_(self) -> str:
        text = base64.b64encode(self.encoded()[0]).decode()
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'


@dataclass(frozen=True)
class Text:
    """A text to be read: plain, Markdown or HTML. Short ones can be logged as strings as well."""

    text: str
    format: str = "plain"
    """`plain`, `markdown` or `html`."""

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        if self.format not in _ENDINGS:
            raise _refused(
                "Text", f"its format is {self.format!r}, not one of {', '.join(_ENDINGS)}"
            )
        data = zlib.compress(str(self.text).encode("utf-8", "backslashreplace"))
        return data, {"kind": "text", "format": self.format, "shape": [len(self.text)]}

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> Text:
        """Return the text in stored bytes."""
        kind = str(facts.get("format"))
        return cls(_inflated(data).decode(), kind if kind in _ENDINGS else "plain")

    def file(self) -> tuple[str, bytes]:
        """Return the file name suffix and the content of a file for people."""
        return _ENDINGS[self.format], self.text.encode("utf-8", "backslashreplace")

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # the store may come from a stranger: its HTML is shown, never run
        more = "…" if len(self.text) > _LONGEST else ""
        return f"<pre>{html.escape(self.text[:_LONGEST])}{more}</pre>"


_ENDINGS = {"plain": ".txt", "markdown": ".md", "html": ".html"}


@dataclass(frozen=True)
class DataTable:
    """Rows of plain values under named columns; data frames are converted automatically."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]] = field(default_factory=list)

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        columns = [str(column) for column in self.columns]
        rows = [[_cell(cell) for cell in row] for row in self.rows]
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise _refused(
                    "DataTable",
                    f"row {number} has {len(row)} cells, and there are {len(columns)} columns",
                )
        text = json.dumps({"columns": columns, "rows": rows}, separators=(",", ":"))
        facts = {"kind": "table", "format": "json", "shape": [len(rows), len(columns)]}
        return zlib.compress(text.encode()), facts

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> DataTable:  # noqa: ARG003 - as the others
        """Return the table in stored bytes."""
        content = json.loads(_inflated(data))
        return cls(list(content["columns"]), [list(row) for row in content["rows"]])

    def pandas(self) -> Any:
        """Return a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.columns))

    def file(self) -> tuple[str, bytes]:
        """Return the file name suffix and the content of a file for people."""
        import csv

        out = io.StringIO()
        lines = csv.writer(out)
        lines.writerow(self.columns)
        lines.writerows(self.rows)
        return ".csv", out.getvalue().encode("utf-8", "backslashreplace")

    def _repr_html_(self) -> str:
        rows = list(self.rows)
        return _html_rows(self.columns, rows[:_MOST_ROWS], len(rows) - _MOST_ROWS)


def _cell(value: Any) -> Any:
    """Return a cell as a number, truth value or text; any other value as text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) in ((), None):
        value = item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value)
    return str(value)


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of predicted classes (columns) for each true class (rows)."""

    counts: Any
    labels: Sequence[str] = ()

    @classmethod
    def of(cls, true: Iterable[Any], predicted: Iterable[Any], labels: Sequence[Any] = ()) -> Any:
        """Return the matrix of pairs of true and predicted classes; classes in order of `labels`.

        >>> ConfusionMatrix.of(["a", "a", "b"], ["a", "b", "b"]).counts
        [[1, 1], [0, 1]]
        """
        pairs = list(zip(map(_cell, true), map(_cell, predicted), strict=True))
        names = list(labels) or sorted({name for pair in pairs for name in pair}, key=str)
        at = {name: place for place, name in enumerate(names)}
        counts = [[0] * len(names) for _ in names]
        for true_class, predicted_class in pairs:
            counts[at[true_class]][at[predicted_class]] += 1
        return cls(counts, [str(name) for name in names])

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        counts = self.counts.tolist() if hasattr(self.counts, "tolist") else self.counts
        rows = [[int(count) for count in row] for row in counts]
        labels = [str(label) for label in self.labels] or [str(k) for k in range(len(rows))]
        if any(len(row) != len(rows) for row in rows) or len(labels) != len(rows):
            raise _refused("ConfusionMatrix", "it needs as many columns and labels as rows")
        flat = [count for row in rows for count in row]
        data = zlib.compress(struct.pack(f"<{len(flat)}q", *flat))
        return data, {"kind": "confusion", "labels": labels, "shape": [len(rows), len(rows)]}

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> ConfusionMatrix:
        """Return the matrix in stored bytes."""
        size = int(facts["shape"][0])
        flat = struct.unpack(f"<{size * size}q", _inflated(data))
        rows = [list(flat[k * size : (k + 1) * size]) for k in range(size)]
        return cls(rows, [str(label) for label in facts.get("labels", ())])

    def file(self) -> tuple[str, bytes]:
        """Return the file name suffix and the content of a file for people."""
        rows = [[label, *row] for label, row in zip(self.labels, self.counts, strict=True)]
        return DataTable(["", *self.labels], rows).file()

    def _repr_html_(self) -> str:
        most = max((count for row in self.counts for count in row), default=0) or 1
        body = "".join(
            f"<tr><th>{html.escape(label)}</th>"
            + "".join(
                f'<td style="background: rgba(31,119,180,{count / most:.2f})">{count}</td>'
                for count in row
            )
            + "</tr>"
            for label, row in zip(self.labels, self.counts, strict=True)
        )
        head = "".join(f"<th>{html.escape(label)}</th>" for label in self.labels)
        return f"<table><tr><th></th>{head}</tr>{body}</table>"


@dataclass(frozen=True)
class Image:
    """A picture: the bytes of a PNG file, or an array of rows, columns and perhaps 1, 3 or 4 channels.

    Whole numbers are taken from 0 to 255, others from 0 to 1.
    """

    data: Any

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        data = bytes(self.data) if isinstance(self.data, (bytes, bytearray)) else self._png()
        if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
            raise _refused("Image", "its bytes are not a PNG file")
        width, height = struct.unpack(">II", data[16:24])
        return data, {"kind": "image", "format": "png", "shape": [height, width]}

    def _png(self) -> bytes:
        import numpy as np

        array = self.data.detach().cpu() if hasattr(self.data, "detach") else self.data
        array = np.asarray(array)
        if array.dtype.kind == "f":
            array = np.round(np.nan_to_num(np.clip(array, 0, 1)) * 255)
        elif array.dtype.kind == "b":
            array = array * 255
        array = np.clip(array, 0, 255).astype(np.uint8)
        if array.ndim == 2:
            array = array[:, :, None]
        kinds = {1: 0, 2: 4, 3: 2, 4: 6}
        if array.ndim != 3 or array.shape[2] not in kinds or not array.size:
            raise _refused(
                "Image",
                f"its shape {list(array.shape)} is not [rows, columns] or [rows, columns, 1 to 4]",
            )
        height, width, channels = array.shape
        rows = array.reshape(height, -1)
        lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
        head = struct.pack(">IIBBBBB", width, height, 8, kinds[channels], 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in parts
        )


@dataclass(frozen=True)
class Histogram:
    """Counts between edges (one more than counts). `numpy.histogram(…)` can be logged as it is."""

    counts: Sequence[float]
    edges: Sequence[float]

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes to store, and the facts that describe them."""
        counts, edges = [float(c) for c in self.counts], [float(e) for e in self.edges]
        if len(edges) != len(counts) + 1:
            raise _refused("Histogram", f"{len(counts)} counts need {len(counts) + 1} edges")
        data = struct.pack(f"<{len(edges) + len(counts)}d", *edges, *counts)
        return data, {"kind": "histogram", "dtype": "float64", "shape": [len(counts)]}


MEDIA: dict[str, Any] = {
    "audio": Audio,
    "text": Text,
    "table": DataTable,
    "confusion": ConfusionMatrix,
}
"""Classes that read stored bytes again, by kind."""


def as_media(value: Any) -> Any:
    """Return a value of another library as an object of one of the classes here; None if no class fits.

    Data frames of pandas and polars become tables; tables, histograms and images of W&B become the
    same kinds here. The library itself is not imported.
    """
    if isinstance(value, (Audio, Text, DataTable, ConfusionMatrix, Image, Histogram)):
        return value
    kind = type(value)
    home, name = kind.__module__.split(".")[0], kind.__name__
    if name == "DataFrame" and home in {"pandas", "polars"}:
        rows = value.rows() if home == "polars" else value.itertuples(index=False, name=None)
        return DataTable([str(column) for column in value.columns], rows)
    if home == "wandb":
        if name == "Table":
            return DataTable(list(value.columns), value.data)
        if name == "Histogram":
            return Histogram(list(value.histogram), list(value.bins))
        if name == "Image" and getattr(value, "image", None) is not None:
            out = io.BytesIO()
            value.image.save(out, format="png")
            return Image(out.getvalue())
    return None


def _inflated(data: bytes, most: int = 1 << 30) -> bytes:
    """Return the decompressed bytes; raise ValueError if they would exceed `most`."""
    unzip = zlib.decompressobj()
    out = unzip.decompress(data, most)
    if not unzip.eof:
        raise ValueError("the data is cut off, or larger than a gigabyte")
    return out


def _html_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], more: int) -> str:
    head = "".join(f"<th>{html.escape(str(column))}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    rest = f"<p>… rows not shown: {more}</p>" if more > 0 else ""
    return f"<table><tr>{head}</tr>{body}</table>{rest}"
