"""Tables of calls that change objects, and the class `Levels`, which tells whether a value may belong to the run.

The tables list methods and functions by their last word only, because the text does not give the type of an
object. For a call that changes an object, the tables also say what the user can write in its place.

A probe may change values that it created, but may only read objects of the recorded run. `Levels` decides from the
text alone which of both the value of an expression is; in doubt, it is taken for an object of the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from rearview.source.scopes import Scope, Scopes

COPY = "Work on a copy: `.clone()`, `list(...)`, `copy.deepcopy(...)`."

_GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        """append extend insert pop popitem popleft appendleft extendleft clear remove discard
        update setdefault sort reverse rotate""",
        "it changes a container that the recorded code holds",
        COPY,
    ),
    (
        "step",
        "it moves an optimizer, scheduler or environment of the run forward",
        "Read what you need (`scheduler.get_last_lr()`, `optimizer.state`) without stepping.",
    ),
    (
        "backward",
        "it adds to the gradients of the run's own parameters",
        "Use `torch.autograd.grad(..., retain_graph=True)`, which leaves `.grad` alone.",
    ),
    (
        "zero_grad",
        "it throws away gradients that the recorded code still uses",
        "Leave the gradients as they are; clone them if you need other ones.",
    ),
    (
        "train eval",
        "it switches the live model between training and evaluation",
        "Use a copy: `copy.deepcopy(model).eval()`.",
    ),
    (
        "load_state_dict set_state setstate set_rng_state manual_seed",
        "it overwrites live state",
        "Load into a copy: `copy.deepcopy(model).load_state_dict(...)`.",
    ),
    (
        """register_forward_hook register_forward_pre_hook register_full_backward_hook
        register_full_backward_pre_hook register_backward_hook register_hook
        register_post_accumulate_grad_hook""",
        "a hook becomes part of the live model and runs in recorded code",
        "Put the log statement into `forward` itself, or call the layer in the probe.",
    ),
    (
        "register_buffer register_parameter register_module add_module add_param_group",
        "it adds a part to a live module or optimizer",
        "Use a copy: `copy.deepcopy(model)`.",
    ),
    (
        "fit partial_fit fit_transform reset",
        "it changes the live object",
        "Use a copy: `copy.deepcopy(...)`, or `sklearn.base.clone(...)`.",
    ),
    (
        "write writelines writerow writerows truncate seek read readline readlines close",
        "it moves the position of a file that the run has open",
        "Log with `rearview.log` or `print`, or open another file in the probe.",
    ),
)

CHANGING_METHODS: dict[str, tuple[str, str]] = {
    name: (why, remedy) for names, why, remedy in _GROUPS for name in names.split()
}
"""Method -> (why a probe may not call the method on an object of the run, what the user can do)."""

IN_PLACE = ("its name ends in `_`: it changes a live tensor in place", COPY)

UNUSED_RESULT_METHODS: dict[str, tuple[str, str]] = dict.fromkeys(
    "add to cpu cuda half double float bfloat16 type compile fill put resize".split(),
    ("called for its effect, it changes the live object", COPY),
)
"""Method -> (why a probe may not call it, what the user can do). The methods change a set or a module, but return
a new tensor when called on a tensor. A probe may not call such a method without using the result, or on an object
that is known to be a module.
"""

CONTAINER_METHODS = frozenset(_GROUPS[0][0].split())
"""Methods that change a list, dict, set or other container."""

FIRST_ARGUMENT_FUNCTIONS: dict[str, tuple[str, str]] = dict.fromkeys(
    "shuffle heappush heappop heapify heapreplace heappushpop insort insort_left "
    "insort_right copyto fill_diagonal place put putmask setattr delattr".split(),
    ("it changes its first argument", COPY),
)
"""Function that changes its first argument -> (why a probe may not call it, what the user can do)."""

ENDING_CALLS = frozenset({"exit", "quit", "_exit", "abort", "kill", "input"})
"""Functions that end the program or wait for the user."""

SETTING_CALLS = frozenset(
    "set_grad_enabled set_default_dtype set_default_device set_default_tensor_type "
    "set_num_threads set_num_interop_threads use_deterministic_algorithms "
    "set_float32_matmul_precision set_flush_denormal seterr chdir".split()
)
"""Functions that change a setting of the whole process."""

TRAINING_METHODS = frozenset("step backward zero_grad load_state_dict partial_fit".split())
"""Methods that change parameters, gradients or the state of an optimizer."""
MODE_METHODS = frozenset({"train", "eval"})
"""Methods that switch a model between training and evaluation."""
MODULE_SIGNS = frozenset(
    "train eval parameters named_parameters state_dict load_state_dict zero_grad modules".split()
)
"""Methods that only modules and optimizers have: an object with such a method is taken for one of them."""
GENERATOR_CALLS = frozenset({"default_rng", "RandomState", "Generator", "Random"})
"""Functions and classes that make random generators."""

NEW_VALUE_CALLS = frozenset(
    """
    clone deepcopy item tolist len int float str bool complex bytes repr format type isinstance
    issubclass hasattr callable id hash ord chr range round abs sum any all divmod pow hex
    norm vector_norm matrix_norm mean std var prod argmax argmin argsort numel dim size nelement
    element_size softmax log_softmax sigmoid tanh exp log log2 log10 log1p sqrt square sin cos
    matmul mm bmm mv dot einsum stack cat concatenate vstack hstack column_stack
    zeros_like ones_like rand_like randn_like empty_like full_like zeros ones empty full arange
    linspace logspace eye rand randn randint randperm normal uniform tensor array
    histc histogram bincount unique quantile percentile median nanmean nanstd nanmedian mode cov
    corrcoef cosine_similarity svd svdvals eig eigvals eigh eigvalsh qr det matrix_rank cumsum
    cumprod topk kthvalue count_nonzero nonzero isnan isinf isfinite allclose equal eq ne lt gt le
    ge where clip clamp maximum minimum one_hot cross_entropy mse_loss nll_loss
    binary_cross_entropy binary_cross_entropy_with_logits l1_loss kl_div
    perf_counter time monotonic process_time getsizeof memory_allocated max_memory_allocated
    get_last_lr join split strip lower upper replace startswith endswith encode decode hexdigest
    """.split()
)
"""Functions and methods that return a new value which shares no memory with their arguments."""
NEW_CONTAINER_CALLS = frozenset(
    "list dict set tuple frozenset sorted reversed enumerate zip map filter copy keys values "
    "items defaultdict Counter deque OrderedDict ChainMap DataFrame Series".split()
)
"""Functions and methods that return a new container whose elements may be objects of the run."""


def last_name(node: ast.AST) -> str:
    """Return the last word of a dotted name, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def root(node: ast.AST) -> ast.AST:
    """Return the expression that a chain of attributes, items and calls starts from: `a` for `a.b[0].c()`."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return node


class Level(IntEnum):
    """Relation of a value to the recorded run: the value is an object of the run, contains one, or neither."""

    FRESH = 0
    """Created by the probe."""
    SHALLOW = 1
    """A container created by the probe that contains objects of the run."""
    CODE = 2
    """A module, function or class."""
    LIVE = 3
    """May be an object of the run, or share memory with one."""


def level_of_part(level: Level) -> Level:
    """Return the level of an element or attribute of a value with the level `level`."""
    return Level.LIVE if level is Level.SHALLOW else level


def combined_level(*levels: Level) -> Level:
    """Return the level of a new value that is made from values with `levels`: FRESH if all are FRESH, else SHALLOW."""
    return Level.FRESH if max(levels, default=Level.FRESH) is Level.FRESH else Level.SHALLOW


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The expressions in a program whose values are modules, optimizers or random generators."""

    modules: frozenset[str] = frozenset()
    """Expressions that recorded code uses like modules or optimizers: `model`, `self.net`."""
    generators: frozenset[str] = frozenset()
    """Expressions whose value is a random generator of the run: `rng`, `self.rng`."""


