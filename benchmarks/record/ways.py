"""Ways to save a checkpoint. Each has save(epoch, state), finish() and restore(state) -> seconds."""

import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import torch


def tensors(value, name=""):
    """Yield (name, tensor or array) for everything with bytes in a nested state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}.{index}")
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield name, value


def nbytes(value):
    return sum(each.nbytes for _, each in tensors(value))


def size_of(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


class Way:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.saved = 0
        self.extra = {}

    def finish(self):
        pass

    def stored(self):
        return size_of(self.folder)


class TorchSave(Way):
    """Hand-written: torch.save after every epoch."""

    def save(self, epoch, state):
        torch.save(state, self.folder / f"{epoch}.pt")
        self.saved += 1

    def restore(self, state):
        last = max(self.folder.glob("*.pt"), key=lambda path: int(path.stem))
        began = time.perf_counter()
        loaded = torch.load(last, weights_only=False)
        for (_, live), (_, kept) in zip(tensors(state), tensors(loaded), strict=True):
            live[...] = kept
        return time.perf_counter() - began


class SafeTensors(Way):
    """Hand-written: safetensors after every epoch."""

    def save(self, epoch, state):
        from safetensors.torch import save_file

        named = {
            name: (torch.from_numpy(each) if isinstance(each, np.ndarray) else each).contiguous()
            for name, each in tensors(state)
        }
        save_file(named, self.folder / f"{epoch}.safetensors")
        self.saved += 1

    def restore(self, state):
        from safetensors.torch import load_file

        last = max(self.folder.glob("*.safetensors"), key=lambda path: int(path.stem))
        began = time.perf_counter()
        loaded = load_file(last)
        for name, live in tensors(state):
            live[...] = loaded[name] if isinstance(live, torch.Tensor) else loaded[name].numpy()
        return time.perf_counter() - began


class DcpAsync(Way):
    """torch.distributed.checkpoint.async_save; waits for the previous one, as its docs say."""

    def __init__(self, folder):
        super().__init__(folder)
        import torch.distributed as dist

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        dist.init_process_group("gloo", rank=0, world_size=1)
        self.pending = None

    def save(self, epoch, state):
        import torch.distributed.checkpoint as dcp

        self.finish()
        named = {
            name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each
            for name, each in tensors(state)
        }
        self.last = self.folder / str(epoch)
        self.pending = dcp.async_save(named, checkpoint_id=self.last)
        self.saved += 1

    def finish(self):
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def restore(self, state):
        import torch.distributed.checkpoint as dcp

        named = {
            name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each
            for name, each in tensors(state)
        }
        began = time.perf_counter()
        dcp.load(named, checkpoint_id=self.last)
        return time.perf_counter() - began


class ForkPickle(Way):
    """Flor's way: fork, pickle in the child."""

    def __init__(self, folder):
        super().__init__(folder)
        self.children = []

    def save(self, epoch, state):
        import cloudpickle

        self.children = [pid for pid in self.children if not os.waitpid(pid, os.WNOHANG)[0]]
        pid = os.fork()
        if not pid:
            with (self.folder / f"{epoch}.pkl").open("wb") as file:
                arrays = [(name, np.asarray(each)) for name, each in tensors(state)]
                file.write(cloudpickle.dumps(arrays))
            os._exit(0)
        self.children.append(pid)
        self.saved += 1

    def finish(self):
        for pid in self.children:
            os.waitpid(pid, 0)
        self.children = []

    def restore(self, state):
        last = max(self.folder.glob("*.pkl"), key=lambda path: int(path.stem))
        began = time.perf_counter()
        loaded = dict(pickle.loads(last.read_bytes()))
        for name, live in tensors(state):
            live[...] = (
                torch.from_numpy(loaded[name]) if isinstance(live, torch.Tensor) else loaded[name]
            )
        return time.perf_counter() - began


class Rearview(Way):
    """Rearview's writer on the state's own buffers, after every epoch."""

    adaptive = False

    def __init__(self, folder):
        super().__init__(folder)
        from rearview.config import Settings
        from rearview.runtime.policy import Policy
        from rearview.runtime.writer import Writer
        from rearview.store.checkpoints import Checkpoints
        from rearview.store.project import Project

        settings = Settings()
        self.store = Checkpoints(Project.create(self.folder))
        self.writer = Writer(self.store, settings, warn=print, saved=self._saved)
        self.policy = Policy(settings.epsilon)
        self.events = []
        self.since = 0.0
        self.mark = time.perf_counter()

    def _saved(self, _, cost):
        from rearview.runtime.sites import Saved

        self.events.append(Saved(cost.blocking, cost.background, cost.cpu))

    def prepare(self, state):
        self.writer.prepare(nbytes(state) + (1 << 20))
        self.mark = time.perf_counter()

    def save(self, epoch, state):
        from rearview.model import Point, Step
        from rearview.runtime.policy import Facts
        from rearview.runtime.sites import Iteration

        if self.adaptive:
            seconds = time.perf_counter() - self.mark
            self.since += seconds
            while self.events:
                self.policy = self.policy.observe("epoch", self.events.pop(0))
            self.policy = self.policy.observe("epoch", Iteration(seconds))
            if not self.policy.decide("epoch", Facts(self.since, nbytes=nbytes(state))).save:
                self.mark = time.perf_counter()
                return
        buffers = {
            name: memoryview(each.numpy() if isinstance(each, torch.Tensor) else each)
            for name, each in tensors(state)
        }
        if self.writer.submit(
            "run",
            epoch,
            Point((Step("epoch", epoch),)),
            "start",
            b"",
            buffers,
            wait=not self.adaptive,
        ):
            self.since = 0.0
        self.mark = time.perf_counter()

    def finish(self):
        self.writer.drain()
        self.saved = self.writer.costs.saved
        self.extra = {
            "copied_mb": self.writer.costs.copied / 1e6,
            "background_s": self.writer.costs.background,
            "background_cpu_s": self.writer.costs.cpu,
            "staging_mb": self.writer.staging / 1e6,
        }

    def stored(self):
        return self.writer.costs.stored

    def restore(self, state):
        loaded = self.store.load(self.store.of("run")[-1])
        buffers = {
            name: memoryview(each.numpy() if isinstance(each, torch.Tensor) else each)
            for name, each in tensors(state)
        }
        began = time.perf_counter()
        loaded.fill(buffers)
        return time.perf_counter() - began


class RearviewAdaptive(Rearview):
    """The same, when the policy says so (epsilon 6.67 %)."""

    adaptive = True


WAYS = {
    "torch_save": TorchSave,
    "safetensors": SafeTensors,
    "dcp_async": DcpAsync,
    "fork_pickle": ForkPickle,
    "rearview": Rearview,
    "rearview_adaptive": RearviewAdaptive,
}


def clean(folder):
    shutil.rmtree(folder, ignore_errors=True)
