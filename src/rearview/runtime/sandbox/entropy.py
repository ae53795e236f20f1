"""Make random numbers repeatable: compute os.urandom and the seeds of random, NumPy and torch from a recorded key.

Otherwise the replay of an unseeded script would differ at its first random number. A forked child uses the
entropy of the operating system again, so that two children never draw the same "random" identifiers.
"""

from __future__ import annotations

import _frozen_importlib as _bootstrap
import ast
import functools
import hashlib
import importlib.util
import itertools
import linecache
import os
import random
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any

from rearview.state.code_lookup import PatchedBuiltin

ROOT = "$chance"
"""Name under which a state contains the position in the random stream."""
FIRST = 32
"""Number of bytes that are drawn before the program starts, to seed the module `random`."""
KEY_BYTES = 32
"""Length of a key in bytes. Of a longer key, the last `KEY_BYTES` bytes alone determine the first states of the
generators: these can then be the same as in another run, while `os.urandom` returns different bytes."""
overwritten: list[int] = []
"""At most one number: count of drawn bytes on which no result depends, because a generator was seeded with another
value at once, or because a library in `OWN_NAMES` drew them. Nothing is counted if the list is empty."""
seeding: list[int] = [0]
"""One number: count of bytes drawn to seed NumPy's generators that are created without a seed."""
OWN_NAMES = (
    *("joblib.", "loky.", "matplotlib.", "plotly.", "bokeh.", "altair.", "pandas.io.formats."),
    *("IPython.", "ipywidgets.", "comm.", "tqdm.", "sklearn."),
)
"""Prefixes of modules that draw random names for internal things, such as a thread pool or an HTML element."""
_real_urandom = os.urandom
_real_seed = random.Random.seed


