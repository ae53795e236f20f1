"""Audio, text, tables, confusion matrices and the like come back as what they were."""

import wave

import numpy as np
import pandas as pd
import polars as pl
import pytest

from rearview import media
from rearview._history import history
from rearview.store.checkpoints.checkpoints import Checkpoints
from recorded import Recorded, at


def logged(tmp_path, *values):
    recorded = Recorded(tmp_path)
    put = Checkpoints(recorded.project).objects.put
    run = recorded.runs.reserve()
    recorded.runs.start(run, {"version": "v", "script": "train.py"})
    recorded.add(run, *((at(epoch=k), {"x": value}) for k, value in enumerate(values)), put=put)
    recorded.runs.end(run, 0)
    return history(tmp_path)


def back(tmp_path, *values):
    return [row["x"] for row in logged(tmp_path, *values).table("x").rows()]


def test_audio_keeps_its_samples_and_rate(tmp_path):
    tone = np.sin(np.linspace(0, 40, 800))
    stereo = np.array([[1, -1], [32767, -32768]], "i2")
    one, two = back(tmp_path, media.Audio(tone, 8000), media.Audio(stereo, 44100))
    assert one.rate == 8000
    assert np.abs(one.samples / 32767 - tone).max() < 1e-4
    assert np.array_equal(two.samples, stereo)


def test_texts_tables_and_matrices_are_read_back_unchanged(tmp_path):
    text = media.Text("# Ünïcode\n" * 50, "markdown")
    table = media.DataTable(["a", "b"], [[1, "x"], [None, 2.5], [True, "<b>"]])
    matrix = media.ConfusionMatrix.of([0, 1, 1, 2], [0, 1, 2, 2])
    found = back(tmp_path, text, table, matrix)
    assert found[0] == text
    assert found[1].columns == ["a", "b"]
    assert found[1].rows == [[1, "x"], [None, 2.5], [True, "<b>"]]
    assert found[2].counts == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert found[2].labels == ["0", "1", "2"]


def test_data_frames_become_tables(tmp_path):
    frames = (
        pd.DataFrame({"n": [1, 2], "f": [0.5, 1.5]}),
        pl.DataFrame({"n": [1, 2], "f": [0.5, 1.5]}),
    )
    for found in back(tmp_path, *frames):
        assert found.pandas().equals(frames[0])


def test_an_array_becomes_a_png_that_pillow_reads(tmp_path):
    colours = np.zeros((4, 6, 3))
    colours[:, :, 0] = 1
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    one, two = back(tmp_path, media.Image(colours), media.Image(grey))
    assert one.size == (6, 4)
    assert one.getpixel((0, 0)) == (255, 0, 0)
    assert np.array_equal(np.asarray(two), grey)


def test_a_histogram_of_lists_is_one_like_that_of_numpy(tmp_path):
    counts, edges = back(tmp_path, media.Histogram([1, 2], [0, 0.5, 1]))[0]
    assert (counts.tolist(), edges.tolist()) == ([1, 2], [0, 0.5, 1])


def test_the_same_table_is_stored_once(tmp_path):
    table = media.DataTable(["a"], [[k] for k in range(5000)])
    past = logged(tmp_path, table, table, media.DataTable(["a"], [[k] for k in range(5000)]))
    assert len({row["x"].oid for row in past.table("x").described()}) == 1
    assert next(past.table("x").described())["x"].nbytes < 5000 * 4


def test_they_are_described_drawn_and_saved(tmp_path):
    past = logged(
        tmp_path,
        media.Audio(np.zeros(4000), 8000),
        media.Text("<script>alert(1)</script>"),
        media.DataTable(["a"], [[1], [2]]),
        media.ConfusionMatrix([[1, 0], [2, 3]], ["cat", "dog"]),
    )
    described = [str(row["x"]) for row in past.table("x").described()]
    assert described == [
        "audio of 0.5 s",
        "text of 25 characters",
        "table of 2 rows and 1 columns",
        "confusion matrix of 2 classes",
    ]
    page = past.table("x")._repr_html_()
    assert "<audio controls" in page
    assert "<script>" not in page
    assert "<td>2</td>" in page
    saved = {file.path.suffix: file.path for file in past.save_values("latest", tmp_path / "out")}
    assert set(saved) == {".wav", ".txt", ".csv"}
    with wave.open(str(saved[".wav"])) as sound:
        assert sound.getnframes() == 4000
    files = sorted((tmp_path / "out").glob("*.csv"))
    assert files[0].read_text() == "a\n1\n2\n"
    assert files[1].read_text() == ",cat,dog\ncat,1,0\ndog,2,3\n"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (media.Audio(np.zeros((2, 2, 2))), "shape"),
        (media.Text("x", "rtf"), "rtf"),
        (media.DataTable(["a"], [[1, 2]]), "row 0"),
        (media.ConfusionMatrix([[1, 2]], ["a"]), "as many"),
        (media.Image(b"no"), "not a PNG"),
        (media.Histogram([1], [1]), "2 edges"),
    ],
)
def test_a_malformed_media_value_raises_a_warning_and_the_run_continues(tmp_path, value, why):
    with pytest.warns(RuntimeWarning) as told:
        past = logged(tmp_path, value)
    assert any(why in str(warning.message) and "media" in str(warning.message) for warning in told)
    assert type(value).__name__ in str(past.table("x").rows()[0]["x"])


def test_damaged_bytes_are_reported():
    from rearview.errors import DamagedError
    from rearview.store.stored_arrays_and_media import stored_value

    for kind, shape in (("audio", [1, 1]), ("text", [3]), ("table", [1, 1]), ("confusion", [2, 2])):
        facts = {"$object": "0" * 64, "kind": kind, "shape": shape, "nbytes": 4}
        value = stored_value(facts, lambda ref: b"junk")
        with pytest.raises(DamagedError):
            value.load()
