"""Only imports that nothing of the program comes before are shared."""

import pytest

from rearview.backfill.setup_sharing import leading_imports

HARMLESS = "'''Train.'''\nfrom __future__ import annotations\nimport os, sys\nimport rearview\nRATE = 0.1\n"


def lead(text, **files):
    others = {f"{name}.py": other.encode() for name, other in files.items()}
    return leading_imports({"train.py": text.encode(), **others}, "train.py")


def test_constants_and_modules_of_python_may_come_before():
    assert lead(HARMLESS + "import torch") == ("import torch",)


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
        "import sys\nsys.path.insert(0, 'lib')",
        "import unknown_library",
        "from . import something",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
        "def f():\n    pass",
        "RATE = compute()",
        "__builtins__ = None",
        "import rearview\nrearview.log('a', 1)",
        "if True:\n    import numpy",
    ],
)
def test_anything_else_may_not(before):
    assert lead(f"{before}\nimport torch") == ()


def test_an_import_of_the_project_is_followed_and_is_the_end():
    model = "import numpy as np\nfrom torch import nn\nclass Net(nn.Module): ...\nimport pandas"
    assert lead("import model\nimport scipy", model=model) == (
        *("import numpy as np", "from torch import nn"),
    )


def test_a_file_of_the_project_is_not_the_library_of_that_name():
    assert lead("import torch", torch="x = 1") == ()
    package = {"train.py": b"import torch", "torch/__init__.py": b"import numpy\nx = 1"}
    assert leading_imports(package, "train.py") == ("import numpy",)


def test_modules_that_import_each_other_are_followed_once():
    assert lead("import a\nimport numpy", a="import b\nimport torch", b="import a") == ()


def test_a_module_begins_with_its_packages():
    files = {
        "pkg/__init__.py": b"import numpy",
        "pkg/train.py": b"import torch\nprint()\nimport scipy",
    }
    assert leading_imports(files, "pkg.train", module=True) == ("import numpy", "import torch")
    files["pkg/__init__.py"] += b"\nprint()"
    assert leading_imports(files, "pkg.train", module=True) == ("import numpy",)


def test_a_file_that_does_not_parse_shares_no_imports():
    assert lead("import torch\nfor") == ()
    assert leading_imports({}, "train.py") == ()


def test_the_lazy_import_of_torch_optimizers_is_imported_with_torch():
    text = "import torch\nfrom torch.optim import SGD"
    assert lead(text) == (*text.splitlines(), "import torch._dynamo")


@pytest.mark.parametrize(
    "word", ["os.environ['TORCH_LOGS'] = '+all'", "torch.set_default_dtype(d)"]
)
def test_a_library_that_the_program_may_import_otherwise_is_not_imported_ahead(word):
    assert lead(f"import torch\nimport torch.optim\n{word}") == (
        "import torch",
        "import torch.optim",
    )
    assert lead("import torch\nimport model\n", model=f"from torch import optim\n{word}") == (
        *("import torch", "from torch import optim"),
    )
