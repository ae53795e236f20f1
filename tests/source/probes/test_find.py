"""An edit is a probe if it only looks; everything else is refused with its line."""

import textwrap

import pytest

from rearview.errors import ProbeError, SourceError
from rearview.source.probes.find import check, find
from rearview.source.probes.loop_carried import START
from rearview.source.probes.probe import Position, ProbeKind, fits

TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
gen = torch.Generator()
data = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(5)]
batches = iter(data)
for epoch in range(3):
    net.train()
    for step, (x, y) in enumerate(data):
        loss = ((net(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    history.append(loss.item())
print(history)
"""


def insert(text, line, added, indent):
    lines = text.splitlines(keepends=True)
    body = textwrap.indent(textwrap.dedent(added).strip("\n") + "\n", " " * indent)
    return "".join([*lines[: line - 1], body, *lines[line - 1 :]])


SETUP, OUTER_FIRST, INNER, OUTER_LAST, AFTER = (11, 0), (12, 4), (17, 8), (18, 4), (20, 0)


def edit(added, place=OUTER_LAST, text=TRAIN):
    return {"train.py": text}, {"train.py": insert(text, *((place[0], added, place[1])))}


def refusal(added, place=OUTER_LAST):
    with pytest.raises(ProbeError) as caught:
        find(*edit(added, place))
    assert caught.value.path == "train.py"
    assert str(caught.value.line) in str(caught.value)
    return caught.value


def probe(added, place=OUTER_LAST):
    return next(p for p in reversed(find(*edit(added, place)).probes))


def test_an_untouched_program_has_no_probes():
    assert not find({"train.py": TRAIN}, {"train.py": TRAIN})


def test_formatting_comments_and_docstrings_are_no_edits():
    new = TRAIN.replace("lr=0.1", "lr =  0.1,  # slow\n").replace(
        "\nfor epoch", '\n\n"why"\nfor epoch'
    )
    assert not find({"train.py": TRAIN}, {"train.py": new})


@pytest.mark.parametrize(
    ("place", "loops", "where"),
    [
        (SETUP, (), Position.BEFORE),
        (OUTER_FIRST, ("epoch",), Position.BEFORE),
        (INNER, ("epoch", "step"), Position.ALONE),
        (OUTER_LAST, ("epoch",), Position.AFTER),
        (AFTER, (), Position.AFTER),
    ],
)
def test_a_probe_knows_its_position(place, loops, where):
    found = probe('rearview.log("norm", net.weight.norm().item())', place)
    assert (found.loops, found.place, found.kind) == (loops, where, ProbeKind.LOG)
    assert found.names == ("norm",)
    assert (found.first, found.last) == (place[0], place[0])
    assert found.chains == (loops,)
    assert found.depth == len(loops)


def test_several_probes_in_several_files_are_found():
    old = {"train.py": TRAIN, "lib.py": "def f(a):\n    return a\n", "gone.txt": "x"}
    new = {
        "train.py": insert(TRAIN, 18, 'rearview.log("a", loss.item())', 4),
        "lib.py": "def f(a):\n    print(a)\n    return a\n",
        "notes.md": "y",
    }
    found = find(old, new)
    assert [(p.path, p.kind) for p in found.probes] == [
        ("train.py", ProbeKind.LOG),
        ("lib.py", ProbeKind.PRINT),
    ]
    assert found.source["gone.txt"] == "x"
    assert found.source["lib.py"] == new["lib.py"]
    assert "notes.md" not in found.source


def test_helpers_imports_and_variables_of_probes_are_allowed_and_listed():
    text = insert(
        TRAIN,
        18,
        """
        total = 0.0
        for p in net.parameters():
            total += grad_norm(p) ** 2
        rearview.log("grad_norm", math.sqrt(total))
        del total
        """,
        4,
    )
    text = insert(
        text,
        3,
        """
        import math
        import rearview

        def grad_norm(p):
            values = [] if p.grad is None else [p.grad.norm().item()]
            values.append(0.0)
            return sum(values)
        """,
        0,
    )
    found = find({"train.py": TRAIN}, {"train.py": text})
    assert found.variables == {
        ("train.py", "<module>"): frozenset({"math", "rearview", "grad_norm", "total", "p"})
    }
    assert found.names == ("grad_norm",)
    assert found.of("grad_norm")[0].depth == 1
    kinds = [p.kind for p in found.probes]
    assert kinds[:3] == [ProbeKind.IMPORT, ProbeKind.IMPORT, ProbeKind.DEFINITION]


def test_a_recorded_import_may_bring_in_more_names():
    new = TRAIN.replace("from torch import nn", "from torch import nn, linalg")
    new = insert(new, 18, 'rearview.log("n", linalg.norm(net.weight).item())', 4)
    assert find({"train.py": TRAIN}, {"train.py": new}).names == ("n",)


def test_a_module_that_only_probes_import_comes_along():
    old, new = edit('from look import norm\nrearview.log("n", norm(net))')
    new["look.py"] = (
        "import deep.er\ndef norm(net):\n    return sum(p.norm() for p in net.parameters())\n"
    )
    new["deep/er.py"] = "X = 1\n"
    new["unrelated.py"] = "raise SystemExit\n"
    found = find(old, new)
    assert set(found.modules) == {"look.py", "deep/er.py"}
    assert "unrelated.py" not in found.source


ALLOWED = [
    'print("loss", loss.item())',
    'with torch.no_grad():\n    rearview.log("p", net(data[0][0]).mean().item())',
    'if epoch == 2:\n    rearview.log("w", [p.norm().item() for p in net.parameters()])',
    'frozen = copy.deepcopy(net).eval()\nrearview.log("v", frozen(data[0][0]).mean().item())',
    'sample = torch.randn(3)\nsample.mul_(2)\nrearview.log("r", sample.sum().item())',
    'mine = list(history)\nmine.append(1)\nrearview.log("h", len(mine))',
    'writer.add_scalar("loss", loss, epoch)\nwriter.add_histogram("w", net.weight, epoch)',
    'wandb.log({"loss": loss.item(), "epoch": epoch})',
    'rearview.log("n", torch.nn.utils.clip_grad_norm_(net.parameters(), float("inf")).item())',
    'rearview.log("g", next(iter(data))[0].sum().item())',
    'g = torch.autograd.grad(loss, [net.weight], retain_graph=True)\nrearview.log("g", g[0].norm())',
    'stats = {}\nstats["a"] = loss.item()\nstats.update(b=1)\nrearview.log(stats)',
    "class Meter:\n    def __init__(self):\n        self.v = []\n    def add(self, x):\n        self.v.append(x)\n",
    "assert loss.item() >= 0",
    'try:\n    rearview.log("a", net.missing)\nexcept AttributeError as err:\n    print(err)',
    'x2 = loss.detach().clone()\nx2 += 1\nrearview.log("x2", x2.item())',
    "import torch",
]


@pytest.mark.parametrize("added", ALLOWED)
def test_looking_is_allowed(added):
    assert find(*edit(added))


REFUSED = [
    ("loss = loss * 2", "rebinds `loss`"),
    ("loss += 1", "rebinds `loss`"),
    ("for epoch in range(2):\n    print(epoch)", "rebinds `epoch`"),
    ("import torch as net", "rebinds `net`"),
    ("def loss():\n    pass", "rebinds `loss`"),
    ("del history", "deletes `history`"),
    ("if (loss := 3):\n    print(loss)", "rebinds `loss`"),
    ("with open('f') as data:\n    pass", "rebinds `data`"),
    ("optimizer.step()", "forward"),
    ("optimizer.zero_grad()", "gradients"),
    ("net.eval()", "evaluation"),
    ("net.train()", "deepcopy"),
    ("loss.backward()", "autograd.grad"),
    ("history.append(1)", "container"),
    ("mine = history\nmine.append(1)", "container"),
    ("for p in net.parameters():\n    p.data.mul_(0.5)", "in place"),
    ("net.weight.data.fill_(0)", "in place"),
    ("nn.init.zeros_(net.weight)", "ends in `_`"),
    ("torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "ends in `_`"),
    ("g = net.weight.grad\ng += 1", "live tensor"),
    ("net.extra = 3", "stores into"),
    ("history[0] = 3", "stores into"),
    ("torch.backends.cudnn.enabled = False", "stores into"),
    ("net.register_forward_hook(print)", "hook"),
    ("net.to('cpu')", "effect"),
    ("print(net.double()(x))", "effect"),
    ("next(batches)", "iterator"),
    ("torch.autograd.grad(loss, [net.weight])", "retain_graph"),
    ("setattr(net, 'a', 1)", "first argument"),
    ("import random\nrandom.shuffle(data)", "first argument"),
    ("torch.set_num_threads(1)", "process"),
    ("import sys\nsys.path.append('x')", "container"),
    ("break", "loop"),
    ("continue", "loop"),
    ("raise ValueError", "end the run"),
    ("from math import *", "any name"),
    ("exec('x = 1')", "judged"),
    ("exit()", "end or stop"),
    ("torch.add(x, 1, out=net.weight)", "out="),
]


@pytest.mark.parametrize(("added", "why"), REFUSED, ids=[added for added, _ in REFUSED])
def test_touching_is_refused_with_the_reason(added, why):
    assert why in str(refusal(added))


def test_a_refusal_names_the_line_of_the_edit():
    assert refusal("a = 1\nhistory.append(a)").line == OUTER_LAST[0] + 1


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("lr=0.1", "lr=0.2", "replaces the recorded"),
        ("    net.train()\n", "", "is gone"),
        ("range(3)", "range(4)", "for epoch in range(3)"),
        ("import torch\n", "from __future__ import annotations\nimport torch\n", "compiled"),
        ("print(history)\n", "print(sorted(history))\n", "print(history)"),
    ],
)
def test_changed_and_removed_statements_are_refused(before, after, why):
    with pytest.raises(ProbeError, match="not a probe") as caught:
        find({"train.py": TRAIN}, {"train.py": TRAIN.replace(before, after)})
    assert why in str(caught.value)


def test_statements_moved_into_a_new_block_are_refused():
    new = TRAIN.replace("    net.train()\n", "    if epoch:\n        net.train()\n")
    with pytest.raises(ProbeError):
        find({"train.py": TRAIN}, {"train.py": new})


def test_all_refusals_can_be_had_at_once():
    _, refusals = check(*edit("history.append(1)\nnet.eval()"))
    assert [r.line for r in refusals] == [18, 19]


def test_a_removed_file_matters_only_if_the_run_used_it():
    old = {"train.py": TRAIN, "other.py": "x = 1\n"}
    assert not find(old, {"train.py": TRAIN}, used=["train.py"])
    with pytest.raises(ProbeError, match="gone"):
        find(old, {"train.py": TRAIN})


def test_a_new_file_may_not_take_the_place_of_an_imported_module():
    with pytest.raises(ProbeError, match="takes the place of the module `torch`"):
        find({"train.py": TRAIN}, {"train.py": TRAIN, "torch.py": ""})


def test_text_that_does_not_parse_is_named_with_its_line():
    with pytest.raises(SourceError, match=r"train\.py:2") as caught:
        find({"train.py": "a = 1\n"}, {"train.py": "a = 1\nb = (\n"})
    assert caught.value.slug == "source-syntax"


FUNCTIONS = """\
import torch

class Trainer:
    def __init__(self, net):
        self.net = net
        self.rng = torch.Generator()

    def epoch(self, data):
        for x in data:
            out = self.net(x)
            out.sum().backward()

    def fit(self, data):
        epoch = 0
        while epoch < 3:
            self.epoch(data)
            epoch += 1

def evaluate(net):
    net.eval()
    return 1.0

trainer = Trainer(torch.nn.Linear(1, 1))
trainer.fit([torch.ones(1)])
"""


def added_to(text, line, added, indent):
    return find({"t.py": text}, {"t.py": insert(text, line, added, indent)}).probes[-1]


def test_a_probe_in_a_called_function_knows_the_loops_of_its_callers():
    found = added_to(FUNCTIONS, 11, "print(out)", 12)
    assert found.function == "Trainer.epoch"
    assert found.loops == ("x",)
    assert found.chains == (("fit", "x"),)


def test_a_call_of_a_function_that_loops_counts_as_a_loop_of_its_level():
    assert added_to(FUNCTIONS, 16, "print(epoch)", 12).place is Position.BEFORE
    assert added_to(FUNCTIONS, 17, "print(epoch)", 12).place is Position.AFTER
    assert added_to(FUNCTIONS, 25, "print(1)", 0).place is Position.AFTER


CALLED = """\
def measure():
    for part in range(3):
        pass
class Report:
    def __init__(self):
        for part in range(3):
            pass
{before}
for epoch in range(3):
    pass
{after}
"""


@pytest.mark.parametrize(
    ("before", "after", "runs_first"),
    [
        ("CALL", "", True),
        ("CALL", "CALL", False),
        ("", "CALL", False),
        ("", "else:\n    CALL", False),
        ("def end():\n    CALL", "end()", False),
        ("def start():\n    CALL\nstart()", "", True),
        ("def again():\n    CALL\n    again()\nagain()", "", False),
    ],
)
@pytest.mark.parametrize(
    ("call", "line", "indent"), [("measure()", 2, 4), ("Report()", 6, 8)], ids=["function", "class"]
)
def test_a_statement_before_the_loops_of_its_function_runs_first_if_no_call_follows_a_loop(
    before, after, runs_first, call, line, indent
):
    text = CALLED.format(before=before, after=after).replace("CALL", call)
    added = added_to(text, line, 'print("here")', indent)
    assert added.place is Position.BEFORE
    assert added.runs_first is runs_first


def test_a_while_loop_is_named_by_its_function():
    assert added_to(FUNCTIONS, 16, "print(epoch)", 12).loops == ("fit",)


def test_the_generators_of_the_run_that_a_probe_draws_from_are_listed():
    found = added_to(FUNCTIONS, 16, "print(torch.rand(1, generator=self.rng))", 12)
    assert found.generators == ("self.rng",)


def test_calling_a_project_function_that_trains_is_refused():
    with pytest.raises(ProbeError, match=r"calls `\.backward"):
        added_to(FUNCTIONS, 25, "trainer.epoch([])", 0)


def test_calling_a_function_that_switches_the_mode_is_allowed_with_a_caution():
    found = added_to(FUNCTIONS, 25, "print(evaluate(trainer.net))", 0)
    assert "mode" in found.cautions[0]


def test_a_new_method_is_allowed_unless_recorded_code_may_reach_it():
    assert added_to(FUNCTIONS, 8, "def norm(self):\n    return self.net.weight.norm()\n", 4)
    for added in (
        "def epoch2(self):\n    self.x = 1\n",
        "def __len__(self):\n    return 1\n",
        "K = 1\n",
    ):
        with pytest.raises(ProbeError):
            added_to(FUNCTIONS, 8, added, 4)


def test_a_return_in_a_recorded_function_is_refused_and_in_a_new_one_allowed():
    with pytest.raises(ProbeError, match="function early"):
        added_to(FUNCTIONS, 16, "return 1", 12)


def test_a_variable_that_recorded_code_would_list_is_refused():
    text = "lr = 0.1\nkeys = [k for k in globals()]\nprint(keys)\n"
    with pytest.raises(ProbeError, match="lists all variables"):
        added_to(text, 2, "mine = 3", 0)
    assert added_to(text, 3, "mine = 3", 0)


def test_a_local_of_another_function_is_no_clash():
    text = "def f():\n    total = 1\n    return total\nfor i in range(2):\n    f()\n"
    assert added_to(text, 5, "total = 2\nprint(total)", 4)


CARRY = [
    # (edits, name, depth): each edit is (line, text, indent), later lines first
    ([(18, "seen += 1\nrearview.log('v', seen)", 4), (11, "seen = 0", 0)], 0, ()),
    ([(18, "v = loss.item()\nrearview.log('v', v)", 4)], 1, ()),
    (
        [
            (17, "rearview.log('v', base - loss.item())", 8),
            (12, "base = net.weight.sum().item()", 4),
        ],
        1,
        (),
    ),
    ([(17, "rearview.log('v', base - loss.item())", 8), (11, "base = 3", 0)], 2, ()),
    (
        [
            (18, "rearview.log('v', total)", 4),
            (17, "total += loss.item()", 8),
            (12, "total = 0", 4),
        ],
        1,
        (("epoch", "step"),),
    ),
    ([(20, "rearview.log('v', last)", 0), (18, "last = loss.item()", 4)], 0, (("epoch",),)),
    ([(18, "seen.append(1)\nrearview.log('v', len(seen))", 4), (11, "seen = []", 0)], 0, ()),
    ([(18, "n += 1\nm = n * 2\nrearview.log('v', m)", 4), (11, "n = 0", 0)], 0, ()),
    ([(18, "if epoch:\n    w = 1\nrearview.log('v', w)", 4)], 0, ()),
    (
        [
            (18, "note()\nrearview.log('v', len(notes))", 4),
            (11, "notes = []\ndef note():\n    notes.append(1)", 0),
        ],
        START,
        (),
    ),
]


@pytest.mark.parametrize(("edits", "depth", "feeds"), CARRY)
def test_a_probe_that_carries_values_over_iterations_sets_where_its_replay_starts(
    edits, depth, feeds
):
    text = TRAIN
    for line, added, indent in edits:
        text = insert(text, line, added, indent)
    found = find({"train.py": TRAIN}, {"train.py": text}).of("v")
    assert [(p.depth, p.feeding_loops) for p in found] == [(depth, feeds)]


def test_a_pattern_fits_the_names_that_it_describes():
    found = find(
        *edit('for n, p in net.named_parameters():\n    rearview.log(f"norm/{n}", p.norm())')
    )
    assert found.names == ("norm/*",)
    assert found.of("norm/weight")
    assert not found.of("norms")
    assert fits("a*", "ab")
