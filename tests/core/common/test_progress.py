"""Progress reports, and the time that is left."""

import pytest

from napari_beerlanet.core.common.progress import (
    Cancelled,
    EtaEstimator,
    Progress,
    WorkProgress,
    eta_seconds,
    max_progress,
    renamed,
    report_progress,
    subprogress,
)


@pytest.mark.parametrize(
    ("done", "total", "fraction"), [(0, 4, 0), (1, 4, 0.25), (4, 4, 1), (9, 4, 1), (0, 0, 0)]
)
def test_fraction(done, total, fraction):
    assert Progress(done, total).fraction == fraction


def test_tell():
    heard = []
    report_progress(heard.append, 2, 5, "counting")
    assert heard == [Progress(2, 5, "counting")]
    report_progress(None, 2, 5)


def test_cancelled_passes_through_tell():
    def stop(progress):
        raise Cancelled

    with pytest.raises(Cancelled):
        report_progress(stop, 0, 1)
    assert not issubclass(Cancelled, RuntimeError)  # a worker may swallow those


def test_a_part_reports_its_part_of_the_whole():
    heard = []
    part = subprogress(subprogress(heard.append, 0.5, 1.0), 0.0, 0.5)
    for done in (0, 1, 2):
        report_progress(part, done, 2, "counting")
    assert [p.fraction for p in heard] == [0.5, 0.625, 0.75]
    assert {p.message for p in heard} == {"counting"}
    assert subprogress(None, 0, 1) is None


def test_a_part_that_is_done_does_not_say_so_of_the_whole():
    heard = []
    for first, last in ((0.0, 0.5), (0.5, 1.0)):
        part = subprogress(heard.append, first, last)
        report_progress(part, 0, 1, "counting")
        report_progress(part, 1, 1, "done")
    assert [(p.fraction, p.message) for p in heard] == [
        *((0.0, "counting"), (0.5, "counting")),
        *((0.5, "counting"), (1.0, "done")),
    ]


def test_work_is_counted_and_more_of_it_never_goes_back():
    seen = []
    work = WorkProgress(seen.append)
    report_progress(work.step(20, 100), 1, 2, "first")
    assert seen[-1].fraction == 0.1
    report_progress(work.step(30, 80), 1, 1, "second")
    assert seen[-1].fraction == 0.5
    report_progress(work.step(100, 200), 1, 2, "more than was known")
    assert seen[-1].fraction == 0.625
    report_progress(work.step(100, 100), 1, 1, "the rest")
    assert seen[-1].fraction == 1
    report_progress(work.step(7, 7), 1, 2, "what nobody expected")
    assert seen[-1].fraction == 1
    nothing = WorkProgress(None).step(0, 0)
    assert nothing is None


def test_a_report_can_be_renamed():
    seen = []
    report_progress(renamed(seen.append, "this"), 1, 2, "that")
    assert seen == [Progress(1, 2, "this")]
    assert renamed(seen.append, "") == seen.append
    assert renamed(None, "this") is None


def test_the_furthest_of_several_threads_counts():
    heard = []
    report = max_progress(heard.append)
    for done in (2, 1, 5, 3):
        report(Progress(done, 10, "searching"))
    assert [p.fraction for p in heard] == [0.2, 0.2, 0.5, 0.5]
    assert max_progress(None) is None


# --- the time that is left ---


@pytest.mark.parametrize(
    ("elapsed", "fraction", "left"),
    [(0.5, 0.5, None), (10, 0.0, None), (10, 0.5, 10), (30, 0.75, 10)],
)
def test_remaining_time(elapsed, fraction, left):
    assert eta_seconds(elapsed, fraction) == left


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(eta, clock, epochs, batches=5, step=2.0, end=7.0):
    for epoch in range(epochs):
        for number in range(batches):
            clock.now += step + (end if epoch and number == 0 else 0.0)
            eta.record_batch(epoch)


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_known_before_the_second_batch(clock):
    eta = EtaEstimator(clock)
    assert eta.seconds_left(10, 2) is None
    eta.record_batch(0)
    assert eta.seconds_left(10, 2) is None


def test_batches_and_ends_of_epochs_count_apart(clock):
    eta = EtaEstimator(clock)
    run(eta, clock, epochs=1)
    assert eta.seconds_left(10, 2) == pytest.approx(20)  # no end of an epoch was seen yet
    eta = EtaEstimator(clock)
    run(eta, clock, epochs=3)
    assert eta.seconds_left(10, 2) == pytest.approx(10 * 2 + 2 * 7)


def test_a_pause_does_not_count(clock):
    eta = EtaEstimator(clock)
    run(eta, clock, epochs=3)
    clock.now += 3600
    eta.record_batch(2)
    assert eta.seconds_left(10, 2) == pytest.approx(10 * 2 + 2 * 7)


def test_epochs_of_one_batch(clock):
    eta = EtaEstimator(clock)
    run(eta, clock, epochs=4, batches=1)
    assert eta.seconds_left(3, 3) == pytest.approx(3 * 9)
