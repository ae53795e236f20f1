"""Training loops inside libraries: a table of the loops to watch, and a search for the calls that start a loop.

A user of Lightning, Keras or the Hugging Face Trainer writes no training loop. The loops in `LOOPS` are
instrumented, so that their iterations are points; no other loop of these libraries is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rearview.source.loops import FUNCTIONS, walk_loops

Names = Mapping[str, tuple[str, ...] | Mapping[str, str]]
"""Function of a library -> names of the loops in its text, in order; a loop with an empty name is not watched.

If releases of the library differ in the number of loops: function -> {word in the head of a loop: its name}."""

_STEPS = {"_TrainingEpochLoop.run": ("step",)}
_EVALUATION_STEPS = {"_EvaluationLoop.run": ("eval_step",)}
_EPOCHS = {"_FitLoop.run": ("epoch",)}
_KERAS = {
    "{}.fit": ("epoch", "step"),
    "{}.evaluate": ("eval_step",),
    "{}.predict": ("predict_step",),
}


def _keras(trainer: str) -> Names:
    return {function.format(trainer): names for function, names in _KERAS.items()}


LOOPS: Mapping[str, Names] = {
    "lightning.pytorch.loops.fit_loop": _EPOCHS,
    "lightning.pytorch.loops.training_epoch_loop": _STEPS,
    "lightning.pytorch.loops.evaluation_loop": _EVALUATION_STEPS,
    "pytorch_lightning.loops.fit_loop": _EPOCHS,
    "pytorch_lightning.loops.training_epoch_loop": _STEPS,
    "pytorch_lightning.loops.evaluation_loop": _EVALUATION_STEPS,
    "transformers.trainer": {
        "Trainer._inner_training_loop": ("epoch",),
        "Trainer._run_epoch": ("step", "micro_step"),
        "Trainer.evaluation_loop": ("eval_step",),
    },
    "keras.src.backend.torch.trainer": _keras("TorchTrainer"),
    "keras.src.backend.jax.trainer": _keras("JAXTrainer"),
    "keras.src.backend.tensorflow.trainer": _keras("TensorFlowTrainer"),
    "ignite.engine.engine": {
        "Engine._internal_run_legacy": ("epoch",),
        "Engine._run_once_on_dataset_legacy": ("step",),
        "Engine._internal_run_as_gen": ("epoch",),
        "Engine._run_once_on_dataset_as_gen": ("step",),
    },
    "lightgbm.engine": {
        "train": {"num_boost_round": "round"},
        "cv": {"num_boost_round": "round"},
    },
    "optuna.study._optimize": {"_optimize_sequential": ("trial",)},
    "xgboost.training": {"train": ("", "round"), "cv": ("round",)},
    "sklearn.neural_network._multilayer_perceptron": {
        "BaseMultilayerPerceptron._fit_stochastic": ("epoch", "step"),
    },
}


def loops_of(module: str, tree: ast.Module) -> dict[int, str]:
    r"""Return {first line of a loop: id of the loop} for the watched loops in a module of a library.

    >>> text = "class Engine:\n  def _internal_run_legacy(self):\n    while True: pass"
    >>> loops_of("ignite.engine.engine", ast.parse(text))
    {3: 'ignite.engine.engine:Engine._internal_run_legacy:0:epoch'}
    """
    names_by_function = LOOPS.get(module, {})
    counts: dict[str, int] = {}
    loop_ids_by_line: dict[int, str] = {}
    for node, function, _ in walk_loops(tree):
        ordinal = counts[function] = counts.get(function, -1) + 1
        name = _name_of(node, ordinal, names_by_function.get(function, ()))
        if name:
            loop_ids_by_line[node.lineno] = f"{module}:{function}:{ordinal}:{name}"
    return loop_ids_by_line


def _name_of(node: ast.AST, ordinal: int, names: tuple[str, ...] | Mapping[str, str]) -> str:
    """Return the name of the loop with number `ordinal` in a function, or "" if the loop is not watched.

    `names` are the names for the function in `LOOPS`.
    """
    if isinstance(names, tuple):
        return names[ordinal] if ordinal < len(names) else ""
    head = getattr(node, "iter", None) or getattr(node, "test", None)
    words = {node.id for node in ast.walk(head) if isinstance(node, ast.Name)} if head else set()
    return next((name for word, name in names.items() if word in words), "")


@dataclass(frozen=True, slots=True)
class Library:
    """A library with a training loop, and the calls that start the loop."""

    name: str
    roots: tuple[str, ...]
    """Packages that a program imports to use the library."""
    methods: tuple[str, ...]
    """Methods that start the loop."""
    point: tuple[str, ...]
    """Names of the watched loops of the library, outermost first."""
    classes: tuple[str, ...] = ()
    """Words in the names of classes and functions that make objects with these methods; empty if any name counts."""
    functions: tuple[str, ...] = ()
    """Functions and classes that start the loop when they are called."""
    receivers: tuple[str, ...] = ()
    """Usual endings of names of variables for objects with these methods, used if the text does not show how an
    object was made."""
    hooks: tuple[str, ...] = ()
    """Functions of the program that the loop calls: places for a log statement."""
    limits: tuple[str, ...] = ()
    """Sentences that say at which iterations no replay can start."""
    conditions: tuple[str, ...] = ()
    """Sentences that say which uses of the library limit where a replay can start."""
    captured: bool = False
    """Whether the values that the library logs become columns without a log statement."""


_EPOCHS_ONLY = "A replay starts at the beginning of an epoch, not in the middle of one."

LIBRARIES: tuple[Library, ...] = (
    Library(
        "Lightning",
        ("lightning", "pytorch_lightning"),
        ("fit",),
        ("epoch", "step"),
        ("Trainer",),
        ("LightningCLI",),
        ("trainer",),
        ("training_step", "on_train_epoch_end", "on_train_batch_end", "validation_step"),
        (),
        ("With workers in a loader, a replay starts at the beginning of an epoch.",),
        captured=True,
    ),
    Library(
        "Hugging Face Trainer",
        ("transformers", "trl", "sentence_transformers"),
        ("train",),
        ("epoch", "step"),
        ("Trainer",),
        (),
        ("trainer",),
        ("compute_loss", "training_step", "on_step_end", "on_log"),
        (_EPOCHS_ONLY,),
        captured=True,
    ),
    Library(
        "Keras",
        ("keras", "tensorflow"),
        ("fit",),
        ("epoch", "step"),
        ("Model", "Sequential"),
        (),
        ("model",),
        ("train_step", "on_epoch_end", "on_train_batch_end", "compute_loss"),
        (_EPOCHS_ONLY,),
        ("With TensorFlow or JAX as its backend, Keras was not tried.",),
        captured=True,
    ),
    Library(
        "XGBoost",
        ("xgboost",),
        ("fit",),
        ("round",),
        ("XGB",),
        ("xgboost.train", "xgboost.cv"),
        (),
        ("after_iteration",),
        (),
        ("With `subsample` or `colsample_*`, a replay starts at the first round.",),
    ),
    Library(
        "LightGBM",
        ("lightgbm",),
        ("fit",),
        ("round",),
        ("LGBM",),
        ("lightgbm.train", "lightgbm.cv"),
        (),
        (),
        ("LightGBM data sets cannot be saved: a replay starts at the first round.",),
    ),
    Library(
        "Optuna",
        ("optuna",),
        ("optimize",),
        ("trial",),
        (),
        (),
        ("study",),
        ("objective",),
        (),
        ("With `n_jobs` above 1, trials are not watched.",),
    ),
    Library(
        "scikit-learn",
        ("sklearn",),
        ("fit",),
        ("epoch", "step"),
        ("MLPClassifier", "MLPRegressor"),
    ),
    Library(
        "Ignite",
        ("ignite",),
        ("run",),
        ("epoch", "step"),
        ("Engine", "create_supervised_trainer"),
        (),
        ("trainer",),
        ("train_step", "update"),
        (),
        ("With loaders that keep workers between epochs, a replay starts at an earlier epoch.",),
    ),
)
"""Libraries whose training loops are watched; `LOOPS` lists these loops."""

_TRAINING_METHODS = frozenset({"fit", "fit_one_cycle", "fine_tune", "learn", "fit_generator"})
"""Methods that train in libraries without watched loops."""


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call that runs a training loop inside a library."""

    path: str
    line: int
    end: int
    call: str
    """The called function as written: `trainer.fit`."""
    library: str
    watched: bool
    point: tuple[str, ...]
    """Names of the loops that the call runs, outermost first; empty if the loops are not watched."""
    limits: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    captured: bool = False


