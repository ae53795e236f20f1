import pickle
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from rearview.errors import StateError
from rearview.state.capture import StatePickler, split


class Spiteful:
    def __reduce_ex__(self, protocol):
        raise RuntimeError("not me")

    __slots__ = ("handle",)


def test_one_bad_object_does_not_spoil_the_rest(program):
    run = program(lambda: {"good": [1]}, None)
    run.names["bad"] = {"deep": [compile("1", "x", "eval"), memoryview(b"abc")]}
    run.names["good"].append(2)
    captured, buffers = run.capture()
    assert [m.path for m in captured.missing] == ["bad['deep'][0]", "bad['deep'][1]"]
    again = program(lambda: {"good": [1]}, None)
    again.restore(captured.skeleton, buffers)
    assert again.names["good"] == [1, 2]


def test_pickling_methods_of_the_program_are_not_called_for_plain_classes(program):
    run = program(lambda: {"n": 0}, None)
    run.names["spiteful"] = Spiteful()
    run.names["spiteful"].handle = [1]
    captured, buffers = run.capture()
    assert captured.missing == []
    again = program(lambda: {"n": 0}, None)
    again.restore(captured.skeleton, buffers)
    assert again.names["spiteful"].handle == [1]


def test_a_long_list_of_values_costs_no_python_call_for_each(program, monkeypatch):
    calls = []
    plain = StatePickler.reducer_override

    def counted(self, obj):
        calls.append(type(obj))
        return plain(self, obj)

    monkeypatch.setattr(StatePickler, "reducer_override", counted)
    run = program(lambda: {"numbers": list(range(50_000))}, None)
    run.names["more"] = [(i, float(i), str(i)) for i in range(50_000)]
    run.capture()
    assert len(calls) < 50


def test_big_memory_is_shown_and_not_copied(program):
    run = program(lambda: {"weights": torch.zeros(5000), "array": np.zeros(5000)}, None)
    from rearview.state.capture import capture

    captured = capture(run.anchors, {f"local:main:{k}": v for k, v in run.names.items()})
    assert sorted(len(memoryview(b)) for b in captured.buffers.values()) == [20_000, 40_000]
    run.names["weights"][0] = 1.0
    run.names["array"][0] = 1.0
    assert all(bytes(b)[:8].strip(b"\0") for b in captured.buffers.values())
    assert len(captured.skeleton) < 20_000


def test_names_unbound_at_capture_are_absent_after_restore(program):
    run = program(lambda: {"kept": [], "dropped": []}, None)
    del run.names["dropped"]
    captured, buffers = run.capture()
    again = program(lambda: {"kept": [], "dropped": []}, None)
    again.restore(captured.skeleton, buffers)
    assert list(again.names) == ["kept"]


def test_python_random_resumes(resumes):
    def setup():
        random.seed(0)
        return {"own": random.Random(1)}

    def step(names, i):
        names.setdefault("new", random.Random(2))
        return random.random(), names["own"].gauss(0, 1), names["new"].random()

    resumes(setup, step)


def test_bytes_that_are_no_state_are_refused():
    with pytest.raises(StateError, match="cannot read the state") as caught:
        split(b"something else entirely")
    assert caught.value.slug == "state-format"


def test_state_of_another_number_of_objects_is_refused(program):
    captured, buffers = program(lambda: {"a": []}, None).capture()
    with pytest.raises(StateError, match="1 objects, and 2 exist"):
        program(lambda: {"a": [], "b": []}, None).restore(captured.skeleton, buffers)


def test_a_buffer_of_the_wrong_size_is_refused(program):
    captured, buffers = program(lambda: {"a": torch.zeros(5000)}, None).capture()
    short = {key: data[:-4] for key, data in buffers.items()}
    with pytest.raises(StateError, match="damaged"):
        program(lambda: {"a": torch.zeros(5000)}, None).restore(captured.skeleton, short)


