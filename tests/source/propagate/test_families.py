"""Families of changes around a statement, each as the smallest pair of texts that shows it."""

from textwrap import dedent

import pytest

from rearview.source.propagate.carry_statement import carry


def carried(new, old, marker="LOG", **options):
    """Return the old text with the statement that stands on the marked line, or the refusal."""
    new, old = dedent(new), dedent(old)
    line = next(at for at, text in enumerate(new.split("\n"), 1) if marker in text)
    found = carry(new, (line, line), old, **options)
    return found.into(old) if found.line is not None else f"refused: {found.reason}"


def test_a_method_of_a_renamed_class_is_found_by_its_name():
    new = """
        class Other:
            def metrics(self):
                found = {}
                return found
        class Agent:
            def metrics(self):
                found = super().metrics()
                log(found)  # LOG
                return found
            def run(self):
                for step in self.steps():
                    self.train(step)
                return self.result()
    """
    old = """
        class Other:
            def metrics(self):
                found = {}
                return found
        class Trainer:
            def metrics(self):
                found = super(Trainer, self).metrics()
                return found
            def run(self):
                for step in self.steps():
                    self.train(step)
                return self.result()
    """
    assert "super(Trainer, self).metrics()\n        log(found)  # LOG\n" in carried(new, old)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("_logger = logging.getLogger('x')", ""),
        ("_logger = logging.getLogger('x')", "logging.info('start')"),
        ("_logger = make()", "log = make()\nlog.warning('start')"),
    ],
)
def test_a_logger_of_another_name_is_the_one_that_the_old_text_logs_with(now, then):
    new = f"import logging\n{now}\nfor x in data:\n    y = f(x)\n    _logger.info(y)  # LOG\n    g(y)\n"
    old = f"import logging\n{then}\nfor x in data:\n    y = f(x)\n    g(y)\n"
    name = "log" if "log =" in then else "logging"
    assert f"    y = f(x)\n    {name}.info(y)  # LOG\n    g(y)\n" in carried(new, old)


def test_a_call_of_a_printing_function_matches_an_earlier_call_of_print():
    new = """
        def print0(text):
            if rank == 0:
                print(text)
        loss = f()
        print0(loss)  # LOG
        done(loss)
    """
    old = "print(1)\nprint(2)\nloss = f()\ndone(loss)\n"
    assert carried(new, old) == "print(1)\nprint(2)\nloss = f()\nprint(loss)  # LOG\ndone(loss)\n"


def test_a_keyword_follows_the_parameter_that_was_renamed():
    new = """
        def note(text, console=False, log=True):
            write(text, console, log)
        x = f()
        note(x, log=False)  # LOG
        g(x)
    """
    old = """
        def note(text, console=False, logfile=True):
            write(text, console, logfile)
        x = f()
        g(x)
    """
    assert "note(x, logfile=False)  # LOG\n" in carried(new, old)


def test_a_longer_name_is_matched_with_the_shorter_name_of_the_old_text():
    new = "def f(tensorboard_writer, x):\n    y = h(x)\n    tensorboard_writer.add(y)  # LOG\n    return g(y, 2)\n"
    old = "def f(x):\n    writer = make()\n    y = h(x)\n    return g(y, 2)\n"
    assert "    writer.add(y)  # LOG\n    return" in carried(new, old)


def test_a_visible_name_is_kept_where_only_its_definition_speaks_for_another():
    new = "for kind, number in table:\n    ids = nodes.get(kind)\n    keep(ids + offset[number])  # LOG\n    done(kind)\n"
    old = "for kind, ids in nodes:\n    number = table.get(kind)\n    done(kind)\n"
    assert "keep(ids + offset[number])" in carried(new, old)


def test_a_value_is_read_before_another_statement_sets_it_again():
    new = """
        for _ in range(n):
            epoch += 1
            begun = clock()
            collect(epoch, 1)
            took(clock() - begun)
            begun = clock()
            train_epoch(epoch)
            log(clock() - begun)  # LOG
            save(epoch, 3)
    """
    old = """
        for _ in range(n):
            epoch += 1
            begun = clock()
            train_epoch(epoch)
            begun = clock()
            collect(epoch, 1)
            took(clock() - begun)
            save(epoch, 3)
    """
    assert "train_epoch(epoch)\n    log(clock() - begun)  # LOG\n    begun" in carried(new, old)


