"""Random state: of generators that the program holds, and global, with torch's global modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.state.kinds import Capturing, Kind, PathStep, Restoring, WalkRules


class PythonRandomKind(Kind):
    """A `random.Random`."""

    name = "random"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each."""
        return [o.getstate() for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the state."""
        obj.setstate(content)


class BitGeneratorKind(Kind):
    """A NumPy BitGenerator, with the count of children its seed sequence has spawned."""

    name = "bit generator"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return state and spawn count of each."""
        return [(o.state, _spawned(o)) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the state; spawn what is missing, since the count itself is read-only."""
        obj.state = content[0]
        behind = content[1] - _spawned(obj)
        if behind > 0:
            obj.seed_seq.spawn(behind)


def _spawned(bit_generator: Any) -> int:
    return int(getattr(getattr(bit_generator, "seed_seq", None), "n_children_spawned", 0))


class NumpyGeneratorKind(Kind):
    """A NumPy Generator, which is a reference to its BitGenerator."""

    name = "numpy generator"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the BitGenerator, which others may share."""
        return [PathStep(".", "bit_generator", obj.bit_generator)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the reference."""
        return [o.bit_generator for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Leave it: the BitGenerator is an anchor of its own."""


class RandomStateKind(Kind):
    """A NumPy RandomState."""

    name = "random state"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each."""
        return [o.get_state(legacy=False) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the state."""
        obj.set_state(content)


class TorchGeneratorKind(Kind):
    """A `torch.Generator` on any device."""

    name = "torch generator"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each as bytes."""
        return [o.get_state().numpy().tobytes() for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the state."""
        import torch

        obj.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def random_kind(obj: object) -> Kind | None:
    """Return the kind of a random generator, or None."""
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return PythonRandomKind()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        if isinstance(obj, numpy.BitGenerator):
            return BitGeneratorKind()
        if isinstance(obj, numpy.Generator):
            return NumpyGeneratorKind()
        if isinstance(obj, numpy.RandomState):
            return RandomStateKind()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Generator", ())):
        return TorchGeneratorKind()
    return None


def read_global() -> dict[str, Any]:
    """Return the state of every global generator that is in use, and torch's global modes."""
    state: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state["numpy"] = numpy.get_state(legacy=False)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state["torch"] = torch.get_rng_state().numpy().tobytes()
        state["devices"] = _read_devices(torch)
        state["modes"] = _read_modes(torch)
    return state


def write_global(state: dict[str, Any]) -> None:
    """Set every global generator and mode."""
    random.setstate(state["random"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        _write_modes(torch, state["modes"])
        torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
        for (kind, number), data in state["devices"].items():
            device = torch.get_device_module(kind)
            device.set_rng_state(torch.frombuffer(bytearray(data), dtype=torch.uint8), number)


def _read_devices(torch: Any) -> dict[tuple[str, int], bytes]:
    found = {}
    for kind in ("cuda", "xpu", "mps"):
        device = getattr(torch, kind, None)
        # Asking an accelerator that the program does not use would start it.
        if device is None or not getattr(device, "is_initialized", lambda: False)():
            continue
        for number in range(device.device_count()):
            found[kind, number] = device.get_rng_state(number).cpu().numpy().tobytes()
    return found


def _read_modes(torch: Any) -> dict[str, Any]:
    from torch.utils.hooks import RemovableHandle

    autocast = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    }
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": autocast,
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": torch.is_anomaly_enabled(),
        # Hooks are keyed by this counter: were it behind, a new hook would displace an old one.
        "next_hook": RemovableHandle.next_id,
    }


def _write_modes(torch: Any, modes: dict[str, Any]) -> None:
    from torch.utils.hooks import RemovableHandle

    torch.set_grad_enabled(modes["grad"])
    for kind, (enabled, dtype) in modes["autocast"].items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(modes["autocast_cache"])
    now = _read_modes(torch)
    if now["deterministic"] != modes["deterministic"]:
        # Not otherwise: it imports torch's compiler, and what draws as it is imported would have
        # drawn here, not where the program imports it.
        algorithms, warn_only = modes["deterministic"]
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
    torch.set_default_dtype(modes["dtype"])
    if now["matmul"] != modes["matmul"]:
        torch.set_float32_matmul_precision(modes["matmul"])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = modes["cudnn"]
    torch.autograd.set_detect_anomaly(modes["anomaly"])
    RemovableHandle.next_id = modes["next_hook"]
