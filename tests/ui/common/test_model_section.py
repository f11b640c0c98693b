"""A model that two of a window's threads need at once is loaded once."""

import threading

import pytest

from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.ui.common import model_section
from napari_beerlanet.ui.common.model_section import load_model

TIMEOUT_S = 600


class Loader:
    """Stands for the loading of a file: each waits until it is told what comes of it."""

    def __init__(self) -> None:
        self.calls, self.outcomes, self.begun = [], [], threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, key, device, report, kind):
        self.calls.append(key)
        self.begun.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def finish(self, outcome):
        self.outcomes.append(outcome)
        self.go.release()


@pytest.fixture
def loader(monkeypatch):
    made = Loader()
    monkeypatch.setattr(model_section, "_load_model", made)
    return made


class Request(threading.Thread):
    """A thread that loads a model."""

    def __init__(self, key="blood-cells", report=lambda progress: None, owner="a window"):
        super().__init__(daemon=True)
        self.key, self.report, self.owner, self.result = key, report, owner, None
        self.start()

    def run(self):
        try:
            self.result = load_model(self.key, "auto", self.report, owner=self.owner)
        except BaseException as error:
            self.result = error

    def end(self):
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.result


def waiting_request(**more):
    """A request that has found another one loading, and waits for it."""
    waits, reports = threading.Event(), []

    def report(progress):
        reports.append(progress)
        if len(reports) > 1:  # the first is before it looks
            waits.set()

    request = Request(report=report, **more)
    assert waits.wait(TIMEOUT_S)
    return request


def test_one_that_is_being_loaded_is_waited_for(loader):
    first = Request()
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    second = waiting_request()
    other = Request("malaria")
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    another_window = Request(owner="another window")
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    model = object()
    for _ in range(3):
        loader.finish(model)
    assert first.end() is second.end() is other.end() is another_window.end() is model
    assert loader.calls == ["blood-cells", "malaria", "blood-cells"]
    loader.finish("again")
    assert Request().end() == "again", "a model that was loaded before is not kept here"


def test_an_error_is_that_of_both(loader):
    first = Request()
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    second = waiting_request()
    loader.finish(ValueError("damaged"))
    for request in (first, second):
        assert str(request.end()) == "damaged"
    assert len(loader.calls) == 1


def test_who_waits_for_one_that_is_cancelled_loads_it(loader):
    first = Request()
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    second = waiting_request()
    loader.finish(Cancelled())
    assert isinstance(first.end(), Cancelled)
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    loader.finish("model")
    assert second.end() == "model"


def test_who_waits_may_be_cancelled(loader):
    first = Request()
    assert loader.begun.acquire(timeout=TIMEOUT_S)
    reports = []

    def report(progress):
        reports.append(progress)
        if len(reports) > 1:
            raise Cancelled

    assert isinstance(Request(report=report).end(), Cancelled)
    loader.finish("model")
    assert first.end() == "model"
