import copy
import inspect
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import rearview
from rearview.errors import StateError


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
    )


def train(names, i=0, **step_args):
    names["optimizer"].zero_grad()
    loss = names["model"](torch.randn(5, 6)).square().mean()
    loss.backward()
    names["optimizer"].step(**step_args)
    return bits(loss)


def test_a_model_with_dropout_and_batch_norm_resumes_bit_for_bit(resumes):
    def setup():
        model = make_model()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    truth, resumed = resumes(setup, train)
    for a, b in zip(
        truth.names["model"].state_dict().values(),
        resumed.names["model"].state_dict().values(),
        strict=True,
    ):
        assert bits(a) == bits(b)


def optimizers():
    found = []
    for name, cls in sorted(vars(torch.optim).items()):
        if (
            inspect.isclass(cls)
            and issubclass(cls, torch.optim.Optimizer)
            and cls is not torch.optim.Optimizer
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("name", optimizers())
def test_every_optimizer_resumes(name, resumes):
    cls = getattr(torch.optim, name)

    def setup():
        torch.manual_seed(0)
        if name == "SparseAdam":
            model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
        elif name == "Muon":
            model = nn.Sequential(nn.Linear(6, 3, bias=False))
        else:
            model = make_model()
        return {"model": model, "optimizer": cls(model.parameters(), lr=0.01)}

    def step(names, i):
        model, optimizer = names["model"], names["optimizer"]

        def closure():
            optimizer.zero_grad()
            inputs = torch.randint(0, 10, (5,)) if name == "SparseAdam" else torch.randn(5, 6)
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            return loss

        return bits(optimizer.step(closure))

    resumes(setup, step)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}


def test_the_list_of_schedulers_is_complete():
    known = {
        name
        for name, cls in vars(lr_scheduler).items()
        if inspect.isclass(cls)
        and issubclass(cls, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and cls is not lr_scheduler.LRScheduler
    }
    assert known <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*scheduler.*:UserWarning")
def test_every_scheduler_resumes(name, resumes):
    def setup():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def step(names, i):
        loss = train(names)
        names["scheduler"].step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return loss, [group["lr"] for group in names["optimizer"].param_groups]

    resumes(setup, step)


def test_a_grad_scaler_and_autocast_resume(resumes):
    def setup():
        model = make_model()
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        }

    def step(names, i):
        names["optimizer"].zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = names["model"](torch.randn(5, 6)).square().mean()
        names["scaler"].scale(loss).backward()
        names["scaler"].step(names["optimizer"])
        names["scaler"].update()
        return names["scaler"].get_scale(), bits(loss)

    resumes(setup, step)


def test_an_averaged_model_resumes(resumes):
    def setup():
        model = make_model()
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "swa": swa_utils.AveragedModel(model),
            "ema": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        }

    def step(names, i):
        train(names)
        names["swa"].update_parameters(names["model"])
        names["ema"].update_parameters(names["model"])
        return [bits(p) for key in ("swa", "ema") for p in names[key].parameters()]

    resumes(setup, step)


def test_hooks_continue_to_count_and_can_be_removed(resumes):
    def setup():
        model = make_model()
        seen = []
        handle = model[0].register_forward_hook(
            lambda m, args, out: seen.append(float(out.detach().sum()))
        )
        model[4].weight.register_hook(lambda grad: grad * 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "seen": seen, "handle": handle}

    def step(names, i):
        if i == 3:
            names["handle"].remove()
        return train(names), list(names["seen"])

    _, resumed = resumes(setup, step)
    assert len(resumed.names["seen"]) == 3


def test_a_hook_registered_in_the_loop_is_not_displaced_by_the_next_one(resumes):
    def setup():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "seen": []}

    def step(names, i):
        seen = names["seen"]
        names["model"][0].register_forward_hook(lambda m, args, out, i=i: seen.append(i))
        return train(names), list(seen)

    _, resumed = resumes(setup, step)
    assert resumed.names["seen"] == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_tied_weights_stay_tied(resumes):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(7, 4)
            self.decoder = nn.Linear(4, 7, bias=False)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x))

    def setup():
        torch.manual_seed(0)
        model = Tied()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}

    def step(names, i):
        names["optimizer"].zero_grad()
        loss = names["model"](torch.randint(0, 7, (9,))).square().mean()
        loss.backward()
        names["optimizer"].step()
        return bits(loss)

    _, resumed = resumes(setup, step)
    model = resumed.names["model"]
    assert model.decoder.weight is model.encoder.weight
    assert resumed.names["optimizer"].param_groups[0]["params"][0] is model.encoder.weight


