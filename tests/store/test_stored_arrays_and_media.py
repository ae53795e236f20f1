"""What was logged as an array, tensor, image or histogram comes back as what it was."""

import io
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.extra import numpy as arrays
from PIL import Image

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.store.checkpoints.objects import Objects
from rearview.store.stored_arrays_and_media import StoredValue, stored_value, value_in_text
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.result_table import PREVIEW
from rearview.store.values_as_json import convert
from recorded import Recorded, at

TORCH = [
    getattr(torch, name)
    for name in (
        *("float16", "float32", "float64", "bfloat16", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
]
NUMPY = ["<f2", "<f4", ">f8", "<c16", "?", "|i1", ">i4", "<u8", "<M8[ns]", "<m8[D]", "<U5", "|S3"]
STRUCTURED = np.dtype({"names": ["a", "b"], "formats": ["<i2", ("<f8", (2,))], "itemsize": 24})


@pytest.fixture
def store(tmp_path):
    return Recorded(tmp_path)


@pytest.fixture
def log(store):
    """Record values under names, one call a row, and return the tables."""

    def log(*rows):
        run = store.run(over=False)
        store.open.close()
        calls = [(at(epoch=k), row) for k, row in enumerate(rows)]
        store.add(run, *calls, put=Objects(store.project).put)
        store.runs.end(run, 0)
        return Tables(store.project)

    return log


def tensors(dtype):
    numbers = torch.arange(6).reshape(2, 3)
    return [numbers.to(dtype), numbers.to(dtype).T, torch.empty(0, 4, dtype=dtype)]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_a_tensor_of_any_dtype_comes_back_bit_for_bit(log, dtype):
    logged = tensors(dtype)
    rows = log(*({"w": one} for one in logged)).table(["w"]).rows()
    for row, then in zip(rows, logged, strict=True):
        assert isinstance(row["w"], torch.Tensor)
        assert (row["w"].dtype, row["w"].shape) == (then.dtype, then.shape)
        assert row["w"].tolist() == then.tolist()


@pytest.mark.parametrize("dtype", [*NUMPY, STRUCTURED], ids=str)
def test_an_array_of_any_dtype_comes_back_bit_for_bit(log, dtype):
    array = np.zeros((2, 3), dtype)
    array.view(np.uint8).reshape(-1)[::7] = 1
    back = log({"w": array}).table(["w"]).rows()[0]["w"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    back[...] = np.zeros((), dtype)  # it is the caller's own


def test_an_array_of_a_type_that_another_library_adds_keeps_it(log):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    tables = log({"w": array})
    back = tables.table(["w"]).rows()[0]["w"]
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()
    value = next(tables.table(["w"]).described())["w"]
    assert value.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_every_way_of_asking_gives_the_tensor(log):
    tables = log({"w": torch.ones(2, 2), "loss": 1.0}, {"w": torch.zeros(2, 2), "loss": 0.5})
    found = tables.table(["w", "loss"])
    assert [row["w"].sum().item() for row in found] == [4, 0]
    assert [one.sum().item() for one in found.pandas()["w"]] == [4, 0]
    assert [one.sum().item() for one in found.polars()["w"]] == [4, 0]
    asked = tables.sql("SELECT w, loss FROM full_pivot ORDER BY epoch", values=True)
    assert [row["w"].sum().item() for row in asked] == [4, 0]
    assert [one.sum().item() for one in asked.pandas()["w"]] == [4, 0]
    assert asked.pandas()["loss"].dtype == np.float64
    text = tables.sql("SELECT w FROM full_pivot").rows()[0]["w"]
    assert json.loads(text)["dtype"] == "float32"


def test_arrays_inside_lists_and_among_other_values_come_back(log):
    inner = {"grads": [torch.ones(2), 1], "$object": "mine"}
    rows = log({"m": 1.5, "n": inner}, {"m": np.arange(3), "n": inner}).table(["m", "n"]).rows()
    assert rows[0]["m"] == 1.5
    assert rows[1]["m"].tolist() == [0, 1, 2]
    assert rows[0]["n"]["grads"][0].tolist() == [1, 1]
    assert rows[0]["n"]["$object"] == "mine"  # a key of the user's is no marker of ours


def test_images_figures_and_histograms_come_back(log):
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(1, 1))
    logged = {
        "image": Image.new("RGB", (30, 28), "red"),
        "figure": figure,
        "hist": torch.histogram(torch.arange(8.0), 4),
    }
    row = log(logged).table(list(logged)).rows()[0]
    assert row["image"].size == (30, 28)
    assert row["image"].getpixel((0, 0)) == (255, 0, 0)
    assert row["figure"].format == "PNG"
    counts, edges = row["hist"]
    assert counts.tolist() == [2, 2, 2, 2]
    assert len(edges) == 5


def test_texts_describe_a_stored_value_without_reading_it(log, store):
    logged = {"w": torch.ones(64, 10, dtype=torch.bfloat16), "a": np.zeros(3, "<i2"),
              "i": Image.new("L", (30, 28)), "h": np.histogram([1, 2], 5)}  # fmt: skip
    tables = log(logged)
    for file in store.project.objects.rglob("*"):
        if file.is_file():
            file.unlink()
    found = tables.table(list(logged))
    texts = ["bfloat16[64, 10]", "int16[3]", "image 30\u00d728", "histogram of 5 bins"]
    for text in texts:
        assert text in repr(found)
        assert text in found._repr_html_()
    with pytest.raises(StoreError):
        found.rows()
    assert [str(one) for one in list(next(found.described()).values())[2:]] == texts


def test_a_notebook_draws_images_and_histograms(log):
    found = log({"i": Image.new("L", (30, 28)), "h": np.histogram([1, 2], 5)}).table(["i", "h"])
    page = found._repr_html_()
    assert '<img src="data:image/png;base64,iVBOR' in page
    assert page.count("<rect") == 5


def test_a_notebook_holds_only_so_many_bytes_of_images(log, monkeypatch):
    monkeypatch.setattr("rearview.store.tables.result_table.THUMBNAILS", 150)
    rows = [{"i": Image.new("L", (8, 8), k)} for k in range(PREVIEW)]
    page = log(*rows).table(["i"])._repr_html_()
    assert 1 <= page.count("<img") <= 2
    assert page.count("image 8\u00d78") >= PREVIEW


def test_outer_values_repeated_on_inner_rows_are_one_object(store):
    run = store.run(over=False)
    store.open.close()
    calls = [(at(epoch=0), {"w": torch.ones(4)})]
    calls += [(at(epoch=0, step=k), {"loss": 0.1}) for k in range(3)]
    store.add(run, *calls, put=Objects(store.project).put)
    rows = Tables(store.project).table(["w", "loss"]).rows()
    assert len(rows) == 3
    assert len({id(row["w"]) for row in rows}) == 1


def test_sql_reads_shape_dtype_and_oid(log):
    tables = log({"w": torch.ones(2, 3), "text": "{", "n": 1})
    row = tables.sql(
        "SELECT value_kind(w) k, value_dtype(w) d, value_shape(w) s, value_bytes(w) b, value_oid(w) o, "
        "value_shape(text) none FROM full_pivot"
    ).rows()[0]
    oid = row.pop("o")
    assert row == {"k": "tensor", "d": "float32", "s": [2, 3], "b": 24, "none": None}
    records = tables.sql(f"SELECT count(*) n FROM records WHERE value_oid(text) = '{oid}'")
    assert records.rows() == [{"n": 1}]


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_without_its_library_a_value_describes_itself(log, monkeypatch, library):
    tables = log({"w": torch.ones(2, dtype=torch.bfloat16), "a": np.arange(2.0)})
    monkeypatch.setitem(sys.modules, library, None)
    row = tables.table(["w", "a"]).rows()[0]
    value = row["w" if library == "torch" else "a"]
    assert isinstance(value, StoredValue)
    assert (value.dtype, value.shape) == (
        ("bfloat16", (2,)) if library == "torch" else ("<f8", (2,))
    )
    assert value.raw() == (b"\x80?" * 2 if library == "torch" else np_bytes())
    if library == "torch":
        assert value.numpy().tolist() == [1.0, 1.0]
    else:
        with pytest.raises(UsageError, match="numpy is not installed"):
            value.numpy()
    assert value.npy().startswith(b"\x93NUMPY")


def np_bytes():
    return b"\0" * 8 + b"\0" * 6 + b"\xf0?"


def test_without_pillow_an_image_is_its_file(log, monkeypatch):
    tables = log({"i": Image.new("L", (3, 2))})
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert tables.table(["i"]).rows()[0]["i"].startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_numpy_reads_the_file_of_any_tensor(dtype):
    for tensor in tensors(dtype):
        value = kept(tensor)
        back = np.load(io.BytesIO(value.npy()), allow_pickle=False)
        assert back.shape == tuple(tensor.shape)
        assert back.tolist() == tensor.tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrays.arrays(
        arrays.scalar_dtypes() | arrays.array_dtypes(), arrays.array_shapes(min_dims=1, min_side=0)
    )
)
def test_numpy_reads_the_file_of_any_array(array):
    value = kept(array)
    back = np.load(io.BytesIO(value.npy()), allow_pickle=False)
    assert back.tobytes() == np.ascontiguousarray(array).tobytes()
    assert back.shape == array.shape
    assert value.load().tobytes() == back.tobytes()


def kept(value):
    shelf = {}

    def put(data):
        from rearview.store.checkpoints.objects import as_bytes, reference_of

        ref = reference_of(as_bytes(data))
        shelf[ref.oid] = bytes(as_bytes(data))
        return ref

    facts = json.loads(json.dumps(convert(value, put)))
    return stored_value(facts, lambda ref: shelf[ref.oid])


BAD = {
    "a dtype that is no dtype": {"dtype": "load"},
    "a shape that does not fit": {"shape": [7]},
    "a dtype of objects": {"kind": "array", "dtype": "|O"},
    "a name that leads elsewhere": {"$object": "../../../../etc/passwd"},
    "a pack that leads elsewhere": {"pack": "../../x"},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_description_that_lies_is_damage_and_runs_nothing(change):
    value = kept(torch.ones(2))
    facts = {**value.facts, **change}
    read = []

    def get(ref):
        read.append(ref.oid)
        return value.raw()

    with pytest.raises(DamagedError) as error:
        stored_value(facts, get).load()
    assert error.value.slug == "value-damaged"
    assert all(len(oid) == 64 for oid in read)


@pytest.mark.parametrize(
    "change", [{"kind": "pickle"}, {"shape": [-1]}, {"nbytes": "8"}, {"shape": 3}]
)
def test_a_description_of_no_known_form_stays_a_description(change):
    assert stored_value({**kept(torch.ones(2)).facts, **change}) is None


def test_no_value_is_ever_unpickled(log, monkeypatch):
    logged = {"w": torch.ones(2), "a": np.arange(3), "i": Image.new("L", (2, 2)),
              "h": np.histogram([1], 2)}  # fmt: skip
    found = log(logged).table(list(logged))

    def refuse(*_args, **_options):
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert len(found.rows()) == 1
    assert "<img" in found._repr_html_()


def test_only_the_text_of_a_stored_value_counts_as_a_stored_value():
    value = kept(torch.ones(2))
    text = json.dumps(dict(value.facts), separators=(",", ":"))
    assert value_in_text(text).shape == (2,)
    for other in (None, 3, "", text[:-1], text.replace(value.oid, "ab"), f" {text}"):
        assert value_in_text(other) is None


def test_a_value_can_be_asked_for_an_array_only_if_it_is_one():
    value = kept(np.histogram([1, 2], 2))
    with pytest.raises(UsageError) as error:
        value.numpy()
    assert error.value.slug == "not-an-array"
    assert value.histogram() == ([1.0, 1.0], [1.0, 1.5, 2.0])
