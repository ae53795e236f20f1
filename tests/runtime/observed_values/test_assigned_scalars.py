"""Variables that loops assign become columns, within rules that keep the table readable."""

import gc
import weakref

import pytest

from plainly import plain, recorded, write
from rearview._history import history
from rearview.runtime.observed_values.assigned_scalars import COLUMNS, number

TEXT = """
import time
import numpy as np

def train(steps):
    total = 0.0
    for step in range(steps):
        loss = 1 / (step + 1)
        total += loss
        time.sleep(0.001)
    return total

def main():
    best, count = 0.0, 0
    for epoch in range(5):
        began = time.time()
        tick = time.perf_counter()
        train_loss = train(30) / (epoch + 1)
        acc = np.float32(epoch) / 8
        correct = 10 * epoch + (epoch == 2)
        count += 30
        rate, name, _hidden = 0.1, "text", epoch / 2
        if acc > best:
            best = acc
        print(f"{train_loss:.3f}")

main()
"""


def columns(folder):
    names = [name for name, origin in history(folder).captured().items()]
    rows = history(folder).table(*names).rows() if names else []
    return {name: [row[name] for row in rows] for name in names}


def origins(folder):
    return {name: str(one) for name, one in history(folder).captured().items()}


def test_numbers_that_change_are_columns_and_counters_constants_and_clocks_are_not(tmp_path):
    write(tmp_path, train=TEXT)
    ended = recorded(tmp_path, "train.py")
    assert ended.out == plain(tmp_path, "train.py").out
    assert origins(tmp_path) == {
        "train_loss": "assigned",
        "acc": "assigned",
        "best": "assigned",
        "correct": "assigned",
    }
    found = columns(tmp_path)
    assert found["acc"] == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert found["correct"] == [0, 10, 21, 30, 40]
    assert [row["epoch"] for row in history(tmp_path).table().rows()] == [0, 1, 2, 3, 4]


def test_a_loop_in_a_called_function_gives_its_last_values(tmp_path):
    text = TEXT.replace("train(30)", "train(30 + epoch)")
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    assert origins(tmp_path)["loss"] == "inner"
    assert columns(tmp_path)["loss"] == [1 / (30 + epoch) for epoch in range(5)]


def test_two_functions_with_a_variable_of_one_name_have_two_columns(tmp_path):
    text = """
import time

def train(epoch):
    for step in range(20):
        loss = epoch + step
        time.sleep(0.001)

def test(epoch):
    for batch in range(20):
        loss = -epoch - batch / 2
        time.sleep(0.001)

for epoch in range(4):
    train(epoch * epoch)
    test(epoch)
"""
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    assert columns(tmp_path) == {
        "loss": [19, 20, 23, 28],
        "test.loss": [-9.5, -10.5, -11.5, -12.5],
    }


def test_a_while_loop_at_the_top_gives_a_value_for_each_iteration(tmp_path):
    text = """
import time, torch
weight = torch.tensor(4.0, requires_grad=True)
step = 0
while True:
    loss = weight.pow(2).mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.25 * weight.grad
        weight.grad = None
    lossf = loss.item()
    step += 1
    time.sleep(0.03)
    if step >= 4:
        break
"""
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    found = columns(tmp_path)
    assert found["loss"] == found["lossf"] == [16.0, 4.0, 1.0, 0.25]
    assert "step" not in found


def test_at_most_so_many_variables_become_columns(tmp_path):
    lines = "\n".join(f"    v{k} = epoch * {k + 1} / 2" for k in range(COLUMNS + 20))
    text = f"import time\nfor epoch in range(4):\n    time.sleep(0.01)\n{lines}\n"
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    assert list(columns(tmp_path)) == [f"v{k}" for k in range(COLUMNS)]


def test_a_replay_is_neither_compared_with_variables_nor_kept_from_a_probe_of_their_name(tmp_path):
    write(tmp_path, train=TEXT)
    assert recorded(tmp_path, "train.py").code == 0
    before = history(tmp_path).table("train_loss").rows()
    probed = TEXT.replace(
        "        acc =", '        rearview.log("train_loss", train_loss * 2)\n        acc ='
    )
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    report = history(tmp_path).backfill(["train_loss"], workers=1)
    assert report.proved, report.proof
    after = history(tmp_path).table("train_loss").rows()
    assert [row["train_loss"] for row in after] == [2 * row["train_loss"] for row in before]
    assert "train_loss" not in history(tmp_path).captured()


def test_capturing_variables_can_be_switched_off(tmp_path):
    write(tmp_path, train=TEXT)
    assert recorded(tmp_path, "train.py", capture="-assigned").code == 0
    assert origins(tmp_path) == {}


def test_a_variable_that_the_program_deletes_is_not_kept_alive(tmp_path):
    text = """
import gc, time, weakref

class Big(float):
    pass

def main():
    for epoch in range(4):
        big = Big(epoch)
        loss = epoch / 3
        time.sleep(0.01)
        seen = weakref.ref(big)
        kept = [big]
        big = None
        kept.clear()
        print(seen() is None)

main()
"""
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").out == plain(tmp_path, "train.py").out == "True\n" * 4


class Loud(float):
    def __float__(self):
        raise AssertionError

    def item(self):
        raise AssertionError


@pytest.mark.parametrize("value", [Loud(1.0), "1", None, [1.0], 1 << 70, 1j, object()])
def test_only_plain_numbers_are_read(value):
    assert number(value) is None


def test_tensors_are_read_without_an_operation_and_not_from_an_accelerator():
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    scalars = [torch.ones((), dtype=t) for t in (torch.float32, torch.bfloat16, torch.int64)]
    with Seen():
        assert [number(one) for one in scalars] == [1.0, 1.0, 1]
    assert number(torch.ones((), device="meta")) is None
    assert number(torch.ones(1)) is None

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError

    assert number(torch.ones(()).as_subclass(Own)) is None


def test_no_tensor_is_kept_alive():
    torch = pytest.importorskip("torch")
    value = torch.tensor(1.5)
    gone = weakref.ref(value)
    assert number(value) == 1.5
    del value
    gc.collect()
    assert gone() is None