def test_a_state_dict_that_was_not_copied_stays_the_model(resumes):
    def setup():
        model = make_model()
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "best": None,
        }

    def step(names, i):
        loss = train(names)
        if names["best"] is None:
            names["best"] = names["model"].state_dict()
            names["kept"] = copy.deepcopy(names["best"])
        return loss, bits(names["best"]["0.weight"]), bits(names["kept"]["0.weight"])

    _, resumed = resumes(setup, step)
    shared = resumed.names["best"]["0.weight"]
    assert shared.data_ptr() == resumed.names["model"][0].weight.data_ptr()
    assert resumed.names["kept"]["0.weight"].data_ptr() != shared.data_ptr()


def test_frozen_weights_keep_their_buffer_key_and_bytes(program):
    def setup():
        torch.manual_seed(0)
        body = nn.Linear(64, 64).requires_grad_(False)
        model = nn.Sequential(body, nn.Linear(64, 64))
        params = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(params, lr=0.1)}

    def step(names, i):
        names["optimizer"].zero_grad()
        names["model"](torch.randn(3, 64)).sum().backward()
        names["optimizer"].step()

    run = program(setup, step)
    run.run(0, 1)
    _, first = run.capture()
    run.run(1, 2)
    _, second = run.capture()
    moments = {key for key in first if key.startswith("i")} & second.keys()
    assert len(moments) >= 2, "memory that stays where it is keeps its key"
    frozen = [key for key in first if first[key] == second.get(key)]
    assert len(frozen) == 1
    assert len(first[frozen[0]]) == 64 * 64 * 4


