"""How far a replay is can be read from the records that it writes."""

import pytest

from rearview.execute.backfill_status import Eta, RecordTail
from rearview.model import Point, Step
from rearview.store.records import RecordFile, encode_point


def log(file, epoch, step=None):
    steps = (Step("epoch", epoch),) + (() if step is None else (Step("step", step),))
    file.append(encode_point(Point(steps)), [("g", 1.0)])


def test_rows_are_counted_and_the_last_iteration_tells_the_share(tmp_path):
    watch = RecordTail(tmp_path, "r.1", "epoch", range(10, 20))
    assert not watch.read()
    file = RecordFile(tmp_path, "r", "r.1")
    log(file, 10, 0)
    log(file, 10, 1)
    assert watch.read()
    assert (watch.rows, watch.reached) == (2, pytest.approx(0.05))
    assert not watch.read()
    log(file, 14)
    file.close()
    assert watch.read()
    assert (watch.rows, watch.reached) == (3, pytest.approx(0.45))


def test_records_of_others_do_not_count(tmp_path):
    other = RecordFile(tmp_path, "r")
    log(other, 12)
    watch = RecordTail(tmp_path, "r.1", "epoch", range(10, 20))
    assert not watch.read()
    assert watch.rows == 0


def test_a_line_that_is_being_written_is_read_once_it_is_complete(tmp_path):
    file = RecordFile(tmp_path, "r", "r.1")
    log(file, 10)
    path = next(tmp_path.glob("records-*"))
    watch = RecordTail(tmp_path, "r.1", "epoch", range(10, 20))
    with path.open("ab") as raw:
        raw.write(b'{"l":["epoch"],"i":[12]')
        raw.flush()
        watch.read()
        assert watch.rows == 1
        raw.write(b',"s":9,"t":1.0,"n":["g"],"v":[1]}\n')
    watch.read()
    assert (watch.rows, watch.reached) == (2, pytest.approx(0.25))


def test_only_listed_iterations_make_the_share(tmp_path):
    file = RecordFile(tmp_path, "r", "r.1")
    watch = RecordTail(tmp_path, "r.1", "epoch", (3, 50, 90, 91))
    log(file, 90)
    watch.read()
    assert watch.reached == pytest.approx(2.5 / 4)


def test_a_folder_that_is_gone_is_no_progress(tmp_path):
    assert not RecordTail(tmp_path / "gone", "r.1").read()


def test_slower_segments_lengthen_the_prediction_of_the_others():
    pace = Eta(100.0, 0.0)
    assert pace.seconds_left(50.0, None, 2.0) == 150.0
    assert pace.seconds_left(500.0, None) == 50.0  # it is not over, though it should be