def dotted(node: ast.AST) -> str:
    """Return an expression as text if it is a name or a chain of attributes of a name; otherwise "".

    >>> dotted(ast.parse("self.trainer.fit").body[0].value), dotted(ast.parse("f().g").body[0].value)
    ('self.trainer.fit', '')
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join((node.id, *reversed(parts)))


class Origins:
    """The imports of a program, and the class or function that made each object: `lightning.Trainer` for `trainer`."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.imports: dict[str, dict[str, str]] = {}
        """File path -> {name: full dotted name of the module or object that is imported under the name}."""
        self.makers: dict[str, dict[str, str]] = {}
        """File path -> {variable, as written: class or function that made its value, as written}."""
        self.classes: dict[str, ast.ClassDef] = {}
        """Name of a class of the program -> its definition."""
        self.class_files: dict[str, str] = {}
        self.functions: set[str] = set()
        for path, tree in trees.items():
            self._read(path, tree)

    def _read(self, path: str, tree: ast.Module) -> None:
        names = self.imports[path] = {}
        makers = self.makers[path] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    names[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom):
                module = f".{node.module or ''}" if node.level else node.module
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{module}.{alias.name}"
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
                self.class_files.setdefault(node.name, path)
            elif isinstance(node, FUNCTIONS):
                self.functions.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    makers[dotted(target)] = dotted(node.value.func)
            elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else dotted(node.target)
                makers.setdefault(name, dotted(node.annotation))
        makers.pop("", None)

    def packages(self) -> set[str]:
        """Return the top-level packages that the program imports."""
        return {name.split(".")[0] for names in self.imports.values() for name in names.values()}

    def full_name(self, path: str, text: str) -> str:
        """Return the dotted expression `text` with its first name replaced by what the file imports under the name.

        Return "" if the file does not import the name.
        """
        first, dot, attributes = text.partition(".")
        imported = self.imports.get(path, {}).get(first)
        return f"{imported}{dot}{attributes}" if imported is not None else ""

    def project_class(self, path: str, text: str) -> ast.ClassDef | None:
        """Return the class of the variable `text` in a file, or None if it is unknown or not in the program."""
        maker = self.makers.get(path, {}).get(text, "")
        return self.classes.get(maker.rpartition(".")[2])

    def maker(self, path: str, receiver: ast.expr) -> str:
        """Return the full name of the library's class or function that made an object, or "" if unknown.

        If the object is of a class of the program, return the library's class that it inherits from.
        """
        if isinstance(receiver, ast.Call):
            text = dotted(receiver.func)
        else:
            text = self.makers.get(path, {}).get(dotted(receiver), "")
        return self._library_class(path, text, frozenset()) if text else ""

    def _library_class(self, path: str, text: str, visited: frozenset[str]) -> str:
        own_class = self.classes.get(text.rpartition(".")[2])
        if own_class is None or text in visited:
            return self.full_name(path, text)
        file = self.class_files[own_class.name]
        inherited = (
            self._library_class(file, dotted(base), visited | {text}) for base in own_class.bases
        )
        return next((name for name in inherited if name), "")


