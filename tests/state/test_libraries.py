"""Objects of the libraries people train with, each in the way it is really used."""

import warnings

import numpy as np
import pytest

from rearview.state.compare import compare


def needed(name):
    """Import a library of the test group; its absence is a broken environment, not a choice."""
    return pytest.importorskip(name, reason=f"{name} is in the test group but not installed")


def data(rows=60):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int)


def test_pandas_frames_and_series_resume(resumes):
    pd = needed("pandas")

    def setup():
        return {"frame": pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}), "log": []}

    def step(names, i):
        frame = names["frame"]
        frame.loc[len(frame), ["a", "b"]] = [float(i), "z"]
        frame["c"] = frame["a"] * 2
        names["series"] = frame["a"].rolling(2).mean()
        names["log"].append(frame["c"].sum())
        return frame.to_csv(), names["series"].tolist()[-1], list(names["log"])

    resumes(setup, step)


def test_a_pandas_frame_that_two_names_share_stays_one(resumes):
    pd = needed("pandas")

    def setup():
        frame = pd.DataFrame({"a": [1.0, 2.0]})
        return {"one": frame, "holder": {"frame": frame}}

    def step(names, i):
        names["one"].loc[0, "a"] += i + 1
        return names["holder"]["frame"]["a"].tolist()

    _, resumed = resumes(setup, step)
    assert resumed.names["one"] is resumed.names["holder"]["frame"]


def test_polars_frames_resume(resumes):
    pl = needed("polars")

    def setup():
        return {"frame": pl.DataFrame({"a": [1.0]})}

    def step(names, i):
        names["frame"] = names["frame"].vstack(pl.DataFrame({"a": [float(i)]}))
        return names["frame"]["a"].to_list()

    resumes(setup, step)


def test_arrow_tables_go_by_reference(resumes):
    pa = needed("pyarrow")

    def setup():
        return {"table": pa.table({"a": list(range(1000))}), "row": 0}

    def step(names, i):
        names["row"] += 7
        names["slice"] = names["table"].slice(names["row"], 3)
        return names["slice"]["a"].to_pylist()

    resumes(setup, step)


@pytest.mark.parametrize(
    "name", ["SGDClassifier", "MLPClassifier", "GaussianNB", "MiniBatchKMeans", "Perceptron"]
)
def test_scikit_learn_partial_fit_resumes(name, resumes):
    needed("sklearn")
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.linear_model import Perceptron, SGDClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neural_network import MLPClassifier
    from sklearn.preprocessing import StandardScaler

    make = {
        "SGDClassifier": lambda: SGDClassifier(random_state=np.random.RandomState(0)),
        "MLPClassifier": lambda: MLPClassifier((5,), random_state=0),
        "GaussianNB": GaussianNB,
        "MiniBatchKMeans": lambda: MiniBatchKMeans(3, random_state=0, n_init=1),
        "Perceptron": lambda: Perceptron(random_state=0),
    }[name]
    x, y = data()

    def setup():
        return {"scaler": StandardScaler(), "model": make()}

    def step(names, i):
        part = slice(i * 10, i * 10 + 10)
        names["scaler"].partial_fit(x[part])
        known = {} if name == "MiniBatchKMeans" else {"classes": [0, 1]}
        names["model"].partial_fit(names["scaler"].transform(x[part]), y[part], **known)
        return names["model"].predict(x).tobytes(), names["scaler"].mean_.tobytes()

    resumes(setup, step)


def test_a_forest_that_grows_with_warm_start_resumes(resumes):
    needed("sklearn")
    from sklearn.ensemble import RandomForestClassifier

    x, y = data()

    def setup():
        return {"forest": RandomForestClassifier(2, warm_start=True, random_state=0, max_depth=3)}

    def step(names, i):
        names["forest"].n_estimators += 1
        names["forest"].fit(x, y)
        return names["forest"].predict_proba(x).tobytes()

    resumes(setup, step)


