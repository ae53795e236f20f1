"""A refusal names the line that is at fault, says what it was, and never blames an innocent one."""

import pytest

from rearview.source.probes.find import check

TRAIN = """\
import torch
from torch import nn

LR = 0.1

def evaluate(net, data):
    with torch.no_grad():
        return sum(net(x).mean().item() for x in data)

net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=LR)
history = []
data = [torch.randn(8, 4) for _ in range(5)]
for epoch in range(3):
    net.train()
    for step, x in enumerate(data):
        loss = net(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    history.append(loss.item())
    print(epoch, loss.item())
"""
LOG = ("    history.append", "    rearview.log('n', net.weight.norm().item())\n    history.append")


def edit(*changes):
    text = TRAIN
    for before, after in (*changes, LOG):
        assert before in text
        text = text.replace(before, after, 1)
    return "import rearview\n" + text


CHANGED = {
    "a hyperparameter": ([("LR = 0.1", "LR = 0.2")], "LR = 0.2", "`0.2` where `0.1` was"),
    "an expression": (
        [("net(x).mean()\n", "net(x).sum()\n")],
        "net(x).sum()",
        "replaces the recorded",
    ),
    "the head of a loop": ([("range(3)", "range(4)")], "range(4)", "`4` where `3` was"),
    "a signature": ([("net, data):", "net, data, k=1):")], "def evaluate", "replaces the recorded"),
    "a print": (
        [("print(epoch, ", "print(epoch, LR, ")],
        "print(epoch, LR",
        "in a separate statement",
    ),
    "a variable's name": (
        [
            ("        loss = ", "        cost = "),
            ("loss.backward", "cost.backward"),
            ("loss.item", "cost.item"),
            ("loss.item", "cost.item"),
        ],
        "cost = ",
        "`cost` where `loss` was",
    ),
    "a line that is gone": (
        [("        optimizer.zero_grad()\n", "")],
        "loss.backward()",
        "is gone",
    ),
    "a line with a log call instead": (
        [("        optimizer.zero_grad()\n", "        rearview.log('a', 1)\n")],
        "rearview.log('a', 1)",
        "`optimizer.zero_grad()`: this recorded statement (line 18 of the version) is gone",
    ),
    "the order": (
        [
            ("        optimizer.zero_grad()\n", ""),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n        optimizer.zero_grad()\n",
            ),
        ],
        "optimizer.zero_grad()",
        "is at another place now",
    ),
    "when it runs": (
        [("        loss.backward()\n", "        if epoch:\n            loss.backward()\n")],
        "            loss.backward()",
        "was put inside `if epoch:`",
    ),
    "how it runs": (
        [
            (
                "        loss = net(x).mean()\n",
                "        with torch.autocast('cpu'):\n            loss = net(x).mean()\n",
            )
        ],
        "            loss = ",
        "was put inside `with torch.autocast('cpu'):`",
    ),
    "early leaving": (
        [
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n        if step:\n            break\n",
            )
        ],
        "break",
        "--at",
    ),
    "the model's mode": (
        [("    history", "    net.eval()\n    history")],
        "net.eval()",
        "deepcopy",
    ),
}


@pytest.mark.parametrize(("changes", "line", "why"), CHANGED.values(), ids=list(CHANGED))
def test_blamed_is(changes, line, why):
    text = edit(*changes)
    _, refusals = check({"t.py": TRAIN}, {"t.py": text})
    assert line in text.splitlines()[refusals[0].line - 1]
    assert why in str(refusals[0])
    assert all(refusal.line > 1 for refusal in refusals)  # not `import rearview`
    assert all("rearview.log('n'" not in refusal.code for refusal in refusals)


def test_a_long_statement_is_shown_by_its_changed_part():
    old = f"run({', '.join(f'argument_{i}={i}' for i in range(20))}, last=1)\n"
    _, refusals = check({"t.py": old}, {"t.py": old.replace("last=1", "last=2")})
    assert "`2` where `1` was" in refusals[0].why


def test_probes_inside_a_loop_whose_head_changed_are_still_found():
    found, refusals = check({"t.py": TRAIN}, {"t.py": edit(("range(3)", "range(4)"))})
    assert found.names == ("n",)
    assert len(refusals) == 1


NATURAL = {
    "in a helper": (
        "    with torch.no_grad():\n",
        "    rearview.log('v', 1)\n    with torch.no_grad():\n",
    ),
    "in a with": ("        return sum", "        rearview.log('v', 1)\n        return sum"),
    "now and then": (
        "    history",
        "    if epoch % 5 == 0:\n        rearview.log('v', 1)\n    history",
    ),
    "by a function of its own": (
        "    history",
        "    def v(m):\n        return m.weight.norm()\n    rearview.log('v', v(net))\n    history",
    ),
    "by an import of its own": (
        "    history",
        "    import math\n    rearview.log('v', math.pi)\n    history",
    ),
    "in a comprehension": (
        "    history",
        "    [rearview.log('v', p.norm()) for p in net.parameters()]\n    history",
    ),
    "under no_grad": (
        "    history",
        "    with torch.no_grad():\n        rearview.log('v', net(x).mean())\n    history",
    ),
    "in an f-string": ("    history", "    rearview.log('v', f'{loss.item():.3f}')\n    history"),
}


@pytest.mark.parametrize("change", NATURAL.values(), ids=list(NATURAL))
def test_accepted_is_a_probe(change):
    found, refusals = check({"t.py": TRAIN}, {"t.py": edit(change)})
    assert not refusals
    assert "v" in found.names
