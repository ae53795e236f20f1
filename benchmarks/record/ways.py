"""What people do by hand or with other tools to save every epoch.

Each has save(epoch, state) or a loop of its own, finish() and restore(state), which returns seconds.
"""

import os
import pickle
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
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
        self.blocking = 0.0

    def loop(self, epochs, objects):  # noqa: ARG002 - for others
        """Yield the epochs; `objects` are for tools that save by themselves."""
        yield from range(epochs)

    def save(self, epoch, state):
        """Save; nothing to do where the loop does it."""

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


class FlorDb(Way):
    """FlorDB 3.4.12, the last release with `flor.checkpointing`; found where FLORDB says.

    It wants to stand in a git repository, which it commits to, and in a home folder of its own.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.project = self.folder / "project"
        self.project.mkdir()
        git = ["git", "-C", str(self.project), "-c", "user.name=b", "-c", "user.email=b@localhost"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "start"], check=True)
        for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
            os.environ[f"{name}_NAME"], os.environ[f"{name}_EMAIL"] = "b", "b@localhost"
        os.environ["HOME"] = str(self.folder)
        os.chdir(self.project)
        sys.path.append(os.environ.get("FLORDB", ""))  # behind the numpy and pandas in use
        sys.argv = ["train.py"]
        with redirect_stdout(sys.stderr):
            import flordb

            self.flor = flordb

    def loop(self, epochs, objects):
        for_epochs = self.flor.loop("epoch", range(epochs))
        with redirect_stdout(sys.stderr), self.flor.checkpointing(**objects):
            self.flor.log("epochs", epochs)
            while True:
                began = time.perf_counter()
                try:
                    epoch = next(for_epochs)  # saves the epoch before
                except StopIteration:
                    return
                if epoch:
                    self.blocking += time.perf_counter() - began
                    self.saved += 1
                yield epoch
                if epoch == epochs - 1:
                    for_epochs.close()  # so that the last epoch is not saved, as with the others
                    return

    def finish(self):
        with redirect_stdout(sys.stderr):
            self.flor.commit()

    def stored(self):
        return size_of(self.folder / ".flor" / "obj_store")

    def restore(self, state):
        kept = {}
        for path in (self.folder / ".flor" / "obj_store").rglob("*"):
            if path.is_file():
                name, epoch = path.stem.rsplit("_epoch_", 1)
                kept.setdefault(int(epoch), {})[name] = path
        last = kept[max(kept)]
        began = time.perf_counter()
        for name, path in last.items():
            if path.suffix == ".pth":
                loaded = torch.load(path, weights_only=False)
                pairs = zip(tensors(state[name]), tensors(loaded), strict=True)
                for (_, live), (_, saved) in pairs:
                    live[...] = saved
            elif path.suffix == ".npy":
                state[name][...] = np.load(path)
            else:
                pickle.loads(path.read_bytes())
        return time.perf_counter() - began


WAYS = {
    "nothing": Way,
    "torch_save": TorchSave,
    "safetensors": SafeTensors,
    "dcp_async": DcpAsync,
    "fork_pickle": ForkPickle,
    "flordb": FlorDb,
}


def clean(folder):
    shutil.rmtree(folder, ignore_errors=True)
