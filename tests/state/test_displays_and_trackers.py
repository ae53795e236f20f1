"""Objects that only display the computation are not training state; what the program keeps in them is."""

import io
import logging
import os

import pytest
from rich import progress
from rich.console import Console

from rearview.state.compare import compare

tqdm = pytest.importorskip("tqdm")


class Bar(tqdm.tqdm):
    """A progress bar of the program's own."""

    def __init__(self, **given):
        super().__init__(**given)
        self.best = 1.0


def quiet_tqdm():
    return tqdm.tqdm(range(10), file=io.StringIO(), mininterval=0)


class Column(progress.BarColumn):
    """A column of the program's own, as Lightning has them."""


class Live(progress.Progress):
    """A live display of the program's own."""


def quiet_rich():
    live = Live(Column(), console=Console(file=io.StringIO()))
    live.add_task("epoch", total=10)
    return live


def quiet_progressbar():
    progressbar = pytest.importorskip("progressbar")
    return progressbar.ProgressBar(max_value=10, fd=io.StringIO()).start()


def quiet_keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras.src.utils.progbar")
    return keras.Progbar(10, verbose=0)


def quiet_lightning():
    bars = pytest.importorskip("lightning.pytorch.callbacks.progress")
    return bars.RichProgressBar()


class Subclassed(logging.Handler):
    """A handler of the program's own, which keeps what the program reads again."""

    def __init__(self):
        super().__init__()
        self.worst = 0.0

    def emit(self, record):
        self.worst = max(self.worst, record.args[0])


def monitor(bar):
    bar.miniters = 7
    bar.last_print_t += 3
    bar.pos = -2
    bar._ema_dt.last = 5.0


def pass_time(bar):
    bar._last_update_timer = 5.0
    bar.previous_value = 3


def spend(bar):
    bar._start += 5.0
    bar._last_update += 5.0


def forget(bar):
    bar._metric_component = [1, 2]
    bar._reset_progress_bar_ids()
    bar.train_progress_bar_id = 4


SHOWN = {
    "tqdm": (quiet_tqdm, monitor),
    "rich": (quiet_rich, lambda live: live.columns[0].__dict__.update(_renderable_cache={1: 2})),
    "progressbar2": (quiet_progressbar, pass_time),
    "keras": (quiet_keras, spend),
    "lightning": (quiet_lightning, forget),
}


def difference(program, setup, change, *, born=False):
    run = program((lambda: {"other": 1}) if born else setup, None)
    if born:
        run.names.update(setup())
    then, buffers = run.capture()
    change(run.names)
    now, _ = run.capture()
    return compare(run.anchors, now, then.skeleton, buffers.__getitem__)


@pytest.mark.parametrize("born", [False, True], ids=["set up", "made in the loop"])
@pytest.mark.parametrize("library", sorted(SHOWN))
def test_values_that_a_display_keeps_for_itself_are_not_compared(program, library, born):
    make, change = SHOWN[library]

    def setup():
        return {"bar": make(), "weight": 1.0}

    assert difference(program, setup, lambda n: change(n["bar"]), born=born) is None

    def change_both(names):
        change(names["bar"])
        names["weight"] = 2.0

    assert difference(program, setup, change_both, born=born).path == "weight"


def test_a_dictionary_that_only_a_display_leads_to_is_no_difference(program):
    def setup():
        live = quiet_rich()
        live.columns[0]._renderable_cache = {}
        return {"live": live}

    def change(names):
        names["live"].columns[0]._renderable_cache[2] = (1.0, "text")

    assert difference(program, setup, change) is None


@pytest.mark.parametrize("born", [False, True], ids=["set up", "made in the loop"])
def test_how_far_a_bar_has_come_counts(program, born):
    def setup():
        return {"bar": quiet_tqdm()}

    found = difference(program, setup, lambda n: n["bar"].update(1), born=born)
    assert found.path == "bar.n"


class Kept:
    """An object of the program that only a display holds."""

    def __init__(self):
        self.best = 1.0


@pytest.mark.parametrize("born", [False, True], ids=["set up", "made in the loop"])
def test_values_that_the_program_keeps_in_a_display_are_compared(program, born):
    def subclass():
        return {"bar": Bar(total=3, file=io.StringIO())}

    def improve(names):
        names["bar"].best = 2.0

    assert difference(program, subclass, improve, born=born).path == "bar.best"

    def instance():
        bar = quiet_tqdm()
        bar.program_s_best = 1.0
        return {"bar": bar}

    def improve_instance(names):
        names["bar"].program_s_best = 2.0

    assert difference(program, instance, improve_instance, born=born).path == "bar.program_s_best"

    def held():
        bar = quiet_tqdm()
        bar.postfix = Kept()
        return {"bar": bar}

    def improve_held(names):
        names["bar"].postfix.best = 2.0

    assert difference(program, held, improve_held, born=born).path == "bar.postfix.best"


def test_attributes_of_the_programs_own_log_handler_are_compared(program, resumes):
    def setup():
        logger = logging.Logger("training")  # noqa: LOG001 - one of its own in each process
        logger.addHandler(Subclassed())
        return {"handler": logger.handlers[0], "logger": logger}

    def step(names, i):
        names["logger"].warning("%s", float(10 - i))
        return names["handler"].worst

    resumes(setup, step)

    def worse(names):
        names["handler"].worst = 3.0

    assert difference(program, setup, worse).path == "handler.worst"

    def lock(names):
        names["handler"].formatter = logging.Formatter("%(asctime)s")

    assert difference(program, setup, lock) is None