def library_calls(
    trees: Mapping[str, ast.Module], origins: Origins | None = None
) -> tuple[LibraryCall, ...]:
    r"""Return the calls that run a training loop inside a library, ordered by file and line.

    Calls of libraries whose loops are not watched are included.

    >>> text = "import lightning as L\ntrainer = L.Trainer()\ntrainer.fit(net)\n"
    >>> [(call.call, call.library, call.point) for call in library_calls({"t.py": ast.parse(text)})]
    [('trainer.fit', 'Lightning', ('epoch', 'step'))]
    """
    origins = origins or Origins(trees)
    packages = origins.packages()
    calls: list[LibraryCall] = []
    for path, tree in sorted(trees.items()):
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            calls.extend(_library_call(path, node, origins, packages))
    return tuple(calls)


def _library_call(
    path: str, node: ast.Call, origins: Origins, packages: AbstractSet[str]
) -> Iterator[LibraryCall]:
    func = node.func
    text = dotted(func)
    full = origins.full_name(path, text)
    for library in LIBRARIES:
        if full.split(".")[0] in library.roots and any(
            full == name or full.endswith(f".{name}") for name in library.functions
        ):
            yield _call_of(library, path, node, text)
            return
    if not isinstance(func, ast.Attribute):
        return
    maker = origins.maker(path, func.value)
    own_class = origins.project_class(path, dotted(func.value))
    if own_class is not None and any(
        isinstance(part, FUNCTIONS) and part.name == func.attr for part in own_class.body
    ):
        return  # the method is defined in the program, not in the library
    for library in LIBRARIES:
        if func.attr in library.methods and _belongs(library, maker, func.value, packages, origins):
            yield _call_of(library, path, node, text or func.attr)
            return
    package = maker.split(".")[0]
    if package and func.attr in _TRAINING_METHODS:
        yield LibraryCall(
            path, node.lineno, node.end_lineno or node.lineno, text or func.attr, package,
            watched=False, point=(),
        )  # fmt: skip


def _belongs(
    library: Library,
    maker: str,
    receiver: ast.expr,
    packages: AbstractSet[str],
    origins: Origins,
) -> bool:
    """Return True if the text suggests that the value of `receiver` is an object of the library.

    `maker` is the full name of the class or function that made the value, or "" if unknown.
    """
    if maker:
        maker_name = maker.rpartition(".")[2]
        return maker.split(".", maxsplit=1)[0] in library.roots and (
            not library.classes or any(part in maker_name for part in library.classes)
        )
    last = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
    return (
        any(last.lower().endswith(word) for word in library.receivers)
        and not packages.isdisjoint(library.roots)
        and library.methods[0] not in origins.functions
    )


def _call_of(library: Library, path: str, node: ast.Call, text: str) -> LibraryCall:
    return LibraryCall(
        path,
        node.lineno,
        node.end_lineno or node.lineno,
        text,
        library.name,
        watched=True,
        point=library.point,
        limits=library.limits,
        conditions=library.conditions,
        hooks=library.hooks,
        captured=library.captured,
    )
