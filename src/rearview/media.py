"""Classes for values of `rearview.log`: audio, text, tables, confusion matrices, images and histograms.

The store keeps each value as one compact object, which is stored once even if the value is logged often. Reading
a logged audio, text, table or confusion matrix returns an object of the class that was logged. Tensors, arrays,
PIL images and Matplotlib figures can be logged without these classes.
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

_SHOWN_ROWS = 10
"""Most rows of a logged table that a notebook shows."""
_SHOWN_CHARACTERS = 400
"""Most characters of a logged text that a notebook shows."""


def _refusal(class_name: str, why: str) -> UsageError:
    return UsageError(f"{class_name} cannot be logged: {why}.", slug="media")


@dataclass(frozen=True)
class Audio:
    """A sound: samples of one channel, or an array of shape [n, channels], or the bytes of a WAV file.

    Integers are 16-bit samples, floats are between -1 and 1. The sound is stored as a WAV file of 16 bits.
    """

    samples: Any
    rate: int = 44100
    """Samples per second."""

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        is_encoded = isinstance(self.samples, (bytes, bytearray))
        data = bytes(self.samples) if is_encoded else self._wave()
        try:
            with wave.open(io.BytesIO(data)) as file:
                shape = [file.getnframes(), file.getnchannels()]
                facts = {"kind": "audio", "format": "wav", "rate": file.getframerate()}
        except (wave.Error, EOFError) as exc:
            raise _refusal("Audio", f"its bytes are not a WAV file ({exc})") from exc
        return data, {**facts, "shape": shape}

    def _wave(self) -> bytes:
        import numpy as np

        array = self.samples.detach().cpu() if hasattr(self.samples, "detach") else self.samples
        array = np.asarray(array)
        if array.ndim not in {1, 2} or not array.size:
            raise _refusal(
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
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> Audio:  # noqa: ARG003 - all media classes have this signature
        """Return the sound from its stored bytes. Its samples are an array if they have 16 bits, else the bytes of the file."""
        import numpy as np

        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return cls(data, file.getframerate())
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            channels = file.getnchannels()
            rate = file.getframerate()
        return cls(samples.reshape(-1, channels) if channels > 1 else samples, rate)

    def file(self) -> tuple[str, bytes]:
        """Return (suffix, content) of a file that other programs can open."""
        return ".wav", self.encoded()[0]

    def _repr_html_(self) -> str:
        text = base64.b64encode(self.encoded()[0]).decode()
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'


@dataclass(frozen=True)
class Text:
    """A long text for people: plain, Markdown or HTML. A short text can also be logged as a string."""

    text: str
    format: str = "plain"
    """`plain`, `markdown` or `html`."""

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        if self.format not in _SUFFIXES:
            raise _refusal(
                "Text", f"its format is {self.format!r}, not one of {', '.join(_SUFFIXES)}"
            )
        data = zlib.compress(str(self.text).encode("utf-8", "backslashreplace"))
        return data, {"kind": "text", "format": self.format, "shape": [len(self.text)]}

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> Text:
        """Return the text from its stored bytes."""
        kind = str(facts.get("format"))
        return cls(_decompressed(data).decode(), kind if kind in _SUFFIXES else "plain")

    def file(self) -> tuple[str, bytes]:
        """Return (suffix, content) of a file that other programs can open."""
        return _SUFFIXES[self.format], self.text.encode("utf-8", "backslashreplace")

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # the store may come from a stranger: show the source text of HTML, so that a browser does not run it
        ellipsis = "…" if len(self.text) > _SHOWN_CHARACTERS else ""
        return f"<pre>{html.escape(self.text[:_SHOWN_CHARACTERS])}{ellipsis}</pre>"


_SUFFIXES = {"plain": ".txt", "markdown": ".md", "html": ".html"}


@dataclass(frozen=True)
class DataTable:
    """A table: named columns, and rows of numbers and texts. Data frames can be logged without this class."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]] = field(default_factory=list)

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        columns = [str(column) for column in self.columns]
        rows = [[_cell(cell) for cell in row] for row in self.rows]
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise _refusal(
                    "DataTable",
                    f"row {number} has {len(row)} cells, and there are {len(columns)} columns",
                )
        text = json.dumps({"columns": columns, "rows": rows}, separators=(",", ":"))
        facts = {"kind": "table", "format": "json", "shape": [len(rows), len(columns)]}
        return zlib.compress(text.encode()), facts

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> DataTable:  # noqa: ARG003 - all media classes have this signature
        """Return the table from its stored bytes."""
        content = json.loads(_decompressed(data))
        return cls(list(content["columns"]), [list(row) for row in content["rows"]])

    def pandas(self) -> Any:
        """Return the table as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.columns))

    def file(self) -> tuple[str, bytes]:
        """Return (suffix, content) of a file that other programs can open."""
        import csv

        out = io.StringIO()
        lines = csv.writer(out)
        lines.writerow(self.columns)
        lines.writerows(self.rows)
        return ".csv", out.getvalue().encode("utf-8", "backslashreplace")

    def _repr_html_(self) -> str:
        rows = list(self.rows)
        return _html_rows(self.columns, rows[:_SHOWN_ROWS], len(rows) - _SHOWN_ROWS)


def _cell(value: Any) -> Any:
    """Return the value of a table's cell as a number, bool, text or None; any other value is converted to text."""
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
    """A confusion matrix: counts of predicted classes (columns) for each true class (rows)."""

    counts: Any
    labels: Sequence[str] = ()

    @classmethod
    def of(cls, true: Iterable[Any], predicted: Iterable[Any], labels: Sequence[Any] = ()) -> Any:
        """Return the matrix that counts the pairs of classes in `true` and `predicted`.

        Its rows and columns are in the order of `labels`; without `labels`, they are sorted.

        >>> ConfusionMatrix.of(["a", "a", "b"], ["a", "b", "b"]).counts
        [[1, 1], [0, 1]]
        """
        pairs = list(zip(map(_cell, true), map(_cell, predicted), strict=True))
        names = list(labels) or sorted({name for pair in pairs for name in pair}, key=str)
        indices = {name: index for index, name in enumerate(names)}
        counts = [[0] * len(names) for _ in names]
        for true_class, predicted_class in pairs:
            counts[indices[true_class]][indices[predicted_class]] += 1
        return cls(counts, [str(name) for name in names])

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        counts = self.counts.tolist() if hasattr(self.counts, "tolist") else self.counts
        rows = [[int(count) for count in row] for row in counts]
        labels = [str(label) for label in self.labels] or [str(k) for k in range(len(rows))]
        if any(len(row) != len(rows) for row in rows) or len(labels) != len(rows):
            raise _refusal("ConfusionMatrix", "it needs as many columns and labels as rows")
        flat = [count for row in rows for count in row]
        data = zlib.compress(struct.pack(f"<{len(flat)}q", *flat))
        return data, {"kind": "confusion", "labels": labels, "shape": [len(rows), len(rows)]}

    @classmethod
    def decoded(cls, data: bytes, facts: Mapping[str, Any]) -> ConfusionMatrix:
        """Return the matrix from its stored bytes."""
        size = int(facts["shape"][0])
        flat = struct.unpack(f"<{size * size}q", _decompressed(data))
        rows = [list(flat[k * size : (k + 1) * size]) for k in range(size)]
        return cls(rows, [str(label) for label in facts.get("labels", ())])

    def file(self) -> tuple[str, bytes]:
        """Return (suffix, content) of a file that other programs can open."""
        rows = [[label, *row] for label, row in zip(self.labels, self.counts, strict=True)]
        return DataTable(["", *self.labels], rows).file()

    def _repr_html_(self) -> str:
        largest = max((count for row in self.counts for count in row), default=0) or 1
        body = "".join(
            f"<tr><th>{html.escape(label)}</th>"
            + "".join(
                f'<td style="background: rgba(31,119,180,{count / largest:.2f})">{count}</td>'
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

    Integers are between 0 and 255, floats between 0 and 1.
    """

    data: Any

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        data = bytes(self.data) if isinstance(self.data, (bytes, bytearray)) else self._png()
        if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
            raise _refusal("Image", "its bytes are not a PNG file")
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
        color_types = {1: 0, 2: 4, 3: 2, 4: 6}
        if array.ndim != 3 or array.shape[2] not in color_types or not array.size:
            raise _refusal(
                "Image",
                f"its shape {list(array.shape)} is not [rows, columns] or [rows, columns, 1 to 4]",
            )
        height, width, channels = array.shape
        rows = array.reshape(height, -1)
        lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
        head = struct.pack(">IIBBBBB", width, height, 8, color_types[channels], 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in parts
        )


@dataclass(frozen=True)
class Histogram:
    """A histogram: counts, and the edges of their bins (one more than counts), as `numpy.histogram` returns them."""

    counts: Sequence[float]
    edges: Sequence[float]

    def encoded(self) -> tuple[bytes, dict[str, Any]]:
        """Return (bytes to store, description of the bytes for JSON)."""
        counts, edges = [float(c) for c in self.counts], [float(e) for e in self.edges]
        if len(edges) != len(counts) + 1:
            raise _refusal("Histogram", f"{len(counts)} counts need {len(counts) + 1} edges")
        data = struct.pack(f"<{len(edges) + len(counts)}d", *edges, *counts)
        return data, {"kind": "histogram", "dtype": "float64", "shape": [len(counts)]}


MEDIA: dict[str, Any] = {
    "audio": Audio,
    "text": Text,
    "table": DataTable,
    "confusion": ConfusionMatrix,
}
"""Kind of a stored value, as in its description -> class that decodes its bytes."""


def as_media(value: Any) -> Any:
    """Return a value of another library as an object of a class of this module, or None if no class fits.

    Data frames of pandas and polars become a `DataTable`; a table, histogram or image of W&B becomes a
    `DataTable`, `Histogram` or `Image`. The other library is not imported.
    """
    if isinstance(value, (Audio, Text, DataTable, ConfusionMatrix, Image, Histogram)):
        return value
    kind = type(value)
    library, name = kind.__module__.split(".")[0], kind.__name__
    if name == "DataFrame" and library in {"pandas", "polars"}:
        rows = value.rows() if library == "polars" else value.itertuples(index=False, name=None)
        return DataTable([str(column) for column in value.columns], rows)
    if library == "wandb":
        if name == "Table":
            return DataTable(list(value.columns), value.data)
        if name == "Histogram":
            return Histogram(list(value.histogram), list(value.bins))
        if name == "Image" and getattr(value, "image", None) is not None:
            out = io.BytesIO()
            value.image.save(out, format="png")
            return Image(out.getvalue())
    return None


def _decompressed(data: bytes, max_bytes: int = 1 << 30) -> bytes:
    """Return the decompressed bytes; raise ValueError if they would be more than `max_bytes`."""
    unzip = zlib.decompressobj()
    out = unzip.decompress(data, max_bytes)
    if not unzip.eof:
        raise ValueError("the data is cut off, or larger than a gigabyte")
    return out


def _html_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], hidden_count: int) -> str:
    head = "".join(f"<th>{html.escape(str(column))}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    hidden_rows = f"<p>… rows not shown: {hidden_count}</p>" if hidden_count > 0 else ""
    return f"<table><tr>{head}</tr>{body}</table>{hidden_rows}"
