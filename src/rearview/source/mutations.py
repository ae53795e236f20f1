"""Which calls change the object they are called on, which do not, and what to write instead.

The tables name methods and functions by their last word only, because the text does not give the type of an
object.
"""

from __future__ import annotations

import ast

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
        "Log with `rearview.log` or `print`, or open a file of the probe's own.",
    ),
)

METHODS: dict[str, tuple[str, str]] = {
    name: (why, remedy) for names, why, remedy in _GROUPS for name in names.split()
}
"""Method -> (why it is refused on a live object, what to write instead)."""

IN_PLACE = ("its name ends in `_`: it changes a live tensor in place", COPY)

ALONE: dict[str, tuple[str, str]] = dict.fromkeys(
    "add to cpu cuda half double float bfloat16 type compile fill put resize".split(),
    ("called for its effect, it changes the live object", COPY),
)
"""Methods that change a set or a module but return a new tensor otherwise: refused if their result is unused
or if the object is known to be a module.
"""

CONTAINER = frozenset(_GROUPS[0][0].split())

FIRST_ARGUMENT: dict[str, tuple[str, str]] = dict.fromkeys(
    "shuffle heappush heappop heapify heapreplace heappushpop insort insort_left "
    "insort_right copyto fill_diagonal place put putmask setattr delattr".split(),
    ("it changes its first argument", COPY),
)

ENDS = frozenset({"exit", "quit", "_exit", "abort", "kill", "input"})

SETTINGS = frozenset(
    "set_grad_enabled set_default_dtype set_default_device set_default_tensor_type "
    "set_num_threads set_num_interop_threads use_deterministic_algorithms "
    "set_float32_matmul_precision set_flush_denormal seterr chdir".split()
)

TRAINS = frozenset("step backward zero_grad load_state_dict partial_fit".split())
SWITCHES = frozenset({"train", "eval"})
MODULE_SIGNS = frozenset(
    "train eval parameters named_parameters state_dict load_state_dict zero_grad modules".split()
)
"""Methods that only modules and optimizers have: an object on which one is called is one of these."""
GENERATORS = frozenset({"default_rng", "RandomState", "Generator", "Random"})

FRESH = frozenset(
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
"""Calls that return a new value which shares nothing with their arguments."""
COPIES = frozenset(
    "list dict set tuple frozenset sorted reversed enumerate zip map filter copy keys values "
    "items defaultdict Counter deque OrderedDict ChainMap DataFrame Series".split()
)
"""Calls that return a new container whose elements may be objects of the run."""


def last_name(node: ast.AST) -> str:
    """Return the last word of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def root(node: ast.AST) -> ast.AST:
    """Return the innermost expression of a chain of attributes, items and calls."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return node
