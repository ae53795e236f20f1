"""Codecs of random generators, and capture and restore of the global random state.

`capture` and `restore` call `read_global` and `write_global`, which include the global modes of torch, such as
autocast. `capture_random_state` and `restore_random_state`, which the package `rearview` exports, are for programs and
callbacks that save checkpoints themselves.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules


class PythonRandomKind(Kind):
    """Codec of `random.Random`."""

    name = "random"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each generator."""
        return [o.getstate() for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the generator to the recorded state."""
        obj.setstate(content)


class BitGeneratorKind(Kind):
    """Codec of NumPy's BitGenerators, with the number of children that the seed sequence has spawned."""

    name = "bit generator"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (state, number of children that the seed sequence has spawned) of each BitGenerator."""
        return [(o.state, _spawned(o)) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the state, and spawn children up to the recorded number, because this number cannot be assigned."""
        obj.state = content[0]
        missing_count = content[1] - _spawned(obj)
        if missing_count > 0:
            obj.seed_seq.spawn(missing_count)


def _spawned(bit_generator: Any) -> int:
    return int(getattr(getattr(bit_generator, "seed_seq", None), "n_children_spawned", 0))


class NumpyGeneratorKind(Kind):
    """Codec of NumPy's Generators: captures a reference to the BitGenerator."""

    name = "numpy generator"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the BitGenerator, which other Generators may share."""
        return [PathStep(".", "bit_generator", obj.bit_generator)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the BitGenerator of each Generator."""
        return [o.bit_generator for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Do nothing: the BitGenerator is an anchor, which is restored separately."""


class RandomStateKind(Kind):
    """Codec of NumPy's RandomStates."""

    name = "random state"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each RandomState."""
        return [o.get_state(legacy=False) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the generator to the recorded state."""
        obj.set_state(content)


class TorchGeneratorKind(Kind):
    """Codec of `torch.Generator` on any device."""

    name = "torch generator"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each generator, as bytes."""
        return [o.get_state().numpy().tobytes() for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the generator to the recorded state."""
        import torch

        obj.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def random_kind(obj: object) -> Kind | None:
    """Return the codec of a random generator, or None if the object is no random generator."""
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


def capture_random_state(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch and its accelerators, and of `generators`.

    This function is for programs that save checkpoints themselves. NumPy and torch are left out if the program has not
    imported these libraries. `generators` are torch generators, such as those of data loaders.
    """
    states = [generator.get_state().numpy().tobytes() for generator in generators]
    return {**read_random_state(unused_devices=True), "generators": states}


def restore_random_state(state: dict[str, Any], generators: Iterable[Any] = ()) -> None:
    """Set the random generators to `state`, which `capture_random_state` returned; `generators` as in that call."""
    if "python" in state:
        state = _from_version_0(state)
    write_random_state(state)
    for generator, generator_state in zip(generators, state["generators"], strict=True):
        generator.set_state(_tensor(generator_state))


def _from_version_0(state: dict[str, Any]) -> dict[str, Any]:
    """Return a random state that a callback of Rearview 0.1.0 saved, in the present form."""
    devices = {("cuda", number): data for number, data in enumerate(state.get("cuda", ()))}
    if "mps" in state:
        devices["mps", 0] = state["mps"]
    return {
        "random": state["python"],
        "torch": state["torch"],
        "devices": devices,
        "generators": state["generators"],
        **({"numpy": state["numpy"]} if "numpy" in state else {}),
    }


def read_random_state(*, unused_devices: bool = False) -> dict[str, Any]:
    """Return the state of every global random generator of Python and of the libraries that are loaded.

    With `unused_devices`, accelerators that the program has not used are included; this initializes each accelerator.
    """
    state: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state["numpy"] = numpy.get_state(legacy=False)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state["torch"] = torch.get_rng_state().numpy().tobytes()
        state["devices"] = _read_devices(torch, unused=unused_devices)
    return state


def write_random_state(state: dict[str, Any]) -> None:
    """Set the global random generators to `state`, which `read_random_state` returned."""
    if "random" in state:
        random.setstate(state["random"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(_tensor(state["torch"]))
        for (kind, number), data in state.get("devices", {}).items():
            device = torch.get_device_module(kind)
            device.set_rng_state(_tensor(data), *(() if kind == "mps" else (number,)))


def read_global() -> dict[str, Any]:
    """Return the state of every global random generator, and the global modes of torch."""
    state = read_random_state()
    if "torch" in state:
        state["modes"] = _read_modes(sys.modules["torch"])
    return state


def write_global(state: dict[str, Any]) -> None:
    """Set the global modes of torch and every global random generator to `state`, which `read_global` returned."""
    if "modes" in state:
        _write_modes(sys.modules["torch"], state["modes"])
    write_random_state(state)


def _tensor(state: Any) -> Any:
    """Return the state of a torch generator, given as bytes or a tensor, as the tensor that torch expects."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.cpu()
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _read_devices(torch: Any, *, unused: bool) -> dict[tuple[str, int], bytes]:
    states = {}
    for kind in ("cuda", "xpu"):
        device = getattr(torch, kind, None)
        # do not read the state of an accelerator that the program does not use: reading initializes the accelerator
        used = device is not None and getattr(device, "is_initialized", lambda: False)()
        if device is not None and (used or (unused and device.is_available())):
            for number in range(device.device_count()):
                states[kind, number] = device.get_rng_state(number).cpu().numpy().tobytes()
    # torch cannot tell whether a program uses the GPU of a Mac (`mps`)
    if unused and hasattr(torch, "mps") and torch.backends.mps.is_available():
        states["mps", 0] = torch.mps.get_rng_state().cpu().numpy().tobytes()
    return states


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
        # hooks are keyed by this counter: a lower value would let a new hook replace an old one
        "next_hook": RemovableHandle.next_id,
    }


def _write_modes(torch: Any, modes: dict[str, Any]) -> None:
    from torch.utils.hooks import RemovableHandle

    torch.set_grad_enabled(modes["grad"])
    for kind, (enabled, dtype) in modes["autocast"].items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(modes["autocast_cache"])
    current = _read_modes(torch)
    if current["deterministic"] != modes["deterministic"]:
        # do not call this if the modes are equal: the call imports torch's compiler, which takes random numbers
        algorithms, warn_only = modes["deterministic"]
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
    torch.set_default_dtype(modes["dtype"])
    if current["matmul"] != modes["matmul"]:
        torch.set_float32_matmul_precision(modes["matmul"])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = modes["cudnn"]
    torch.autograd.set_detect_anomaly(modes["anomaly"])
    RemovableHandle.next_id = modes["next_hook"]
