import numpy as np
import pytest
import torch

from rearview.state.object_numbers import Anchors


def test_arrays_and_their_views_still_share_memory(resumes):
    def setup():
        base = np.zeros(3000)
        return {"base": base, "view": base[10:20], "grid": base.reshape(30, 100).T, "made": []}

    def step(names, i):
        if not names["made"]:
            fresh = np.zeros((3, 4), order="F")
            names["made"] += [names["base"][5:15], fresh, fresh[1], fresh.T[::-1]]
        names["view"] += i + 1
        names["grid"][2, 3] = i
        names["made"][2][:] += i
        return [x.tobytes() for x in (names["base"], *names["made"])]

    _, resumed = resumes(setup, step)
    base, made = resumed.names["base"], resumed.names["made"]
    assert np.shares_memory(made[0], base)
    assert np.shares_memory(made[1], made[2])
    assert np.shares_memory(made[1], made[3])


@pytest.mark.parametrize("first", ["array", "tensor"])
@pytest.mark.parametrize("size", [4, 5000])
def test_an_array_and_a_tensor_still_share_their_memory(first, size, resumes):
    def step(names, i):
        if "made" not in names:
            if first == "array":
                array = np.zeros(size)
                names["made"] = [array, torch.from_numpy(array)]
            else:
                tensor = torch.zeros(size)
                names["made"] = [tensor.numpy(), tensor]
        names["made"][0][1] += i + 1
        return float(names["made"][1][1])

    resumes(lambda: {"n": 0}, step)


@pytest.mark.parametrize(
    "dtype", ["f2", "f8", "i1", "u4", "?", "c16", "U5", "S3", "M8[s]", "m8[ms]", "i4,f8", "O"]
)
def test_arrays_of_every_dtype_come_back(dtype, resumes):
    def setup():
        return {"old": np.zeros(3, dtype)}

    def step(names, i):
        value = (
            np.ones(3, dtype)
            if dtype not in {"M8[s]", "m8[ms]"}
            else np.full(3, i, "i8").astype(dtype)
        )
        names["old"][i % 3] = value[0]
        names.setdefault("new", np.zeros((2, 2), dtype))[0, i % 2] = value[0]
        return names["old"].tolist(), names["new"].tolist(), names["new"].dtype.str

    resumes(setup, step, stale_differs=False)


def test_objects_in_an_array_keep_their_identity(resumes):
    def setup():
        shared = [0]
        old = np.empty(2, object)
        old[:] = [shared, {"a": shared}]
        return {"shared": shared, "old": old}

    def step(names, i):
        names["old"][0].append(i)
        return list(names["shared"])

    _, resumed = resumes(setup, step)
    assert resumed.names["old"][1]["a"] is resumed.names["shared"]


def test_an_array_resized_or_reshaped_in_place_comes_back(resumes):
    def setup():
        return {"grown": np.zeros(2), "turned": np.arange(6.0)}

    def step(names, i):
        names["grown"].resize(i + 3, refcheck=False)
        names["grown"][-1] = i
        names["turned"].resize((2, 3) if i % 2 else (3, 2), refcheck=False)
        return names["grown"].tolist(), names["turned"].tolist()

    resumes(setup, step)


def test_a_read_only_flag_comes_back(resumes):
    def setup():
        return {"old": np.arange(3.0)}

    def step(names, i):
        if i < 2:
            names["old"][0] = i + 5
            names["old"].flags.writeable = False
            names["old"].flags.writeable = i == 0
        return names["old"].tolist(), names["old"].flags.writeable

    resumes(setup, step)


def test_random_states_and_generators_resume_with_their_sharing(resumes):
    def setup():
        bits = np.random.PCG64(3)
        return {
            "state": np.random.RandomState(1),
            "one": np.random.Generator(bits),
            "two": np.random.Generator(bits),
            "mt": np.random.Generator(np.random.MT19937(4)),
        }

    def step(names, i):
        names.setdefault("new", np.random.default_rng(9))
        child = names["one"].spawn(1)[0]
        return [
            names["state"].rand(),
            names["one"].random(),
            names["two"].standard_normal(),
            names["mt"].integers(1000),
            names["new"].random(),
            child.random(),
            np.random.rand(),  # noqa: NPY002
        ]

    def seeded():
        np.random.seed(0)  # noqa: NPY002
        return setup()

    _, resumed = resumes(seeded, step)
    assert resumed.names["one"].bit_generator is resumed.names["two"].bit_generator


