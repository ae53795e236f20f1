"""Real families of notebook versions: one by one in fresh kernels against one tree.

    python benchmarks/multiversion/families.py [family …]

Each family is written to a temporary folder, executed one by one with nbclient (which also records the
author's outputs), then replayed by our engine, first without and then with measured costs.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from rearview.multiversion.execution_tree import Measurements
from rearview.multiversion.replay_study import ReplayOptions, plan_study, replay_study
from rearview.multiversion.study import study_from_files

SKLEARN = [
    "import numpy as np\nimport pandas as pd\nfrom sklearn.decomposition import PCA\n"
    "from sklearn.preprocessing import PolynomialFeatures, StandardScaler",
    "rng = np.random.default_rng(0)\nX = rng.normal(size=(12000, 30))\n"
    "y = (X[:, :5].sum(1) + 0.3 * rng.normal(size=len(X)) > 0).astype(int)",
    "poly = PolynomialFeatures(2, include_bias=False).fit_transform(X)\n"
    "scaled = StandardScaler().fit_transform(poly)\nscaled.shape",
    "Z = PCA(60, svd_solver='full').fit_transform(scaled)\n"
    "pd.DataFrame(Z[:, :4]).describe().round(4)",
    "train, test = np.arange(len(Z)) % 5 != 0, np.arange(len(Z)) % 5 == 0",
]
MODELS = [
    *(f"from sklearn.linear_model import LogisticRegression\nmodel = LogisticRegression(C={c})" for c in (0.01, 0.1, 1, 10)),
    *(f"from sklearn.tree import DecisionTreeClassifier\nmodel = DecisionTreeClassifier(max_depth={d}, random_state=0)" for d in (3, 6)),
    "from sklearn.naive_bayes import GaussianNB\nmodel = GaussianNB()",
    "from sklearn.neighbors import KNeighborsClassifier\nmodel = KNeighborsClassifier(5)",
]  # fmt: skip
SCORE = "model.fit(Z[train], y[train])\nprint(round(model.score(Z[test], y[test]), 4))"

TORCH = [
    "import torch\nfrom torch import nn",
    "torch.manual_seed(0)\nX = torch.randn(4000, 64)\ny = (X[:, :8].sum(1) > 0).long()",
    "model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))\n"
    "opt = torch.optim.Adam(model.parameters(), 1e-3)",
    "for epoch in range(12):\n    for i in range(0, 4000, 100):\n"
    "        loss = nn.functional.cross_entropy(model(X[i:i+100]), y[i:i+100])\n"
    "        opt.zero_grad(); loss.backward(); opt.step()\nprint(round(loss.item(), 5))",
]
TUNE = (
    "for group in opt.param_groups: group['lr'] = {lr}\nfor epoch in range({epochs}):\n"
    "    for i in range(0, 4000, 100):\n"
    "        loss = nn.functional.cross_entropy(model(X[i:i+100]), y[i:i+100])\n"
    "        opt.zero_grad(); loss.backward(); opt.step()\nprint(round(loss.item(), 5))"
)

SIMULATION = [
    "import numpy as np\nimport matplotlib.pyplot as plt",
    "n = 220\ngrid = np.zeros((n, n))\ngrid[n // 3 : n // 2, n // 3 : n // 2] = 1.0",
    "def step(u, d):\n    return u + d * (np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1) - 4 * u)",
    "for _ in range(2500):\n    grid = step(grid, 0.2)\nprint(grid.max().round(8))",
]
BRANCH = (
    "run = grid.copy()\nfor t in range(400):\n    run = step(run, {d})\n    run[0, :] = {edge}\n"
    "print(run.mean().round(8))",
    "plt.imshow(run); plt.colorbar(); plt.show()",
)

ANALYSIS = [
    "import numpy as np\nimport pandas as pd\nimport matplotlib.pyplot as plt",
    "rng = np.random.default_rng(1)\nframe = pd.DataFrame({'key': rng.integers(0, 5000, 1_500_000), "
    "'day': rng.integers(0, 365, 1_500_000), 'value': rng.normal(size=1_500_000)})",
    "table = frame.groupby(['key', 'day'])['value'].agg(['mean', 'count']).reset_index()\nlen(table)",
    "wide = table.pivot_table(index='key', columns='day', values='mean').fillna(0.0)\nwide.shape",
]
VIEWS = [
    "wide.mean().rolling({w}).mean().plot(); plt.show()",
    "print(wide.iloc[:, :{w}].std().round(4).describe())",
]

FAMILIES = {
    "preprocessing": [[*SKLEARN, model, SCORE] for model in MODELS],
    "training": [
        [*TORCH, TUNE.format(lr=lr, epochs=epochs)]
        for lr in (1e-3, 3e-4, 1e-4, 3e-5)
        for epochs in (2, 3)
    ],
    "simulation": [
        [*SIMULATION, BRANCH[0].format(d=d, edge=edge), BRANCH[1]]
        for d in (0.05, 0.1, 0.15, 0.2)
        for edge in (0.0, 1.0)
    ],
    "analysis": [[*ANALYSIS, view.format(w=w)] for view in VIEWS for w in (3, 7, 14, 30)],
}


def write_notebook(file, cells):
    book = new_notebook(cells=[new_code_cell(text) for text in cells])
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    book.metadata["kernelspec"] = kernel
    nbformat.write(book, file)


def one_by_one(files):
    begin = time.perf_counter()
    for file in files:
        book = nbformat.read(file, as_version=4)
        nbclient.NotebookClient(book, kernel_name="python3", timeout=600).execute()
        nbformat.write(book, file)
    return time.perf_counter() - begin


def as_tree(files, known, **options):
    begin = time.perf_counter()
    study, chosen = study_from_files(files), ReplayOptions(**options)
    plan = plan_study(study, chosen, known)
    programs = {v.name: f.read_bytes() for v, f in zip(study.versions, files, strict=True)}
    report = replay_study(plan, chosen, known, programs=programs, environment=os.environ)
    return time.perf_counter() - begin, report


def main():
    names = sys.argv[1:] or list(FAMILIES)
    print(
        "| family | versions | one by one, s | tree, s | saved | tree with 2 workers, s | saved | cells computed | peak | verdicts |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for i, cells in enumerate(FAMILIES[name]):
                files.append(Path(folder) / f"v{i}.ipynb")
                write_notebook(files[-1], cells)
            alone = one_by_one(files)
            known = Measurements()
            first, report = as_tree(files, known)
            two, _ = as_tree(files, known, workers=2)
            verdicts = [cell.verdict.match.value for v in report.versions for cell in v.cells]
            told = ", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts)))
            print(
                f"| {name} | {len(files)} | {alone:.1f} | {first:.1f} | {1 - first / alone:.0%} | "
                f"{two:.1f} | {1 - two / alone:.0%} | {report.result.computed} of "
                f"{report.tree.cells_in_all} | {report.result.peak / 1e6:.0f} MB | {told} |",
                flush=True,
            )
            for note in report.result.notes:
                print(f"  note: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