def test_views_still_share_one_storage(resumes):
    def setup():
        base = torch.zeros(3000)
        return {"base": base, "view": base[10:20], "turned": base.view(30, 100).t(), "made": []}

    def step(names, i):
        if not names["made"]:
            names["made"].append(names["base"][5:15])
            fresh = torch.zeros(4, 4)
            names["made"] += [fresh, fresh[1]]
        names["view"] += i + 1
        names["made"][2].add_(i + 1)
        names["turned"][3, 4] = i
        return [bits(t) for t in (names["base"], *names["made"])]

    _, resumed = resumes(setup, step)
    base, made = resumed.names["base"], resumed.names["made"]
    assert made[0].data_ptr() == base.data_ptr() + 5 * 4
    assert made[2].data_ptr() == made[1][1].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(24.0).view(4, 6).t()[1:3], id="non-contiguous"),
        pytest.param(lambda: torch.randn(5).to(torch.bfloat16), id="bfloat16"),
        pytest.param(lambda: torch.randn(5).to(torch.float16), id="float16"),
        pytest.param(lambda: torch.randn(5).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.randn(5, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.randn(5, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(lambda: torch.tensor([True, False]), id="bool"),
        pytest.param(lambda: torch.tensor(3), id="scalar"),
        pytest.param(lambda: torch.empty(0, 3), id="empty"),
        pytest.param(lambda: torch.randn(3).expand(4, 3), id="expanded"),
        pytest.param(lambda: torch.randn(3, 4).to_sparse(), id="sparse-coo"),
        pytest.param(lambda: torch.randn(3, 4).to_sparse_csr(), id="sparse-csr"),
        pytest.param(lambda: torch.randn(3, 4).to_sparse_csc(), id="sparse-csc"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8), id="quantized"
        ),
        pytest.param(
            lambda: torch.quantize_per_channel(
                torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
            ),
            id="quantized-by-channel",
        ),
        pytest.param(lambda: nn.Parameter(torch.randn(3)), id="parameter"),
        pytest.param(lambda: nn.Buffer(torch.randn(3)), id="buffer"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta|deprecated|prototype).*:UserWarning")
@pytest.mark.parametrize("anchored", [True, False], ids=["older-than-the-loop", "born-in-the-loop"])
def test_a_tensor_of_any_form_comes_back(make, anchored, program):
    def setup():
        torch.manual_seed(0)
        return {"held": [make()] if anchored else [], "n": 0}

    def step(names, i):
        torch.manual_seed(7)
        if anchored:
            with torch.no_grad():
                held = names["held"][0]
                if held.layout is not torch.strided or held.is_quantized:
                    names["held"][0].data = make()
                elif held.is_floating_point() and held.stride() != (0, 1):
                    held.copy_(make())
        else:
            names["held"] = [make()]

    truth = program(setup, step)
    truth.run(0, 1)
    captured, buffers = truth.capture()
    assert captured.missing == []
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    a, b = truth.names["held"][0], resumed.names["held"][0]
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (
        b.dtype,
        b.shape,
        b.layout,
        b.requires_grad,
    )
    if a.layout is torch.strided:
        assert a.stride() == b.stride()
        assert a.is_conj() == b.is_conj()
    if a.is_quantized:
        assert torch.equal(a.int_repr(), b.int_repr())
        assert torch.equal(a.dequantize(), b.dequantize())
    else:
        dense = [
            t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (a, b)
        ]
        assert bits(dense[0].resolve_conj().clone()) == bits(dense[1].resolve_conj().clone())


def test_a_meta_tensor_comes_back_without_memory(program):
    run = program(dict, lambda names, i: names.update(made=torch.empty(10, device="meta")))
    run.run(0, 1)
    captured, buffers = run.capture()
    assert buffers == {}
    again = program(dict, None)
    again.restore(captured.skeleton, buffers)
    assert again.names["made"].is_meta
    assert again.names["made"].shape == (10,)


class Tagged(torch.Tensor):
    """A subclass as users write them, with an attribute."""


def test_a_tensor_subclass_keeps_type_and_attributes(resumes):
    def setup():
        torch.manual_seed(0)
        old = torch.randn(3).as_subclass(Tagged)
        old.tag = "first"
        return {"old": old, "new": None}

    def step(names, i):
        names["old"].add_(1)
        names["old"].tag = f"step {i}"
        if names["new"] is None:
            names["new"] = torch.randn(2).as_subclass(Tagged)
            names["new"].tag = ["made"]
        names["new"].tag.append(i)
        return (
            bits(names["old"].as_subclass(torch.Tensor)),
            names["old"].tag,
            list(names["new"].tag),
        )

    _, resumed = resumes(setup, step)
    assert type(resumed.names["new"]) is Tagged


def test_gradients_carried_over_the_boundary_come_back(resumes):
    def setup():
        model = make_model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def step(names, i):
        loss = names["model"](torch.randn(5, 6)).square().mean()
        loss.backward()
        if i % 3 == 2:
            names["optimizer"].step()
            names["optimizer"].zero_grad()
        return bits(loss)

    resumes(setup, step)


def test_a_loss_that_is_alive_at_the_boundary_keeps_its_value(resumes):
    def setup():
        model = make_model()
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "total": 0.0,
        }

    def step(names, i):
        before = bits(names["loss"]) if "loss" in names else b""
        names["optimizer"].zero_grad()
        names["loss"] = names["model"](torch.randn(5, 6)).square().mean()
        names["loss"].backward()
        names["total"] = names["total"] + names["loss"]
        names["optimizer"].step()
        return before, bits(names["total"]), names["loss"].requires_grad

    resumes(setup, step)


def test_a_gradient_through_the_boundary_is_refused_not_shortened(program):
    def setup():
        torch.manual_seed(0)
        return {"weight": nn.Parameter(torch.randn(3, 3)), "hidden": torch.zeros(3)}

    def step(names, i):
        names["hidden"] = torch.tanh(names["weight"] @ names["hidden"] + 1)

    truth = program(setup, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    assert bits(resumed.names["hidden"]) == bits(truth.names["hidden"])
    resumed.run(2, 3)
    with pytest.raises(StateError, match="iteration boundary"):
        resumed.names["hidden"].sum().backward()


def test_a_tensor_without_its_graph_is_shown_as_in_the_run(program):
    def setup():
        torch.manual_seed(0)
        return {"weight": nn.Parameter(torch.randn(3))}

    def step(names, i):
        names["tanh"] = torch.tanh(names["weight"] * i)
        names["parts"] = [names["weight"].exp(), (names["weight"] ** 2).sum()]
        names["own"] = Doubled.apply(names["weight"])

    truth = program(setup, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    for name in ("tanh", "parts", "own"):
        assert repr(resumed.names[name]) == repr(truth.names[name])
    assert "TanhBackward0" in repr(resumed.names["tanh"])
    assert resumed.names["own"].grad_fn.name() == truth.names["own"].grad_fn.name()
    assert resumed.capture()[0].skeleton == captured.skeleton


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_graph_added_in_place_to_an_older_tensor_is_refused_too(program):
    def setup():
        torch.manual_seed(0)
        return {"weight": nn.Parameter(torch.randn(3)), "total": torch.zeros(3)}

    def step(names, i):
        names["total"] += names["weight"] * 2

    truth = program(setup, step)
    truth.run(0, 2)
    captured, buffers = truth.capture()
    resumed = program(setup, step)
    resumed.restore(captured.skeleton, buffers)
    total = resumed.names["total"]
    assert bits(total) == bits(truth.names["total"])
    assert total.requires_grad
    with pytest.raises(StateError, match="autograd graph"):
        total.sum().backward()


def test_a_lazy_module_that_materialised_in_the_loop_comes_back(resumes):
    def setup():
        torch.manual_seed(0)
        return {"model": nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), "n": 0}

    def step(names, i):
        out = names["model"](torch.randn(3, 5))
        if "optimizer" not in names:
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["optimizer"].zero_grad()
        out.square().mean().backward()
        names["optimizer"].step()
        return bits(out), type(names["model"][0]).__name__

    resumes(setup, step)


def test_a_parametrized_module_resumes(resumes):
    def setup():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 2)
        )
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    resumes(setup, train)