@dataclass
class Stream:
    """A stream of random bytes that is computed from `key` alone.

    >>> Stream(b"k").read(4) == Stream(b"k").read(4)
    True
    """

    key: bytes
    place: list[Any] = field(default_factory=lambda: [0, b""])
    """[number of computed blocks, unread bytes of the last block]; a list, so that a restore can change it in place."""

    @property
    def drawn(self) -> int:
        """Number of bytes read from this stream so far."""
        count, unread = self.place
        return int(count) * hashlib.sha256().digest_size - len(unread)

    def restart_with(self, key: bytes, drawn: int = 0) -> None:
        """Become the stream of another key, with its first `drawn` bytes already read."""
        self.key = key
        self.place[:] = [0, b""]
        self.read(drawn)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes of the stream."""
        count, unread = self.place
        while len(unread) < size:
            unread += hashlib.sha256(self.key + count.to_bytes(8, "big")).digest()
            count += 1
        self.place[:] = [count, unread[size:]]
        return bytes(unread[:size])


@dataclass
class Randomness:
    """All sources of random numbers of a process that are computed from the key of its run."""

    stream: Stream
    """The stream that replaces `os.urandom` for the program."""
    loaded: dict[str, Stream]
    """Name of a library -> stream from which it drew while it was imported."""
    acts: Mapping[str, Callable[[ModuleType], None]]
    """Name of a module -> function that seeds the generators of the module from the key."""
    read: Callable[[int], bytes]
    words: int = 0
    """Number of 32-bit words that libraries drew from the module `random` while they were imported."""
    read_bits: Callable[[int], int] | None = None

    def begin(self, seeded: Collection[str] = ()) -> None:
        """Patch `os.urandom`, and seed the generators of `random` and of imported libraries from `self.key`.

        Generators of the libraries in `seeded` are not changed, because the program has seeded them.
        """
        _use(self.read)
        self.stream.read(FIRST)
        if "random" not in seeded:
            random.seed(_python_seed(self.stream.key))
            random.getrandbits(32 * self.words)
        for name, act in self.acts.items():
            module = sys.modules.get(name)
            if module is not None and name.partition(".")[0] not in seeded:
                act(module)

    def initial(self) -> dict[str, Any]:
        """Return library -> first state of its global generator, computed from the key, for the loaded libraries."""
        key = self.stream.key
        python_generator = random.Random(_python_seed(key))  # noqa: S311 - a copy of the global one
        python_generator.getrandbits(32 * self.words)
        states: dict[str, Any] = {"random": python_generator.getstate()}
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            states["numpy"] = numpy.RandomState(_numpy_seed(key)).get_state(legacy=False)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "get_rng_state"):
            generator = torch.Generator().manual_seed(_torch_seed(key))
            states["torch"] = generator.get_state().numpy().tobytes()
        return states

    def resume(self) -> None:
        """Patch `os.urandom` again, in a forked child that continues the program; do not change any generator."""
        _use(self.read)
        numpy = sys.modules.get("numpy.random.bit_generator")
        if numpy is not None and vars(numpy).get("randbits") == secrets.randbits:
            vars(numpy)["randbits"] = self.read_bits

    def follow(self, key: bytes, seeded: Collection[str] = ()) -> None:
        """Seed everything with the key of another run, after the fork server forked; `seeded` is as in `begin`."""
        self.stream.restart_with(key)
        for library, stream in self.loaded.items():
            stream.restart_with(_key_of(key, library), stream.drawn)
        self.begin(seeded)


def install(key: bytes) -> Randomness:
    """Compute the bytes of `os.urandom`, and so of `secrets`, `uuid4` and unseeded generators, from `key`."""
    stream = Stream(key)
    get_ident = threading.get_ident
    thread = get_ident()
    loaded: dict[str, Stream] = {}

    def read(size: int) -> bytes:
        caller = sys._getframe(1)
        if get_ident() != thread or _is_outside_program(caller):
            return _real_urandom(size)
        library = library_being_loaded(caller)
        library = library or ("tempfile" if _names_files(caller) else "")
        if library:
            return loaded.setdefault(library, Stream(_key_of(stream.key, library))).read(size)
        if overwritten and _names_own_parts(caller):
            overwritten[0] += size
        return stream.read(size)

    def read_bits(bits: int) -> int:
        # like `secrets.randbits`, but faster, because NumPy calls it for every generator that it creates
        caller = sys._getframe(1)
        if _tracking or _imports() or get_ident() != thread:
            return secrets.randbits(bits)
        if _is_apart_from_program(str(caller.f_globals.get("__name__", ""))) is not False:
            return secrets.randbits(bits)
        size = (bits + 7) // 8
        if overwritten and _is_seeded_at_once(caller):
            overwritten[0] += size
        else:
            seeding[0] += size
        return int.from_bytes(stream.read(size), "big") >> (size * 8 - bits)

    acts = {
        "tempfile": functools.partial(_renew_names, stream=stream, loaded=loaded),
        "torch": functools.partial(_seed_torch, stream=stream),
        "numpy.random": functools.partial(_seed_numpy, stream=stream, read_bits=read_bits),
    }
    randomness = Randomness(
        stream, loaded, acts, PatchedBuiltin(read, _real_urandom), read_bits=read_bits
    )
    os.register_at_fork(after_in_child=remove)
    watch_trackers()
    randomness.begin()
    for name, act in acts.items():
        if name not in sys.modules:
            after_import(name, act)
    return randomness


def _key_of(key: bytes, library: str) -> bytes:
    return hashlib.sha256(key + library.encode()).digest()


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_TRACKERS = (
    *("aim", "clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab"),
    *("tensorboard", "tensorboardX", "wandb"),
)
_WRITERS = "torch.utils.tensorboard"
_tracking: list[str] = []
"""Names of the experiment trackers that the program has imported."""


def watch_trackers() -> None:
    """Record imports of experiment trackers in `_tracking`: before one, `called_by_tracker` examines no frames."""
    for name in (*_TRACKERS, _WRITERS):
        after_import(name, lambda module: _tracking.append(module.__name__))


def called_by_tracker(frame: FrameType | None) -> bool:
    """Return True if `frame` or one of its callers runs code of an experiment tracker.

    Random numbers and clock readings of a tracker do not belong to the program: in a replay the tracker cannot reach
    its server, so it draws and reads a different number of times.
    """
    while _tracking and frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in _TRACKERS or name.startswith(_WRITERS):
            return True
        frame = frame.f_back
    return False


def _is_outside_program(frame: FrameType | None) -> bool:
    """Return True if `frame` draws random bytes for Rearview, a tracker or `multiprocessing`, not for the program.

    Such draws must not change the program's stream. `multiprocessing` draws keys and names by which processes find
    each other, and how many it draws depends on timing.
    """
    if _tracking and called_by_tracker(frame):
        return True
    while frame is not None:
        is_apart = _is_apart_from_program(str(frame.f_globals.get("__name__", "")))
        if is_apart is not None:
            return is_apart or _called_by_multiprocessing(frame)
        frame = frame.f_back
    return False


def _called_by_multiprocessing(frame: FrameType | None) -> bool:
    """Return True if `multiprocessing` called the installed library whose code `frame` runs.

    joblib, which scikit-learn imports, draws names for the semaphores of `multiprocessing`.
    """
    while frame is not None and _INSTALLED.search(frame.f_code.co_filename):
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__", "")) if frame is not None else ""
    return name.startswith("multiprocessing")


FRONT_END = ("ipykernel.", "jupyter_client.", "tornado.", "zmq.")
"""Prefixes of modules by which a notebook's kernel communicates with its front end."""
_FORWARDING = (__name__, "rearview.runtime.sandbox.file_patches", "rearview.state.code_lookup")
"""Modules of Rearview that only forward calls of the program."""


