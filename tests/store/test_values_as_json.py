"""Whatever is logged comes back as it was, or says that it is only a repr."""

import datetime as dt
import enum
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rearview.model import ObjectRef
from rearview.store.values_as_json import convert, load, restore


class Shelf:
    """Stands in for the object store."""

    def __init__(self):
        self.kept = {}

    def put(self, data):
        raw = bytes(data)
        oid = hashlib.sha256(raw).hexdigest()
        self.kept[oid] = raw
        return ObjectRef(oid, len(raw))


def there_and_back(value):
    return restore(json.loads(json.dumps(convert(value), allow_nan=False)))


text = st.text(st.characters(blacklist_categories=()))
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary()
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["$float", "$json", "$object"]), inner),
    max_leaves=10,
)  # fmt: skip


@given(trees)
def test_anything_made_of_scalars_comes_back(value):
    assert there_and_back(value) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e308])
def test_floats_are_exact_to_the_bit(value):
    out = there_and_back(value)
    assert type(out) is float
    assert repr(out) == repr(value)
    assert math.copysign(1, out) == math.copysign(1, value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400, -(3**20_000)], ids=range(4))
def test_whole_numbers_of_any_size_come_back(value):
    assert there_and_back(value) == value


def test_scalars_of_numpy_and_torch_become_plain_numbers():
    for value, plain in [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(2.5), 2.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor(3), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.nn.Parameter(torch.tensor(4.0)), 4.0),
    ]:
        out = there_and_back(value)
        assert out == plain
        assert type(out) is type(plain)


def test_enums_and_paths_become_plain_values():
    class Colour(enum.Enum):
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 3

    assert there_and_back(Colour.RED) == "red"
    assert there_and_back(Level.HIGH) == 3
    assert there_and_back(Path("a/b")) == "a/b"
    assert there_and_back(dt.date(2026, 1, 2)) == "2026-01-02"
    assert there_and_back(1 + 2j) == {"real": 1.0, "imag": 2.0}
    assert there_and_back({1: (2, 3)}) == {"1": [2, 3]}


def test_an_object_of_an_unknown_type_is_stored_as_a_marked_repr():
    class Odd:
        def __repr__(self):
            raise ValueError

    assert convert(object()).keys() == {"$repr"}
    assert "whose repr failed" in convert(Odd())["$repr"]
    loop = []
    loop.append(loop)
    assert "$repr" in json.dumps(convert(loop))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.zeros((0, 3), "int8"),
        np.array(["a", "bcd"]),
        np.array([True, False]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.arange(4, dtype=">i4"),
    ],
)
def test_arrays_are_objects_and_load_again(array):
    shelf = Shelf()
    value = convert(array, shelf.put)
    assert (value["kind"], value["shape"]) == ("array", list(array.shape))
    out = load(value, shelf.kept[value["$object"]])
    assert out.dtype == array.dtype
    assert np.array_equal(out, array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(4, dtype=torch.bfloat16),
        torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.arange(3).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
        torch.randn(2, 2, requires_grad=True),
    ],
    ids=lambda t: str(t.dtype),
)
def test_tensors_are_objects_and_load_again(tensor):
    shelf = Shelf()
    value = convert(tensor, shelf.put)
    dense = tensor.detach().to_dense() if tensor.layout is torch.sparse_coo else tensor.detach()
    out = load(value, shelf.kept[value["$object"]])
    assert (value["kind"], out.dtype, out.shape) == ("tensor", dense.dtype, dense.shape)
    assert torch.equal(out.to(torch.complex64), dense.to(torch.complex64))


def test_histograms_are_known_by_their_shape():
    shelf = Shelf()
    data = np.random.default_rng(0).normal(size=100)
    for pair in (np.histogram(data, 7), torch.histogram(torch.tensor(data), 7)):
        value = convert(tuple(pair), shelf.put)
        assert value["kind"] == "histogram"
        counts, edges = load(value, shelf.kept[value["$object"]])
        assert counts.sum() == 100
        assert len(edges) == 8


def test_images_and_figures_are_png():
    class Picture:
        """What PIL's images look like from here."""

        mode, height, width = "RGB", 2, 3

        def getbands(self):
            return ("R", "G", "B")

        def save(self, file, format):  # noqa: A002
            file.write(b"png of a picture")

    class Figure:
        def savefig(self, file, format):  # noqa: A002
            file.write(b"png of a figure")

    shelf = Shelf()
    for image in (Picture(), Figure()):
        value = convert(image, shelf.put)
        assert value["kind"] == "image"
        assert load(value, shelf.kept[value["$object"]]).startswith(b"png")


def test_arrays_inside_a_dictionary_are_objects_there():
    shelf = Shelf()
    value = restore(convert({"w": np.ones(3), "n": 1}, shelf.put))
    assert value["n"] == 1
    assert load(value["w"], shelf.kept[value["w"]["$object"]]).tolist() == [1, 1, 1]


def test_a_user_dictionary_with_our_markers_stays_a_dictionary():
    for value in ({"$float": "nan"}, {"$object": "x"}, {"a": {"$json": [1]}}):
        assert there_and_back(value) == value