def test_a_generator_and_a_loader_with_its_sampler_resume_between_epochs(resumes):
    def setup():
        generator = torch.Generator().manual_seed(3)
        data = torch.utils.data.TensorDataset(torch.arange(10.0))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        return {"loader": loader, "made": None}

    def step(names, i):
        if names["made"] is None:
            names["made"] = torch.Generator().manual_seed(5)
        order = [x.tolist() for (x,) in names["loader"]]
        return order, float(torch.rand(1, generator=names["made"]))

    resumes(setup, step)


def test_grad_mode_default_dtype_and_deterministic_mode_come_back(program):
    run = program(dict, None)
    try:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        captured, buffers = run.capture()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    try:
        run.restore(captured.skeleton, buffers)
        assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float64
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_recording_does_not_keep_a_dropped_tensor_alive(program):
    import weakref

    run = program(lambda: {"big": torch.zeros(10_000)}, lambda names, i: names.pop("big"))
    gone = weakref.ref(run.names["big"])
    run.run(0, 1)
    captured, _ = run.capture()
    assert gone() is None
    assert captured.buffers == {}


def test_a_program_can_save_its_random_state_itself():
    loader_generator = torch.Generator().manual_seed(3)

    def draw():
        numbers = random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002
        return (*numbers, torch.rand((), generator=loader_generator).item())

    saved = pickle.loads(pickle.dumps(rearview.capture_random_state([loader_generator])))
    expected = draw()
    draw()
    rearview.restore_random_state(saved, [loader_generator])
    assert draw() == expected


def test_a_random_state_that_a_callback_of_version_0_1_saved_is_restored():
    own = torch.Generator().manual_seed(5)
    saved = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "generators": [own.get_state()],
    }
    expected = random.random(), np.random.random(), torch.rand(2, generator=own).tolist()  # noqa: NPY002
    rearview.restore_random_state(saved, [own])
    assert expected == (
        random.random(),
        np.random.random(),  # noqa: NPY002
        torch.rand(2, generator=own).tolist(),
    )
