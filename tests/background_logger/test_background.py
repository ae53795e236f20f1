"""Calls to a background writer return at once, arrive complete and in order, and fail loudly."""

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import rearview
from loggers import Lines, Plain, make_lines
from rearview.errors import UsageError

TESTS = Path(__file__).parent.parent


def lines(file):
    return Path(file).read_text().splitlines()


def run(code, *args, **options):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def gone(pid):
    """Wait until a process is gone: the kernel tells when."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    import select

    found = select.select([fd], [], [], 20)[0]
    os.close(fd)
    return bool(found)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "lines"


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_calls_arrive_in_order_from_another_process(file, start):
    with rearview.background(Lines, file, background_start=start) as writer:
        for step in range(1000):
            writer.add("loss", step / 2, step=step)
        assert writer.get_pid() != os.getpid()
    assert lines(file) == [f"loss {step / 2} {step}" for step in range(1000)]


def test_arguments_are_copied_when_the_call_is_made(file):
    writer = rearview.background(Lines, file)
    tensor, array, numbers = torch.zeros(3), np.zeros(3), [0.0, 0.0]
    part = torch.arange(12.0).reshape(3, 4).t()
    writer.keep(tensor)
    writer.keep(array)
    writer.keep(np.array(numbers))
    writer.keep(part)
    writer.keep(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))
    tensor += 1
    array += 1
    numbers[0] = 5
    expected = part.tolist()
    part += 1
    assert writer.get_kept() == [[0, 0, 0], [0, 0, 0], [0, 0], expected, [1, 1]]
    assert writer.get_types()[0] == "torch.Tensor"
    assert writer.get_types()[1] == "numpy.ndarray"
    writer.close()


def test_arguments_that_a_writer_keeps_do_not_change(file):
    writer = rearview.background(Lines, file, background_memory=1 << 20)
    for number in range(40):  # many times the memory that calls may take
        writer.keep(np.full(20_000, float(number)))
    assert writer.get_ends() == [(float(n), float(n)) for n in range(40)]
    writer.close()


def test_a_call_larger_than_the_memory_is_sent_and_its_memory_is_freed(file):
    writer = rearview.background(Lines, file, background_memory=1 << 20)
    writer.add("before", 1)
    big = np.arange(1_000_000)
    writer.keep(big)
    writer.keep(big + 1)
    writer.add("after", 2)
    assert writer.get_ends() == [(0, 999_999), (1, 1_000_000)]
    fd = writer._rearview_channel.ring.fd
    assert os.fstat(fd).st_blocks * 512 < 2 << 20
    writer.close()
    assert lines(file) == ["before 1 None", "after 2 None"]


def test_memory_stays_bounded_under_a_writer_that_is_too_slow(file, tmp_path):
    """The writer waits for a file; calls wait for the writer."""
    go = tmp_path / "go"
    bound = 1 << 20
    writer = rearview.background(Lines, file, str(go), background_memory=bound)
    channel = writer._rearview_channel
    done = threading.Event()

    def log():
        for step in range(60):
            writer.add("x" * 100_000, 0.5, step)
        done.set()

    thread = threading.Thread(target=log)
    thread.start()
    while not os.fstat(channel.ring.fd).st_blocks * 512 > bound / 2:
        time.sleep(0.01)
    assert not done.is_set()
    assert os.fstat(channel.ring.fd).st_blocks * 512 <= bound + 4096
    go.touch()
    thread.join()
    writer.close()
    assert channel.waited > 0
    assert [line.rpartition(" ")[2] for line in lines(file)] == [str(n) for n in range(60)]


def test_threads_may_log_through_one_writer(file):
    writer = rearview.background(Lines, file)

    def log(name):
        for step in range(2000):
            writer.add(name, 0, step)

    threads = [threading.Thread(target=log, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    found = [line.split() for line in lines(file)]
    for name in "abc":
        assert [int(step) for who, _, step in found if who == name] == list(range(2000))


def test_threads_may_make_the_first_call_of_a_method_at_once(tmp_path):
    """Python changes threads between any two steps here, also while a method gets its number."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(5):
            file = tmp_path / str(attempt)
            writer = rearview.background(Lines, file)
            at_once = threading.Barrier(4)
            answers, problems = [], []

            def log(name, writer=writer, at_once=at_once, answers=answers, problems=problems):
                try:
                    at_once.wait()
                    for step in range(50):
                        writer.add(name, 0, step)
                        writer.flush()
                        answers.append(writer.get_pid())
                except Exception as problem:
                    problems.append(problem)

            threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            writer.close()
            assert not problems
            assert len(answers) == 200
            assert len(set(answers)) == 1
            calls = [line.split() for line in lines(file)]
            for name in "abcd":
                assert [int(step) for who, _, step in calls if who == name] == list(range(50))
    finally:
        sys.setswitchinterval(interval)