@functools.lru_cache(maxsize=1024)
def _is_apart_from_program(name: str) -> bool | None:
    """Return True if random numbers that the module `name` draws do not belong to the program, and False if they do.

    Return None if the caller of the module decides. Cached, because NumPy draws for every generator that it creates.
    """
    if name.startswith(("multiprocessing", *FRONT_END)):
        return True
    if name in _FORWARDING or is_standard(name):
        return None
    return name.startswith("rearview.")


def is_standard(name: str) -> bool:
    """Return True if the module `name` is in the standard library."""
    return name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names


def library_being_loaded(frame: FrameType | None) -> str:
    """Return the name of the installed module whose import has called `frame`, or "" if no import has.

    A library may be imported earlier in a replay than in the run, because a probe uses it. So its random numbers and
    clock readings during the import do not belong to the program.
    """
    library = ""
    if not _imports():
        return library
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("importlib."):
            if library:
                return library
        elif name != __name__ and not is_standard(name):
            if not _INSTALLED.search(frame.f_code.co_filename):
                return ""
            library = library or name
        frame = frame.f_back
    return ""


def _names_files(frame: FrameType | None) -> bool:
    """Return True if `frame` draws for `tempfile`, which draws random bytes once, for its first name.

    An iteration that a replay skips may use the first name, so these bytes do not belong to the program.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "tempfile":
            return True
        if name not in {__name__, "random"}:
            return False
        frame = frame.f_back
    return False


def _names_own_parts(frame: FrameType | None) -> bool:
    """Return True if `frame` draws for a library in `OWN_NAMES`, also through the standard library (`uuid`)."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _FORWARDING and not is_standard(name):
            return f"{name}.".startswith(OWN_NAMES)
        frame = frame.f_back
    return False


def _imports() -> bool:
    """Return True if an import may be running, that is, if Python holds the import lock of a module."""
    return bool(getattr(_bootstrap, "_module_locks", True))


def _renew_names(tempfile: ModuleType, *, stream: Stream, loaded: dict[str, Stream]) -> None:
    """Let `tempfile` draw its names from the beginning, even if it has drawn names before the program started."""
    before = list(stream.place)
    tempfile.gettempdir()  # the first call draws a name
    stream.place[:] = before
    loaded.pop("tempfile", None)
    vars(tempfile)["_name_sequence"] = None


def _python_seed(key: bytes) -> int:
    return int.from_bytes(Stream(key[-KEY_BYTES:]).read(FIRST), "big")


def _numpy_seed(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(key[-KEY_BYTES:] + b"numpy").digest()[:4], "big")


def _torch_seed(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(key[-KEY_BYTES:] + b"torch").digest()[:8], "big") >> 1


def _seed_numpy(module: ModuleType, *, stream: Stream, read_bits: Callable[[int], int]) -> None:
    """Seed NumPy's global generator from the key, and let NumPy's new generators draw their seeds by `read_bits`."""
    module.seed(_numpy_seed(stream.key))
    space = vars(getattr(module, "bit_generator", module))
    if space.get("randbits") == secrets.randbits:
        space["randbits"] = read_bits


def bytes_used(place: Sequence[Any]) -> int:
    """Return the number of bytes on which results may depend, of those read from the stream with this `Stream.place`.

    Bytes counted in `overwritten` and `seeding` are left out.
    """
    count, unread = place or (0, b"")
    drawn = int(count) * hashlib.sha256().digest_size - len(unread)
    return drawn - (overwritten[0] if overwritten else 0) - seeding[0]


