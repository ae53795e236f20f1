"""The order of events that makes a copy beside the computation sound, on stand-in streams.

The real thing needs an accelerator; what can go wrong without one (order, reuse of pinned memory,
bytes of every dtype) is checked here.
"""

import contextlib

import numpy as np
import pytest
import torch

from rearview.config import Settings
from rearview.model import Edge, Point, Snapshot
from rearview.runtime.saving.staging import Device
from rearview.runtime.saving.writer import Writer


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for copy")


class Cuda:
    """The part of torch.cuda that is used."""

    def __init__(self):
        self.log = []
        self.made = 0

    def current_stream(self, device):
        return Stream("training", self.log)

    def Stream(self, device):  # noqa: N802 - as torch spells it
        self.made += 1
        return Stream("side", self.log)

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"into {stream.name}")
        yield
        self.log.append(f"out of {stream.name}")

    def Event(self):  # noqa: N802 - as torch spells it
        return self

    def record(self, stream):
        self.log.append(f"copy recorded on {stream.name}")

    def synchronize(self):
        self.log.append("host waits for copy")


@pytest.fixture
def cuda():
    return Cuda()


def test_the_copy_comes_after_earlier_and_before_later_work_of_the_device(cuda):
    fetch = Device(cuda, pin=False).fetch({"w": torch.ones(3)})
    assert cuda.log == [
        "side waits for training",
        "into side",
        "copy recorded on side",
        "out of side",
        "training waits for copy",
    ]
    fetch.wait()
    assert cuda.log[-1] == "host waits for copy"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
)
def test_the_bytes_of_every_dtype_arrive(cuda, dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    fetch = Device(cuda, pin=False).fetch({"t": tensor, "scalar": tensor.sum(), "none": tensor[:0]})
    views = fetch.wait()
    assert bytes(views["t"]) == bytes(tensor.flatten().view(torch.uint8).numpy())
    assert len(views["scalar"]) == tensor.sum().element_size()
    assert len(views["none"]) == 0
    assert fetch.nbytes == tensor.nbytes + tensor.sum().nbytes


def test_pinned_memory_and_streams_are_used_again(cuda):
    device = Device(cuda, pin=False)
    places = set()
    for value in range(3):
        fetch = device.fetch({"w": torch.full((1000,), value)})
        assert device.busy
        places.add(fetch.host["w"].data_ptr())
        assert fetch.wait()["w"][0] == value
        device.release(fetch)
        assert not device.busy
    assert len(places) == 1
    assert cuda.made == 1
    assert len(device.fetch({"w": torch.ones(5)}).wait()["w"]) == 20
    device.close()


def test_tensors_of_a_device_are_saved_together_with_those_of_the_host(cuda, checkpoints):
    writer = Writer(checkpoints, Settings())
    writer._device = Device(cuda, pin=False)
    weights = torch.arange(400_000.0)
    for seq in range(3):
        weights += 1
        host = {"h": np.full(1000, float(seq))}
        assert writer.submit(
            Snapshot("r", seq, Point(), Edge.START, b"", host, device={"w": weights}), wait=True
        )
    assert writer.close(30)
    for seq, found in enumerate(checkpoints.of("r")):
        loaded = checkpoints.load(found)
        assert np.frombuffer(loaded["w"], "f4")[0] == seq + 1
        assert np.frombuffer(loaded["h"], "f8")[0] == seq
