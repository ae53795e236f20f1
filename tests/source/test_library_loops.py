"""Training loops inside libraries, found by the calls that start them."""

import ast
from textwrap import dedent

import pytest

from rearview.source.inspection import inspect
from rearview.source.library_loops import LIBRARIES, LOOPS, library_calls

NOTHING = []


def calls(text):
    found = library_calls({"t.py": ast.parse(dedent(text))})
    return [(call.library, call.call) for call in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import lightning as L\nt = L.Trainer()\nt.fit(m)", [("Lightning", "t.fit")]),
        (
            "from pytorch_lightning import Trainer\nTrainer(max_epochs=3).fit(m)",
            [("Lightning", "fit")],
        ),
        (
            "from lightning import Trainer\ndef go(trainer: Trainer):\n    trainer.fit(m)",
            [("Lightning", "trainer.fit")],
        ),
        (
            "from transformers import Seq2SeqTrainer\nt = Seq2SeqTrainer()\nt.train()",
            [("Hugging Face Trainer", "t.train")],
        ),
        (
            "import transformers\nclass Mine(transformers.Trainer): pass\nt = Mine()\nt.train()",
            [("Hugging Face Trainer", "t.train")],
        ),
        ("import keras\nm = keras.Sequential([])\nm.fit(x)", [("Keras", "m.fit")]),
        (
            "from tensorflow import keras\nclass GAN(keras.Model): pass\ng = GAN()\ng.fit(x)",
            [("Keras", "g.fit")],
        ),
        ("import keras\nmodel = make()\nmodel.fit(x)", [("Keras", "model.fit")]),
        ("import xgboost as xgb\nxgb.train({}, d)", [("XGBoost", "xgb.train")]),
        (
            "from xgboost import XGBClassifier\nXGBClassifier().fit(x, y)",
            [("XGBoost", "fit")],
        ),
        ("import lightgbm as lgb\nlgb.train({}, d)", [("LightGBM", "lgb.train")]),
        ("import optuna\ns = optuna.create_study()\ns.optimize(f)", [("Optuna", "s.optimize")]),
        (
            "from sklearn.neural_network import MLPClassifier\nc = MLPClassifier()\nc.fit(x, y)",
            [("scikit-learn", "c.fit")],
        ),
        # not watched, but it trains
        ("from sklearn.svm import SVC\nc = SVC()\nc.fit(x, y)", [("sklearn", "c.fit")]),
        ("from fastai.vision.all import Learner\nl = Learner()\nl.fit(3)", [("fastai", "l.fit")]),
        # no training, or not the library's
        ("import torch\nm = torch.nn.Linear(1, 1)\nm.train()", NOTHING),
        (
            "from transformers import AutoModel\nm = AutoModel.from_pretrained('x')\nm.train()",
            NOTHING,
        ),
        (
            "import lightning\nclass Own:\n    def fit(self): pass\ntrainer = Own()\ntrainer.fit()",
            NOTHING,
        ),
        ("import keras\nscaler = make()\nscaler.fit(x)", NOTHING),
        ("trainer.fit(m)", NOTHING),
    ],
)
def test_calls_that_train_inside_a_library_are_found_by_what_made_the_object(text, expected):
    assert calls(text) == expected


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_points_of_a_library_are_names_of_loops_that_are_watched(library):
    names = {
        name
        for module, functions in LOOPS.items()
        if module.split(".")[0] in library.roots
        for loops in functions.values()
        for name in (loops.values() if isinstance(loops, dict) else loops)
    }
    assert set(library.point) <= names, "inspect would promise points that a run does not have"


def test_every_library_whose_loops_are_watched_is_known():
    roots = {root for library in LIBRARIES for root in library.roots}
    assert {module.split(".")[0] for module in LOOPS} <= roots


def look(text):
    return inspect("t.py", {"t.py": dedent(text)})


KERAS = "import keras\nmodel = keras.Sequential([])\n"


def test_a_call_into_a_library_trains_rather_than_a_loop_that_does_not():
    found = look(f"{KERAS}for name in names:\n    print(name)\nmodel.fit(x)")
    assert found.main is None
    assert (found.training_call.call, found.point) == ("model.fit", ("epoch", "step"))


def test_a_loop_around_a_call_into_a_library_is_the_main_loop():
    found = look(f"{KERAS}for fold in folds:\n    model.fit(x)")
    assert found.main.id.name == "fold"
    assert found.point == ("fold", "epoch", "step")


def test_a_training_loop_of_the_program_wins_over_a_library_that_fits_something_else():
    text = "from sklearn.neural_network import MLPClassifier\nMLPClassifier().fit(x, y)\n"
    found = look(f"{text}for epoch in r:\n    loss.backward()\n    opt.step()")
    assert (found.main.id.name, found.training_call) == ("epoch", None)


def test_a_trial_of_a_study_is_around_the_loops_of_its_objective():
    text = "import optuna\ndef objective(trial):\n    for epoch in r:\n        opt.step()\n"
    found = look(f"{text}study = optuna.create_study()\nstudy.optimize(objective)")
    assert found.point == ("trial",)


def test_hooks_that_the_library_calls_are_places_for_a_log_statement():
    text = """
        import lightning as L
        class Net(L.LightningModule):
            def training_step(self, batch):
                loss = self(batch)
                return loss
        L.Trainer().fit(Net())
    """
    hook, after = look(text).places
    assert (hook.after, hook.reads, after.after) == (5, ("loss",), 7)


def test_a_library_that_is_not_watched_is_named_as_the_reason():
    found = look("from fastai.vision.all import Learner\nlearn = Learner()\nlearn.fit(3)")
    assert found.answer.value == "whole"
    assert "fastai" in found.reasons[0]