def test_xgboost_boosters_resume(resumes):
    xgboost = needed("xgboost")
    x, y = data()
    matrix = xgboost.DMatrix(x, y)

    def setup():
        params = {"max_depth": 2, "seed": 0, "nthread": 1}
        return {"booster": xgboost.Booster(params, [matrix]), "new": None}

    def step(names, i):
        names["booster"].update(matrix, i)
        if names["new"] is None:
            names["new"] = xgboost.Booster({"max_depth": 1, "nthread": 1}, [matrix])
        names["new"].update(matrix, i)
        return names["booster"].predict(matrix).tobytes(), names["new"].predict(matrix).tobytes()

    resumes(setup, step)


def test_an_xgboost_booster_that_samples_is_reported(program):
    xgboost = needed("xgboost")
    x, y = data()
    matrix = xgboost.DMatrix(x, y)
    run = program(lambda: {"booster": xgboost.Booster({"subsample": 0.5}, [matrix])}, None)
    run.names["booster"].update(matrix, 0)
    captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == [
        "booster: XGBoost does not save the random state of sampling"
    ]


def test_a_lightgbm_booster_with_its_training_set_is_reported(program):
    lightgbm = needed("lightgbm")
    x, y = data()
    train = lightgbm.Dataset(x, y)
    run = program(lambda: {"booster": lightgbm.Booster({"verbose": -1}, train)}, None)
    run.names["booster"].update()
    captured, _ = run.capture()
    assert "booster: LightGBM does not save the training set" in map(str, captured.missing)


def test_lightgbm_boosters_resume_as_they_predict(program):
    lightgbm = needed("lightgbm")
    x, y = data()

    def setup():
        train = lightgbm.Dataset(x, y, free_raw_data=False)
        params = {"verbose": -1, "num_threads": 1, "objective": "binary", "min_data_in_leaf": 5}
        return {"booster": lightgbm.train(params, train, 2), "params": params}

    def step(names, i):
        train = lightgbm.Dataset(x, y, free_raw_data=False)
        names["booster"] = lightgbm.train(names["params"], train, 1, init_model=names["booster"])
        return names["booster"].predict(x).tobytes()

    truth = program(setup, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    logged = truth.run(2, 3)
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    assert resumed.run(2, 3) == logged


def test_gymnasium_environments_resume_inside_an_episode(resumes):
    gymnasium = needed("gymnasium")

    def setup():
        env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
        env.action_space.seed(0)
        return {"env": env, "observation": env.reset(seed=0)[0]}

    def step(names, i):
        env = names["env"]
        for _ in range(7):
            names["observation"], reward, over, cut, _ = env.step(env.action_space.sample())
            if over or cut:
                names["observation"], _ = env.reset()
        return names["observation"].tobytes(), reward

    # Only the clock of the statistics wrapper differs, and it is the clock's business.
    with pytest.MonkeyPatch.context() as patch:
        import time

        patch.setattr(time, "perf_counter", lambda: 1.0)
        resumes(setup, step)


def test_jax_arrays_and_optax_states_resume(resumes):
    jax = needed("jax")
    optax = needed("optax")
    jnp = jax.numpy

    def setup():
        params = {"w": jnp.arange(4.0), "b": jnp.zeros(())}
        optimizer = optax.adam(0.1)

        @jax.jit
        def update(params, state, x):
            grads = jax.grad(lambda p: ((p["w"] * x).sum() + p["b"] - 1) ** 2)(params)
            change, state = optimizer.update(grads, state)
            return optax.apply_updates(params, change), state

        return {
            "params": params,
            "state": optimizer.init(params),
            "update": update,
            "key": jax.random.key(0),
            "old_key": jax.random.PRNGKey(1),
        }

    def step(names, i):
        names["key"], sub = jax.random.split(names["key"])
        names["old_key"], _ = jax.random.split(names["old_key"])
        x = jax.random.normal(sub, (4,))
        names["params"], names["state"] = names["update"](names["params"], names["state"], x)
        return np.asarray(names["params"]["w"]).tobytes(), np.asarray(names["old_key"]).tobytes()

    resumes(setup, step)


def test_flax_modules_resume(resumes):
    jax = needed("jax")
    flax = pytest.importorskip(
        "flax", reason="flax is optional in the test group: jax is tested above"
    )
    from flax import nnx

    assert flax.__version__

    def setup():
        model = nnx.Sequential(
            nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        )
        return {"model": model, "n": 0}

    def step(names, i):
        x = jax.numpy.ones((2, 4)) * i
        grads = nnx.grad(lambda m: (m(x) - 1).mean() ** 2)(names["model"])
        params = nnx.state(names["model"], nnx.Param)
        nnx.update(names["model"], jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.state(grads)))
        return np.asarray(names["model"](x)).tobytes()

    resumes(setup, step)


