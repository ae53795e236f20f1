"""Seconds that `%rv undo` takes for a namespace of about 1 GB, and what it costs while cells run.

    python benchmarks/multiversion/undo.py [KIND…]

For each kind of namespace: a cell makes it, a second cell changes all of it, `%rv undo` takes that back, and
a digest of the content shows that it is what it was.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from hashlib import sha256
from time import perf_counter

from IPython.core.interactiveshell import InteractiveShell

from rearview.notebook.undo import register, size_of

KINDS = {
    "ten arrays": (
        "import numpy as np\narrays = [np.random.default_rng(i).random(12_500_000) for i in range(10)]",
        "for each in arrays: each += 1",
    ),
    "data frames": (
        (
            "import numpy as np, pandas as pd\n"
            "rng = np.random.default_rng(0)\n"
            "numbers = pd.DataFrame(rng.random((5_000_000, 20)), columns=[f'c{i}' for i in range(20)])\n"
            "words = pd.DataFrame({'key': rng.integers(0, 1000, 2_000_000).astype(str),"
            " 'x': rng.random(2_000_000)})"
        ),
        "numbers['c3'] *= 2\nnumbers['extra'] = 1.0\nwords['x'] = 0.0\nwords.loc[0, 'key'] = 'other'",
    ),
    "model and optimizer": (
        (
            "import torch\n"
            "model = torch.nn.Sequential(*[torch.nn.Linear(2890, 2890) for _ in range(10)])\n"
            "optimizer = torch.optim.AdamW(model.parameters())\n"
            "for p in model.parameters(): p.grad = torch.ones_like(p)\n"
            "optimizer.step()\noptimizer.zero_grad()"
        ),
        "for p in model.parameters(): p.grad = torch.ones_like(p)\noptimizer.step()\noptimizer.zero_grad()",
    ),
    "Python objects": (
        (
            "import random\n"
            "random.seed(0)\n"
            "rows = [{'id': i, 'name': f'row {i}', 'values': [random.random() for _ in range(5)]}"
            " for i in range(1_500_000)]"
        ),
        "for row in rows[::1000]: row['values'].append(1)",
    ),
}


class _Contents(pickle.Pickler):
    """Pickles what tensors and data frames contain, so that equal contents give equal bytes."""

    def reducer_override(self, obj: object) -> object:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return str, (f"{obj.dtype} {obj.shape} {sha256(obj.detach().numpy()).hexdigest()}",)
        pandas = sys.modules.get("pandas")
        if pandas is not None and isinstance(obj, pandas.DataFrame):
            rows = pandas.util.hash_pandas_object(obj).to_numpy()
            return str, (f"{obj.dtypes.to_dict()} {sha256(rows).hexdigest()}",)
        return NotImplemented


def digest(shell: InteractiveShell, names: list[str]) -> str:
    """Return a hash of some variables."""
    out = io.BytesIO()
    _Contents(out, protocol=4).dump({name: shell.user_ns[name] for name in names})
    return sha256(out.getbuffer()).hexdigest()


def measure(kind: str) -> str:
    """Return a row of the table."""
    make, change = KINDS[kind]
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(history_length=0)
    shell.history_manager.enabled = False
    register(shell)

    def run(source: str) -> float:
        begun = perf_counter()
        shell.run_cell(source, store_history=True).raise_error()
        return perf_counter() - begun

    run(make)
    undo = shell.magics_manager.magics["line"]["rv"].undo
    names = [name for name in undo.variables() if name not in undo.moments[-1].references]
    before = digest(shell, names)
    changing = run(change)
    took = undo.moments[-1].seconds
    size = size_of([undo.moments[-2]])
    assert digest(shell, names) != before
    seconds = run("%rv undo")
    same = "same" if digest(shell, names) == before else "DIFFERENT"
    return (
        f"| {kind} | {size / 1e9:.2f} GB | {seconds * 1000:.0f} ms | {took:.2f} s |"
        f" {changing - took:.2f} s | {same} |"
    )


def main() -> None:
    """Print the table."""
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| namespace | size | undo | cell alone | copying for it | content |")
    print("|---|---:|---:|---:|---:|---|")
    for kind in sys.argv[1:] or KINDS:
        print(measure(kind), flush=True)


if __name__ == "__main__":
    main()