def _is_seeded_at_once(frame: FrameType) -> bool:
    """Return True if `frame` calls `numpy.random.RandomState` with a seed.

    NumPy first seeds the generator with random bytes, and then with the seed: the random bytes have no effect.
    """
    call = _call_at(frame.f_code, frame.f_lasti)
    if call is None:
        return False
    function, seed = call
    value: Any = frame.f_globals
    for i, name in enumerate(function):
        if i == 0:
            value = frame.f_locals.get(name, frame.f_globals.get(name))
        else:
            value = vars(value).get(name) if isinstance(value, ModuleType) else None
    if value is None or value is not getattr(sys.modules.get("numpy.random"), "RandomState", None):
        return False
    return not seed or frame.f_locals.get(seed, frame.f_globals.get(seed)) is not None


@functools.lru_cache(maxsize=1024)
def _call_at(code: CodeType, at: int) -> tuple[tuple[str, ...], str] | None:
    """Return (dotted name of the called function as a tuple, its only argument) for the call at byte offset `at`.

    The argument is the name of a variable, or empty if it is a number or a calculation. Return None for a call of
    another form.
    """
    line, end, column, end_column = next(itertools.islice(code.co_positions(), at // 2, None))
    if line is None or end is None or column is None or end_column is None:
        return None
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(line, end + 1)]
    if not all(lines):
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        call = ast.parse(b"".join(lines), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != 1:
        return None
    names: list[str] = []
    function = call.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return None
    dotted = (function.id, *reversed(names))
    seed = [*call.args, *(keyword.value for keyword in call.keywords)][0]
    if isinstance(seed, ast.Name):
        return dotted, seed.id
    number = isinstance(seed, ast.Constant) and type(seed.value) is int
    return (dotted, "") if number or isinstance(seed, ast.BinOp) else None


def _seed_torch(torch: ModuleType, *, stream: Stream) -> None:
    """Seed torch's default generator from the key, and let `torch.seed` take its seeds from `os.urandom`."""

    def draw_seed() -> int:
        return int.from_bytes(os.urandom(8), "big") >> 1

    def seed() -> int:
        number = draw_seed()
        torch.manual_seed(number)
        return number

    torch.manual_seed(_torch_seed(stream.key))
    for module in (torch, getattr(torch, "random", None)):
        if module is not None:
            vars(module)["seed"] = seed


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name`: at once if the module is already imported, else after its import."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    awaited: Any = _AWAITED
    if awaited not in sys.meta_path:
        sys.meta_path.insert(0, awaited)
    _AWAITED.acts.setdefault(name, []).append(act)


class _AfterImport:
    """An import finder that calls functions with a module after the import of the module."""

    def __init__(self) -> None:
        self.acts: dict[str, list[Callable[[ModuleType], None]]] = {}
        """Name of a module that is not imported yet -> functions to call with the module after its import."""
        self.looking_up = ""
        """Name of the module that this finder is looking up with Python's other finders; empty if none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of the module `name`, changed to call its functions in `acts`; None if there are none."""
        del path, target
        if name not in self.acts or name == self.looking_up:
            return None
        self.looking_up, before = name, self.looking_up
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking_up = before
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def load(module: ModuleType) -> None:
                execute(module)
                for act in self.acts.pop(name, ()):
                    act(module)

            spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


_AWAITED = _AfterImport()


def remove() -> None:
    """Let this process use the random bytes of the operating system again."""
    _use(_real_urandom)
    numpy = sys.modules.get("numpy.random.bit_generator")
    if numpy is not None and "randbits" in vars(numpy):
        vars(numpy)["randbits"] = secrets.randbits


def _use(urandom: Callable[[int], bytes]) -> None:
    """Replace `os.urandom` by `urandom` everywhere in the standard library, also where `random.Random` seeds itself."""
    os.urandom = urandom
    vars(sys.modules[_real_urandom.__module__])["urandom"] = (
        urandom  # a pickled `os.urandom` names this module
    )
    random._urandom = urandom  # type: ignore[attr-defined]  # SystemRandom and secrets use it
    for name in ("uuid", "secrets", "tempfile"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_urandom"):
            vars(module)["_urandom"] = urandom

    def seed(self: random.Random, a: object = None, version: int = 2) -> None:
        if a is None and urandom is not _real_urandom and type(self) is not random.SystemRandom:
            a = int.from_bytes(urandom(2500), "big")
        _real_seed(self, a, version)  # type: ignore[arg-type]  # any value that the caller passes

    seed_function: Any = seed if urandom is not _real_urandom else _real_seed
    random.Random.seed = seed_function  # type: ignore[method-assign]