def test_a_statement_stays_behind_one_that_stood_before_it_in_both_texts():
    new = """
        low = gather(mean(a))
        metrics["low_mean"].append(mean_of(a))
        clip = gather(part(a))
        metrics["low_min"].append(smallest(clip))  # LOG
        high = gather(part(b))
        metrics["high_max"].append(largest(high))
    """
    old = """
        low = gather(mean(a))
        clip = gather(low)
        metrics["low_mean"].append(average(clip))
        high = gather(part(b))
        metrics["high_max"].append(largest(high))
    """
    assert 'append(average(clip))\nmetrics["low_min"].append(smallest' in carried(new, old)


def test_loop_and_with_that_changed_places_keep_the_statement_at_the_one_below():
    new = """
        with guard():
            for k in range(n):
                y = make(k, 2)
            print(decode(y))  # LOG
            print('-----')
    """
    old = """
        for k in range(n):
            with guard():
                y = make(k, 2)
            print('-----')
    """
    assert "    print(decode(y))  # LOG\n    print('-----')\n" in carried(new, old)


def test_both_neighbours_in_a_branch_take_the_statement_into_it():
    new = """
        def train(args):
            models = []
            if args.checkpointing:
                unet.enable_checkpointing()
            models.append(unet)  # LOG
            if args.train_text:
                models.append(text)
            finish(models, 1)
    """
    old = """
        def train(args):
            models = []
            if tuning:
                if args.checkpointing:
                    unet.enable_checkpointing()
                if args.train_text:
                    models.append(text)
            finish(models, 1)
    """
    assert "        models.append(unet)  # LOG\n        if args.train_text" in carried(new, old)


def test_a_statement_follows_into_the_only_branch_that_sets_its_variables():
    new = (
        "for n in names:\n    place = join(n)\n    paths = read(place)\n    keep(n, paths)  # LOG\n"
    )
    old = "for n in names:\n    place = join(n)\n    if exists(place):\n        paths = listed(place)\n"
    assert old + "        keep(n, paths)  # LOG\n" == carried(new, old)


def test_a_comment_that_occurs_once_in_both_texts_marks_the_place():
    new = "first(1, 2)\n# prepare the accelerator\nprint('ready')  # LOG\nwholly(new, code)\nlast(1, 2)\n"
    old = "first(1, 2)\nother = 3\nmore(other)\n# prepare the accelerator\nquite = different\nlast(1, 2)\n"
    assert "# prepare the accelerator\nprint('ready')  # LOG\nquite" in carried(new, old)


def test_code_that_was_copied_later_takes_the_statement_at_the_original():
    loop = "    for k in range(steps):\n        X = batch('train')\n        loss = model(X)\n        step(loss)\n"
    new = f"if profile:\n{loop}        print(k, loss)  # LOG\n        note(k)\nelse:\n{loop}        quiet(k)\n"
    old = "for k in range(steps):\n    X = batch('train')\n    loss = model(X)\n    step(loss)\n    quiet(k)\n"
    assert "    step(loss)\n    print(k, loss)  # LOG\n" in carried(new, old)


def test_a_rewritten_gap_is_split_by_the_statements_on_either_side():
    new = """
        def load(self):
            start = timer()
            synthesizer.load_model(checkpoint_dir)
            log(timer() - start)  # LOG
            self.show_window(0)
    """
    old = """
        def load(self):
            start = timer()
            synth = Synthesizer()
            synth.load(checkpoint, model)
            self.window(0)
    """
    assert "synth.load(checkpoint, model)\n    log(timer() - start)  # LOG\n" in carried(new, old)


def test_a_statement_that_the_text_already_has_is_not_inserted_twice():
    new = "def f(x):\n    y = g(x, 1)\n    log(y)  # LOG\n    return y\n"
    old = "def f(x):\n    y = g(x, 1)\n    log(y)  # LOG\n    return y\n"
    assert carried(new, old) == "refused: the same statement is there already, on line 3"


NEW = """
    for epoch in range(4):
        prepare(epoch)
        work(box, epoch)
        log(box.score)  # LOG
        finish(epoch)
        close(epoch)
"""
OLD = """
    for epoch in range(4):
        prepare(epoch)
        finish(epoch)
        close(epoch)
        work(box, epoch)
"""


def test_a_disproved_place_gives_way_to_the_next_likely_one():
    first = carried(NEW, OLD, min_confidence=0.5)
    assert "prepare(epoch)\n    log(box.score)" in first
    second = carried(NEW, OLD, min_confidence=0.5, disproved={4: "it raised AttributeError"})
    assert "work(box, epoch)\n    log(box.score)" in second


def test_without_another_place_the_refusal_says_why_the_last_place_failed():
    why = "before line 4 of train.py it raised AttributeError: no score"
    wrong = dict.fromkeys(range(1, 9), why)
    text = carried(NEW, OLD, min_confidence=0.5, disproved=wrong)
    assert text == f"refused: {why}; no other place is certain"
