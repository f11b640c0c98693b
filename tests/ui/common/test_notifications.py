"""Which warnings reach the window."""

import logging
import threading
import warnings
from pathlib import Path

import dask
import numpy as np
import pytest
import torch
from napari.utils.notifications import notification_manager

from napari_beerlanet.ui.common import notifications, tasks
from napari_beerlanet.ui.common.notifications import hide_library_warnings
from napari_beerlanet.ui.common.tasks import Task

TORCH, DASK = torch.library.__file__, dask.__file__
ONLY_ONCE = "Warning only once for all operators,  other operators may also be overridden."


@pytest.fixture(params=["event loop first", "panel first"])
def shown(request, monkeypatch):
    """What napari's window is told, with its hooks as in its event loop."""
    monkeypatch.delitem(vars(notification_manager), "receive_warning", raising=False)
    monkeypatch.setattr(notification_manager, "records", [])
    monkeypatch.setattr(notification_manager, "_seen_warnings", set())
    if request.param == "panel first":
        hide_library_warnings()
    with notification_manager, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notification_manager.receive_warning
        hide_library_warnings()
        yield lambda: [record.message for record in notification_manager.records]
    vars(notification_manager).pop("receive_warning", None)


def in_task(work, until):
    task = Task()
    ended = []
    task.ended.connect(ended.append)
    task.start(lambda report: work())
    until(lambda: bool(ended))
    assert task.error is None


def warn(text, file, category=UserWarning):
    warnings.warn_explicit(text, category, str(file), 12)


def test_torchs_warning_of_the_demo_is_logged_and_not_shown(shown, until, caplog):
    caplog.set_level(logging.INFO, "napari_beerlanet")
    in_task(lambda: warn(ONLY_ONCE, TORCH), until)
    warn(ONLY_ONCE + " In the GUI thread.", TORCH)
    assert shown() == []
    assert caplog.text.count("Warning only once") == 2


def test_a_real_override_of_an_operator_is_not_shown(shown, until):
    """What torch does when its import in a thread meets another thread's filters."""

    def override():
        library = torch.library.Library("aten", "IMPL")
        library.impl("aten::relu", lambda x: x, "CPU")
        library._destroy()

    in_task(override, until)
    assert shown() == []
    assert torch.relu(torch.tensor(-1.0)) == 0


def test_our_own_warnings_are_shown(shown, until):
    in_task(lambda: warn("from a task", tasks.__file__), until)
    warn("from the window", Path(notifications.__file__).with_name("panel.py"))
    notifications.show_warning("as a sentence")
    assert shown() == ["from a task", "from the window", "as a sentence"]


def test_a_librarys_warning_is_shown_unless_it_works_for_us(shown, until):
    in_task(lambda: warn("chunks", DASK), until)
    assert shown() == []
    warn("chunks of someone else", DASK)
    other = threading.Thread(target=warn, args=("of another plugin's thread", DASK))
    other.start()
    other.join()
    assert shown() == ["chunks of someone else", "of another plugin's thread"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_our_numbers_do_is_our_warning(shown, until):
    """numpy warns in the name of the line that divides."""
    code = compile("np.ones(1) / np.zeros(1)", tasks.__file__, "eval")
    in_task(lambda: eval(code, {"np": np, "__warningregistry__": {}}), until)
    assert shown() == ["divide by zero encountered in divide"]