def test_an_exception_of_the_writer_is_raised_later_with_its_traceback(file):
    writer = rearview.background(Lines, file)
    writer.fail("no such tag")
    writer.add("later", 1)
    with pytest.raises(ValueError, match="no such tag") as caught:
        writer.flush()
    note = "".join(caught.value.__notes__)
    assert "fail('no such tag')" in note
    assert "loggers.py" in note
    assert "in fail" in note
    writer.add("goes on", 2)
    writer.close()
    assert lines(file) == ["later 1 None", "goes on 2 None"]


def test_an_exception_surfaces_at_a_next_call_too(file):
    writer = rearview.background(Lines, file)
    writer.fail("first")
    with pytest.raises(ValueError, match="first"):  # noqa: PT012 - some next call
        while True:
            writer.add("loss", 1.0, 1)
    writer.close()


def test_an_exception_that_cannot_be_pickled_is_reported_by_its_text(file):
    writer = rearview.background(Lines, file)
    writer.fail_oddly()
    with pytest.raises(rearview.errors.RearviewError, match="cannot be pickled") as caught:
        writer.close()
    assert caught.value.slug == "background-writer"


def test_a_writer_that_cannot_be_made_says_so_once(tmp_path):
    writer = rearview.background(Lines, tmp_path / "no" / "folder")
    with pytest.raises(FileNotFoundError):
        writer.flush()
    with pytest.raises(FileNotFoundError):
        writer.flush()
    writer.close()


def test_the_program_continues_with_one_warning_if_the_writer_process_dies(file):
    writer = rearview.background(Lines, file)
    writer.add("before", 1)
    writer.flush()
    writer.die()
    with pytest.warns(RuntimeWarning, match="background-dead"):
        writer.flush()
    for step in range(1000):
        writer.add("after", 1, step)  # warnings are errors here
    writer.flush()
    writer.close()
    assert lines(file) == ["before 1 None"]


def test_a_closed_writer_refuses_calls(file):
    writer = rearview.background(Lines, file)
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="was closed"):
        writer.add("late", 1)


def test_attributes_and_items_reach_the_writer_in_order(file):
    writer = rearview.background(make_lines, file)  # a function: its class is not known here
    assert writer.count == 0
    writer.add("x", 1)
    assert writer.count == 1
    writer.count = 10
    assert writer.count == 10
    writer.table["best"] = 0.5
    assert writer.table["best"] == 0.5
    assert list(writer.table) == ["best"]
    assert "best" in writer.table
    assert len(writer.table) == 1
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = writer.nothing_of_the_kind
    writer.close()


def test_an_argument_that_cannot_be_copied_is_refused_at_the_call(file):
    writer = rearview.background(Lines, file)
    with pytest.raises(UsageError, match="An argument of add cannot be copied"):
        writer.add("generator", (n for n in range(3)))
    writer.add("fine", 1)
    writer.close()
    assert lines(file) == ["fine 1 None"]


def test_no_random_number_is_drawn_and_no_signal_is_taken(file):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)]
    with rearview.background(Lines, file) as writer:
        writer.keep(np.zeros(3))
        writer.flush()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGCHLD)] == handlers


def test_the_program_has_no_child_to_wait_for_and_none_is_left(file):
    with rearview.background(Lines, file) as writer:
        pid = writer.get_pid()
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    assert gone(pid)


def test_a_writer_that_is_forgotten_makes_its_calls_and_ends(file):
    writer = rearview.background(Lines, file)
    pid = writer.get_pid()
    for step in range(100):
        writer.add("loss", 1, step)
    del writer
    assert gone(pid)
    assert len(lines(file)) == 100


def test_the_end_of_a_program_loses_nothing(file):
    process = run(
        """
        import sys, rearview
        from loggers import Lines
        writer = rearview.background(Lines, sys.argv[1])
        for step in range(3000):
            writer.add("loss", 0.5, step)
        """,
        file,
    )
    assert process.communicate() == ("", "")
    assert process.returncode == 0
    assert len(lines(file)) == 3000


def test_an_error_at_the_end_of_a_program_is_reported(file):
    process = run(
        """
        import sys, rearview
        from loggers import Lines
        rearview.background(Lines, sys.argv[1]).add(1)
        writer = rearview.background(Lines, sys.argv[1])
        writer.fail("too late to raise")
        """,
        file,
    )
    _, err = process.communicate()
    assert process.returncode == 0
    assert "too late to raise" in err


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(4)", "raise SystemExit(4)"])
def test_calls_that_returned_survive_however_the_program_ends(file, end):
    process = run(
        f"""
        import os, sys, rearview
        from loggers import Lines
        writer = rearview.background(Lines, sys.argv[1])
        print(writer.get_pid(), flush=True)
        for step in range(500):
            writer.add("loss", 0.5, step)
        {end}
        """,
        file,
    )
    out, _ = process.communicate()
    assert process.returncode in {-9, 4}
    assert gone(int(out))
    assert len(lines(file)) == 500


