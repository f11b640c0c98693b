"""How long training still takes."""

import pytest

from napari_beerlanet.core.pace import Pace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(pace, clock, epochs, batches=5, step=2.0, end=7.0):
    for epoch in range(epochs):
        for number in range(batches):
            clock.now += step + (end if epoch and number == 0 else 0.0)
            pace.batch(epoch)


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_known_before_the_second_batch(clock):
    pace = Pace(clock)
    assert pace.left(10, 2) is None
    pace.batch(0)
    assert pace.left(10, 2) is None


def test_batches_and_ends_of_epochs_count_apart(clock):
    pace = Pace(clock)
    run(pace, clock, epochs=1)
    assert pace.left(10, 2) == pytest.approx(20)  # no end of an epoch was seen yet
    pace = Pace(clock)
    run(pace, clock, epochs=3)
    assert pace.left(10, 2) == pytest.approx(10 * 2 + 2 * 7)


def test_a_pause_does_not_count(clock):
    pace = Pace(clock)
    run(pace, clock, epochs=3)
    clock.now += 3600
    pace.batch(2)
    assert pace.left(10, 2) == pytest.approx(10 * 2 + 2 * 7)


def test_epochs_of_one_batch(clock):
    pace = Pace(clock)
    run(pace, clock, epochs=4, batches=1)
    assert pace.left(3, 3) == pytest.approx(3 * 9)
