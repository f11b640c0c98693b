"""Progress reports."""

import pytest

from napari_beerlanet.core.progress import Cancelled, Progress, furthest, tell, within


@pytest.mark.parametrize(
    ("done", "total", "fraction"), [(0, 4, 0), (1, 4, 0.25), (4, 4, 1), (9, 4, 1), (0, 0, 0)]
)
def test_fraction(done, total, fraction):
    assert Progress(done, total).fraction == fraction


def test_tell():
    heard = []
    tell(heard.append, 2, 5, "counting")
    assert heard == [Progress(2, 5, "counting")]
    tell(None, 2, 5)


def test_cancelled_passes_through_tell():
    def stop(progress):
        raise Cancelled

    with pytest.raises(Cancelled):
        tell(stop, 0, 1)
    assert not issubclass(Cancelled, RuntimeError)  # a worker may swallow those


def test_a_part_reports_its_part_of_the_whole():
    heard = []
    part = within(within(heard.append, 0.5, 1.0), 0.0, 0.5)
    for done in (0, 1, 2):
        tell(part, done, 2, "counting")
    assert [p.fraction for p in heard] == [0.5, 0.625, 0.75]
    assert {p.message for p in heard} == {"counting"}
    assert within(None, 0, 1) is None


def test_the_furthest_of_several_threads_counts():
    heard = []
    report = furthest(heard.append)
    for done in (2, 1, 5, 3):
        report(Progress(done, 10, "searching"))
    assert [p.fraction for p in heard] == [0.2, 0.2, 0.5, 0.5]
    assert furthest(None) is None
