"""Tensors of an accelerator wait for their copies, in order, in memory that is used again.

No accelerator is at hand: events that a test completes stand for those of the device, and memory that is
not pinned for pinned memory. The copies themselves are torch's.
"""

import json

import pytest

import rearview
from rearview.background_logger.call_arguments import GpuTensorCopies, decode, encode

torch = pytest.importorskip("torch", reason="torch is not installed")


class Event:
    """An event of a device that has worked through its queue when the test says so."""

    def __init__(self, device):
        self.device, self.waited = device, False

    def record(self, stream):
        assert stream == "stream of cpu"

    def query(self):
        return self.device.done

    def synchronize(self):
        self.waited = True
        self.device.done = True


class Device:
    """What is used of `torch.cuda`."""

    def __init__(self):
        self.done, self.events = False, []

    def Event(self):  # noqa: N802 - torch's name
        self.events.append(Event(self))
        return self.events[-1]

    def current_stream(self, device):
        return f"stream of {device}"


class Copies(GpuTensorCopies):
    """Takes every tensor of two dimensions for one of the device."""

    def _is_on_device(self, tensor):
        return tensor.dim() == 2


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def copies(device):
    return Copies(torch, device, pin=False)


def hold(copies, number, value):
    payload, buffers = encode(number, (copies.stage(value),), {})
    copies.hold(payload, buffers)


def test_only_tensors_of_the_device_are_staged_wherever_they_are_in_the_arguments(copies, device):
    on, off = torch.ones(2, 3), torch.ones(4)
    staged = copies.stage(("w", {"a": [on, off], "b": 1.5}))
    assert staged[1]["a"][1] is off
    assert staged[1]["a"][0] is not on
    assert torch.equal(staged[1]["a"][0], on)
    assert len(device.events) == 1


def test_a_call_and_all_later_calls_are_held_until_its_copy_is_done(copies, device):
    hold(copies, 1, torch.full((2, 2), 1.0))
    hold(copies, 2, "no tensor at all")
    assert list(copies.finished(wait=False)) == []
    assert copies.is_under_way()
    device.done = True
    numbers = [decode(payload, lambda _, b=buffers: list(map(bytearray, b)))[0]
               for payload, buffers in copies.finished(wait=False)]  # fmt: skip
    assert numbers == [1, 2]
    assert not copies.is_under_way()


def test_a_flush_returns_every_call_with_the_values_of_its_time(copies, device):
    value = torch.arange(6.0).reshape(2, 3)
    hold(copies, 1, value)
    value += 100
    [(payload, buffers)] = list(copies.finished(wait=True))
    assert device.events[0].waited
    _, (arrived,), _ = decode(payload, lambda _: list(map(bytearray, buffers)))
    assert arrived.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_is_used_again_and_counted(copies, device):
    device.done = True
    hold(copies, 1, torch.ones(8, 8))
    assert copies.nbytes == 256
    first = copies.stage(torch.ones(2, 2)).data_ptr()
    list(copies.finished(wait=False))
    assert copies.nbytes == 0
    kept = copies._free_memory[256][0].data_ptr()
    again = copies.stage(torch.zeros(8, 8))
    assert again.data_ptr() == kept != first


def test_a_device_that_offers_no_events_is_waited_for(device):
    def broken():
        raise RuntimeError("no events here")

    device.Event = broken
    copies = Copies(torch, device, pin=False)
    value = torch.ones(2, 2)
    staged = copies.stage(value)
    assert torch.equal(staged, value)
    assert not copies.is_under_way()


def test_without_a_device_in_use_nothing_is_staged():
    assert torch.cuda.is_initialized() or GpuTensorCopies.when_present() is None


class Notes:
    """A logger that writes each call to a file."""

    def __init__(self, path):
        self.path = path

    def note(self, name, value):
        shown = value.tolist() if hasattr(value, "tolist") else value
        with open(self.path, "a") as file:  # noqa: PTH123
            file.write(json.dumps([name, shown]) + "\n")


def test_a_writer_gets_its_calls_in_order_however_late_the_copies_are(
    tmp_path, copies, device, monkeypatch
):
    monkeypatch.setattr(GpuTensorCopies, "when_present", classmethod(lambda cls: copies))
    file = tmp_path / "notes.jsonl"
    writer = rearview.background(Notes, str(file), background_start="fork")
    weights = torch.ones(2, 2)
    writer.note("weights", weights)
    weights += 1
    writer.note("loss", 0.5)
    writer.note("weights", weights)
    assert not file.exists()  # the device is still at the first copy
    device.done = True
    writer.flush()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [
        ["weights", [[1.0, 1.0], [1.0, 1.0]]],
        ["loss", 0.5],
        ["weights", [[2.0, 2.0], [2.0, 2.0]]],
    ]
    writer.close()


def test_a_tensor_of_the_meta_device_arrives_as_a_meta_tensor():
    payload, buffers = encode(3, (torch.empty(3, 4, device="meta"),), {})
    number, (arrived,), _ = decode(payload, lambda _: list(map(bytearray, buffers)))
    assert number == 3
    assert arrived.device.type == "meta"
    assert tuple(arrived.shape) == (3, 4)