def test_a_function_that_is_gone_is_named(program):
    run = program(lambda: {"n": 0}, None)

    def local():
        return 1

    run.names["local"] = local
    captured, buffers = run.capture()
    damaged = captured.skeleton.replace(b"is_named.<locals>.local", b"is_named.<locals>.gone!")
    again = program(lambda: {"n": 0}, None)
    with pytest.raises(StateError, match="gone! no longer exists in"):
        again.restore(damaged, buffers)


SCRIPT = """
import sys, pickle, random
import numpy as np, torch
from torch import nn
from rearview.state.object_numbers import Anchors
from rearview.state.capture import capture
from rearview.state.restore import restore
from rearview.state.compare import compare

class Trainer:
    epochs_done = 0
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.5), nn.Linear(40, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda e: 0.9 ** e)
        self.callbacks = []
        self.best = None
    def epoch(self, i):
        Trainer.epochs_done += 1
        def callback(value, scale=random.random()):
            return value * scale + i
        self.callbacks.append(callback)
        x = torch.from_numpy(np.random.rand(8, 40).astype("float32"))
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step(); self.scheduler.step()
        if i == 1:
            self.best = {k: v.clone() for k, v in self.model.state_dict().items()}
        return loss.item(), [c(1.0) for c in self.callbacks], Trainer.epochs_done

def main(mode, folder):
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
    trainer = Trainer()
    roots = lambda: {"local:main:trainer": trainer, "global:__main__:Trainer": Trainer}
    project = lambda m: (m if isinstance(m, str) else m.__name__) == "__main__"
    anchors = Anchors.walk(roots(), project=project)
    if mode == "record":
        logs = [trainer.epoch(i) for i in range(3)]
        at = capture(anchors, roots())
        assert at.missing == [], at.missing
        kept = (anchors.signature, at.skeleton, {k: bytes(b) for k, b in at.buffers.items()})
        logs = [trainer.epoch(i) for i in range(3, 6)]
        end = capture(anchors, roots())
        pickle.dump((kept, logs, end.skeleton, {k: bytes(b) for k, b in end.buffers.items()}), open(folder, "wb"))
    else:
        (signature, skeleton, buffers), logs, end, end_buffers = pickle.load(open(folder, "rb"))
        anchors.check(signature)
        trainer = restore(anchors, roots(), skeleton, buffers.__getitem__)["local:main:trainer"]
        again = [trainer.epoch(i) for i in range(3, 6)]
        assert again == logs, (again, logs)
        print(compare(anchors, capture(anchors, roots()), end, end_buffers.__getitem__))

main(sys.argv[1], sys.argv[2])
"""


def test_a_trainer_resumes_in_a_fresh_process_with_extra_lines_in_its_source(tmp_path):
    plain, probed = tmp_path / "train.py", tmp_path / "probed.py"
    plain.write_text(SCRIPT)
    probed.write_text(
        SCRIPT.replace("        def callback(", "        probe = 'added'\n        def callback(", 1)
    )
    kept = tmp_path / "kept.bin"
    for script, mode in ((plain, "record"), (probed, "replay")):
        done = subprocess.run(
            [sys.executable, script, mode, kept],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
    assert pickle.loads(kept.read_bytes())[1]
    assert textwrap.dedent(SCRIPT)


def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


def test_something_nested_too_deeply_is_named_and_the_rest_kept(program):
    run = program(lambda: {"good": [1], "holder": {}}, None)
    run.names["good"].append(2)
    run.names["deep"] = nested(100_000)
    run.names["holder"]["too"] = nested(100_000)
    captured, buffers = run.capture()
    assert sorted(m.path for m in captured.missing) == ["deep", "holder"]
    again = program(lambda: {"good": [1], "holder": {}}, None)
    again.restore(captured.skeleton, buffers)
    assert again.names["good"] == [1, 2]


class Moody:
    """Fails when it is looked into."""

    __slots__ = ("__dict__",)

    @property
    def __dict__(self):
        raise RuntimeError("not now")


def test_an_object_that_fails_when_read_is_named(program):
    run = program(lambda: {"moody": Moody(), "good": []}, None)
    run.names["good"].append(1)
    captured, _ = run.capture()
    assert [str(part) for part in captured.missing] == [
        "moody: it cannot be read (RuntimeError: not now)"
    ]
