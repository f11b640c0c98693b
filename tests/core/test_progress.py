"""Progress reports."""

import pytest

from napari_beerlanet.core.progress import Cancelled, Progress, tell


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