def test_ctrl_c_ends_the_program_and_the_writer_still_makes_its_calls(file, tmp_path):
    """The terminal sends SIGINT to both processes; the writer leaves it to the program."""
    go = tmp_path / "go"
    process = run(
        """
        import sys, rearview, signal
        from loggers import Lines
        writer = rearview.background(Lines, sys.argv[1], sys.argv[2])
        print(writer.get_pid(), flush=True)
        for step in range(100):
            writer.add("loss", 0.5, step)
        print("logged", flush=True)
        while True:
            signal.pause()
        """,
        file,
        go,
        start_new_session=True,
    )
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "logged\n"
    os.killpg(process.pid, signal.SIGINT)  # the program now waits for the writer as it ends …
    go.touch()
    _, err = process.communicate()
    assert "KeyboardInterrupt" in err
    assert gone(pid)
    assert len(lines(file)) == 100


def test_a_forked_child_leaves_the_writer_to_its_parent(file):
    process = run(
        """
        import os, sys, rearview, warnings
        from loggers import Lines
        writer = rearview.background(Lines, sys.argv[1])
        writer.add("parent", 1)
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for step in range(3):
                    writer.add("child", step)
            sys.exit(len(told))  # runs exit handlers, unlike os._exit
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        writer.add("parent", 2)
        writer.close()
        """,
        file,
    )
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert lines(file) == ["parent 1 None", "parent 2 None"]


def test_children_of_multiprocessing_can_make_their_own_writers(tmp_path):
    process = run(
        """
        import multiprocessing, sys, rearview
        from loggers import Lines

        def work(name):
            with rearview.background(Lines, f"{sys.argv[1]}/{name}") as writer:
                writer.add(name, 1)

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=work, args=(name,)) for name in "ab"]
        for child in children: child.start()
        for child in children: child.join()
        print([child.exitcode for child in children])
        """,
        tmp_path,
    )
    assert process.communicate() == ("[0, 0]\n", "")
    assert lines(tmp_path / "a") == ["a 1 None"]
    assert lines(tmp_path / "b") == ["b 1 None"]


def test_an_existing_logger_of_plain_attributes_is_copied(file):
    with rearview.background(Plain(file)) as writer:
        writer.add("hello")
    assert lines(file) == ["hello"]


def test_an_existing_logger_that_cannot_be_made_again_is_refused_with_the_line_to_write(file):
    logger = Lines(file)
    with pytest.raises(UsageError, match=r"rearview.background\(Lines, ...\)"):
        rearview.background(logger)
    logger.add("by the parent", 1)
    with rearview.background(logger, background_start="fork") as writer:
        writer.add("by the copy", 2)
    logger.close()
    assert lines(file) == ["by the parent 1 None", "by the copy 2 None"]


def test_the_error_about_wrong_options_names_the_right_ones(file):
    with pytest.raises(UsageError, match="'spawn' or 'fork'"):
        rearview.background(Lines, file, background_start="thread")
    with pytest.raises(UsageError, match="and arguments for it"):
        rearview.background(Plain(file), 1)
    with pytest.raises(UsageError, match="cannot be sent"):
        rearview.background(Lines, (n for n in ()))


def test_a_stand_in_is_not_pickled_by_mistake(file):
    with rearview.background(Lines, file) as writer:
        assert repr(writer) == "<background Lines>"
        assert "add" in dir(writer)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(writer)


def test_a_signal_handler_that_logs_while_a_call_is_being_made_does_not_deadlock(file, monkeypatch):
    writer = rearview.background(Lines, file)
    ring = writer._rearview_channel.ring
    real = ring.find_room
    writer.add("first", 0)
    monkeypatch.setitem(HANDLED, "writer", writer)

    def find_room(nbytes):
        if not HANDLED.get("raised"):
            HANDLED["raised"] = True
            signal.raise_signal(signal.SIGALRM)  # the lock is held
        return real(nbytes)

    monkeypatch.setattr(ring, "find_room", find_room)
    before = signal.signal(signal.SIGALRM, lambda *_: HANDLED["writer"].add("alarm", 1))
    try:
        writer.add("loss", np.float64(0.5), 1)
        writer.add("loss", 0.5, 2)
    finally:
        signal.signal(signal.SIGALRM, before)
    writer.close()
    assert lines(file) == ["first 0 None", "loss 0.5 1", "alarm 1 None", "loss 0.5 2"]


HANDLED = {}