def program_facts(trees: list[ast.Module]) -> ProgramFacts:
    """Return the expressions in recorded texts whose values are modules, optimizers or random generators."""
    modules: set[str] = set()
    generators: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in MODULE_SIGNS:
                    modules.add(ast.unparse(node.func.value))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if last_name(node.value.func) in GENERATOR_CALLS:
                    generators.update(map(ast.unparse, node.targets))
    return ProgramFacts(frozenset(modules), frozenset(generators))


class Levels:
    """Tells the `Level` of each expression in statements that probes add.

    A variable of a probe gets the highest level of all values that are assigned to the variable, so the order of
    statements does not matter. `live_names` are names that probes share with recorded code.
    """

    def __init__(
        self, scopes: Scopes, added: list[ast.stmt], live_names: Iterable[tuple[Scope, str]] = ()
    ) -> None:
        self.scopes = scopes
        self._levels: dict[tuple[int, str], Level] = {
            (id(owner), name): Level.LIVE for owner, name in live_names
        }
        changed = True
        while changed:
            before = dict(self._levels)
            for stmt in added:
                self._collect(stmt, scopes.of[id(stmt)])
            changed = before != self._levels

    def _collect(self, node: ast.AST, scope: Scope) -> None:
        scope = self.scopes.opened.get(id(node), scope)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._raise_level(target, self.of(node.value, scope), scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._raise_level(node.target, self.of(node.value, scope), scope)
        elif isinstance(node, ast.AugAssign):
            self._raise_level(node.target, combined_level(self.of(node.value, scope)), scope)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._raise_level(node.target, level_of_part(self.of(node.iter, scope)), scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._raise_level(node.optional_vars, self.of(node.context_expr, scope), scope)
        for child in ast.iter_child_nodes(node):
            self._collect(child, scope)

    def _raise_level(self, target: ast.expr, level: Level, scope: Scope) -> None:
        """Raise the level of each variable in an assignment target to at least `level`."""
        if isinstance(target, ast.Name):
            owner = scope.owner_of(target.id) or scope
            key = (id(owner), target.id)
            self._levels[key] = max(level, self._levels.get(key, Level.FRESH))
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._raise_level(item, level_of_part(level), scope)
        elif isinstance(target, ast.Starred):
            self._raise_level(target.value, level, scope)
        elif isinstance(target, ast.Subscript | ast.Attribute) and level is not Level.FRESH:
            base = root(target)
            if isinstance(base, ast.Name):
                self._raise_level(base, Level.SHALLOW, scope)

    def of(self, node: ast.expr, scope: Scope) -> Level:
        """Return the level of the value of an expression in `scope`."""
        if isinstance(node, ast.Name):
            return self._name(node.id, scope)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            return level_of_part(self.of(node.value, scope))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return combined_level(*(self.of(item, scope) for item in node.elts))
        if isinstance(node, ast.Dict):
            return combined_level(*(self.of(value, scope) for value in node.values))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return combined_level(self.of(node.elt, self.scopes.opened.get(id(node), scope)))
        if isinstance(node, ast.DictComp):
            return combined_level(self.of(node.value, self.scopes.opened.get(id(node), scope)))
        if isinstance(node, ast.BinOp):
            return combined_level(self.of(node.left, scope), self.of(node.right, scope))
        if isinstance(node, ast.UnaryOp):
            return combined_level(self.of(node.operand, scope))
        if isinstance(node, ast.BoolOp):
            return max(self.of(value, scope) for value in node.values)
        if isinstance(node, ast.IfExp):
            return max(self.of(node.body, scope), self.of(node.orelse, scope))
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        return Level.FRESH

    def _name(self, name: str, scope: Scope) -> Level:
        owner = scope.owner_of(name)
        if owner is None:
            return Level.CODE
        level = self._levels.get((id(owner), name))
        if level is not None:
            return level
        if owner.kinds.get(name) in {"import", "def"}:
            return Level.CODE
        is_method = owner.added and owner.parent is not None and owner.parent.is_class
        if name == "self" and is_method and owner.parent is not None and owner.parent.added:
            return Level.FRESH
        # a name without a level: an exception that the probe catches is a new object, but an argument that is
        # passed to a function of the probe may be an object of the run
        return Level.FRESH if name in owner.added_bound else Level.LIVE

    def _call(self, node: ast.Call, scope: Scope) -> Level:
        called = last_name(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        levels = [self.of(arg, scope) for arg in arguments]
        if called in NEW_VALUE_CALLS:
            return Level.FRESH
        if called in {"globals", "locals", "vars"}:
            return Level.LIVE
        if isinstance(node.func, ast.Attribute):
            levels.append(self.of(node.func.value, scope))
        elif isinstance(node.func, ast.Name):
            owner = scope.owner_of(node.func.id)
            is_recorded = owner is not None and node.func.id not in owner.added_bound
            if is_recorded and not called[:1].isupper() and not levels:
                return Level.LIVE  # a function of the recorded code may return an object of the run
        levels = [Level.FRESH if level is Level.CODE else level for level in levels]
        if called in NEW_CONTAINER_CALLS or called[:1].isupper():
            return combined_level(*levels)
        return Level.FRESH if max(levels, default=Level.FRESH) is Level.FRESH else Level.LIVE