def test_keras_on_torch_resumes(resumes, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keras = pytest.importorskip("keras", reason="keras is optional in the test group")
    if keras.backend.backend() != "torch":
        pytest.skip("keras was already loaded with another backend")
    x, y = data()

    def setup():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        return {"model": model, "losses": []}

    def step(names, i):
        names["losses"].append(
            float(names["model"].train_on_batch(x[i * 8 : i * 8 + 8], y[i * 8 : i * 8 + 8]))
        )
        return list(names["losses"])

    resumes(setup, step)


def test_accelerate_resumes(resumes):
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is optional in the test group"
    )
    import torch

    def setup():
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        return {"accelerator": accelerator, "model": model, "optimizer": optimizer}

    def step(names, i):
        loss = names["model"](torch.randn(3, 4)).square().mean()
        names["accelerator"].backward(loss)
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        return float(loss.detach())

    resumes(setup, step)


def test_lightning_fabric_resumes(resumes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric_module = pytest.importorskip(
            "lightning.fabric", reason="lightning is optional in the test group"
        )
    import torch

    def setup():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = fabric.setup(model, optimizer)
        return {"fabric": fabric, "model": model, "optimizer": optimizer}

    def step(names, i):
        names["optimizer"].zero_grad()
        loss = names["model"](torch.randn(3, 4)).square().mean()
        names["fabric"].backward(loss)
        names["optimizer"].step()
        return float(loss.detach())

    resumes(setup, step)


def test_a_progress_bar_does_not_make_a_checkpoint_partial(resumes):
    tqdm = pytest.importorskip("tqdm", reason="tqdm is optional in the test group")

    def setup():
        return {"bar": tqdm.tqdm(total=10, disable=False, file=open("/dev/null", "w")), "n": 0}  # noqa: PTH123

    def step(names, i):
        names["bar"].update(1)
        return names["bar"].n

    resumes(setup, step)


def test_flags_of_absl_resume_without_the_addresses_of_modules(resumes):
    flags = pytest.importorskip("absl.flags")

    def setup():
        values = flags.FlagValues()
        flags.DEFINE_float("lr", 0.1, "rate", flag_values=values)
        values(["program"])
        return {"flags": values}

    def step(names, i):
        names["flags"].lr *= 0.9
        return names["flags"].lr

    truth, _ = resumes(setup, step)
    skeleton = truth.capture()[0].skeleton
    assert b"__flags_by_module_id" not in skeleton


def test_a_file_system_of_fsspec_is_the_same_in_another_process(program):
    fsspec = needed("fsspec")

    def setup():
        return {"fs": fsspec.filesystem("file", skip_instance_cache=True)}

    then, now = program(setup, None), program(setup, None)
    for one in (then, now):
        one.names["born"] = fsspec.filesystem("file", skip_instance_cache=True)
    captured, buffers = then.capture()
    for name in ("fs", "born"):  # it holds the number of the process
        now.names[name]._fs_token_ = "that of another process"
    here = now.names["fs"]
    assert compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__) is None
    now.restore(captured.skeleton, buffers)
    assert here._fs_token_ == "that of another process"
    here.auto_mkdir = True
    found = compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__)
    assert found.path == "fs.auto_mkdir"


def test_a_function_that_numba_compiled_is_program_and_no_state(program):
    numba = needed("numba")

    def setup():
        @numba.njit
        def double(x):
            return 2 * x

        return {"double": double, "total": 0}

    then, now = program(setup, None), program(setup, None)
    for one in (then, now):
        one.names["total"] = one.names["double"](3)
    captured, buffers = then.capture()
    assert captured.missing == []
    assert compare(now.anchors, now.capture()[0], captured.skeleton, buffers.__getitem__) is None
    now.restore(captured.skeleton, buffers)
    assert now.names["double"](4) == 8