def test_a_memory_map_for_reading_is_not_captured(program, tmp_path):
    path = tmp_path / "data.bin"
    np.arange(100_000.0).tofile(path)
    run = program(lambda: {"data": np.memmap(path, np.float64, "r")}, None)
    captured, buffers = run.capture()
    assert buffers == {}
    assert len(captured.skeleton) < 20_000
    assert captured.missing == []


def test_a_memory_map_for_writing_comes_back(resumes, tmp_path):
    path = tmp_path / "data.bin"

    def setup():
        return {"data": np.memmap(path, np.float64, "w+", shape=(1000,))}

    def step(names, i):
        names["data"][i] = names["data"].sum() + 1
        return float(names["data"].sum())

    resumes(setup, step)


def test_masked_and_record_arrays_resume(resumes):
    def setup():
        return {
            "masked": np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
            "rec": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        }

    def step(names, i):
        names["masked"][i % 3] = np.ma.masked if i % 2 else i
        names["rec"].a[0] += i
        return names["masked"].tolist(), names["rec"].tolist()

    resumes(setup, step)


def test_numpy_scalars_and_dtypes_are_values(resumes):
    def setup():
        return {"total": np.float32(0), "dtype": np.dtype("f4")}

    def step(names, i):
        names["total"] = names["total"] + np.float32(0.1)
        return names["total"].tobytes(), names["dtype"].str

    resumes(setup, step)


def test_a_view_made_in_the_loop_shares_the_memory_of_its_array_after_a_restore(resumes):
    """Whether the name of the view or that of the array comes first."""

    def setup():
        return {
            "before": None,
            "data": np.arange(4000.0).reshape(400, 10),
            "few": np.arange(20.0),
            "part": None,
        }

    def step(names, i):
        names["data"] *= 0.5
        names["few"] += 1
        seen = [names[name].sum() for name in ("before", "part") if names[name] is not None]
        names["before"] = names["data"][10 * i : 10 * i + 10]
        names["part"] = names["few"][i::2]
        return seen

    resumes(setup, step)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", [10, 2000])
def test_an_array_made_in_the_loop_owns_its_memory_after_a_restore(size, order, resumes):
    def step(names, i):
        if "made" not in names:
            names["made"] = np.zeros((size, 2), order=order)
            names["view"] = names["made"][2:5]
        names["made"][0, 0] += i
        names["view"][:] = i
        owned = names["made"].flags.owndata, names["view"].base is names["made"]
        return owned, names["made"].tobytes()

    _, resumed = resumes(lambda: {"n": 0}, step)
    del resumed.names["view"]
    resumed.names["made"].resize((size + 1, 2), refcheck=False)


def test_an_array_resized_after_a_restore_is_resized_as_before(resumes):
    def step(names, i):
        names.setdefault("made", np.arange(3000.0))[0] += i
        if i > 2:
            names["made"].resize(names["made"].size + 1, refcheck=False)
        return names["made"].tobytes()

    resumes(lambda: {"n": 0}, step)


VIEWS = {
    "a tensor's array": lambda: [torch.tensor(1.0).numpy(), torch.ones(30).numpy()[2:5]],
    "a transposed array": lambda: [np.arange(6.0).reshape(2, 3).T, np.zeros((300, 20)).T],
    "parts of one array": lambda: np.array_split(np.arange(10), 3),
    "results of functions": lambda: [
        *np.unique([3, 1, 3], return_inverse=True),
        np.diag(np.eye(3)),
    ],
    "objects": lambda: [np.array([[1], "two", None], dtype=object)[1:]],
    "bytes that can change": lambda: [np.frombuffer(bytearray(b"12345678"), np.uint8)],
    "a record array": lambda: [np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])],
}


@pytest.mark.parametrize("made", VIEWS.values(), ids=VIEWS)
def test_what_a_loop_made_is_walked_alike_after_it_was_restored(made, program):
    run = program(lambda: {"kept": []}, None)
    run.names["made"] = made()
    captured, buffers = run.capture()
    assert captured.missing == []
    restored = program(lambda: {"kept": []}, None)
    restored.restore(captured.skeleton, buffers)
    # a loop that comes later is entered with these objects
    later = [program(lambda names=names: names, None) for names in (run.names, restored.names)]
    later[1].anchors.check(later[0].anchors.signature)


def test_anchors_of_a_run_that_numbered_the_owners_of_arrays_are_found():
    owners = ["builtins.list", "numpy.ndarray", "numpy.ndarray", "torch.Tensor"]
    found = Anchors.walk(
        {"local:main:made": [torch.ones(3).numpy(), torch.ones(9).numpy()[2:5].T]},
        project=lambda _: False,
        signature=[*owners, "numpy.ndarray", "torch.Tensor"],
    )
    found.check([*owners, "numpy.ndarray", "torch.Tensor"])
