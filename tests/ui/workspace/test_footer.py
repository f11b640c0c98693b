"""One place for progress: what runs in any tab is seen from all, and can be stopped there."""

import threading

import numpy as np
import pytest
from qtpy.QtWidgets import QProgressBar

from napari_beerlanet.core.common.progress import Progress
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.workspace.workspace import (
    ANNOTATE,
    BATCH,
    CELLS,
    STAINS,
    TABS,
    TRAIN,
    open_workspace,
)

pytestmark = pytest.mark.window

RGB = np.full((48, 64, 3), 200, np.uint8)


class Gate:
    """Work that waits, and can be let on."""

    def __init__(self):
        self.open = threading.Event()

    def __call__(self, report):
        report(Progress(1, 4, "tile 2 of 4"))
        while not self.open.wait(0.005):
            report(Progress(1, 4, "tile 2 of 4"))


@pytest.fixture
def viewer(shared_viewer):
    viewer = shared_viewer(show=True)
    viewer.add_image(RGB)
    return viewer


def shown_bars(workspace):
    """Progress bars in the tab that is open, without that of the review, which is no task's."""
    panel = workspace.panel(workspace.current_tab)
    review = [getattr(panel, "progress", None)]
    return [b for b in panel.findChildren(QProgressBar) if b.isVisible() and b not in review]


def rows(workspace):
    return [(row.label, row.bar.format()) for row in workspace.footer.rows.values()]


def test_a_search_is_seen_from_every_tab_and_stopped_from_there(viewer, until):
    workspace = open_workspace(viewer, CELLS)
    cells = workspace.panel(CELLS)
    until(lambda: not workspace.footer.rows)  # the model is loaded
    ends = []
    cells.detect_task.ended.connect(ends.append)
    height = workspace.footer.height()
    cells.detect_task.start(Gate())
    until(lambda: rows(workspace) == [("Cells", "tile 2 of 4")])
    # Qt lays out what has changed when it comes to it.
    until(lambda: workspace.footer.height() == height)  # nothing moves when something starts
    for tab in TABS:
        workspace.open_tab(tab)
        until(lambda: rows(workspace) == [("Cells", "tile 2 of 4")])  # a tab may load its model
        (row,) = workspace.footer.rows.values()
        assert row.isVisible()
        assert row.bar.value() == 250
        assert shown_bars(workspace) == []
    row.link.click()
    assert workspace.current_tab is CELLS
    row.stop.click()
    row.stop.click()
    until(lambda: not workspace.footer.rows)
    assert ends == [TaskOutcome.CANCELLED]
    assert cells.progress_bar.text == "Cancelled; nothing has changed."


def test_two_at_a_time_in_the_order_of_the_tabs(viewer, until):
    workspace = open_workspace(viewer, CELLS)
    cells, annotate = workspace.panel(CELLS), workspace.open_tab(ANNOTATE)
    until(lambda: not workspace.footer.rows)
    gates, ends = [Gate(), Gate()], []
    tasks = [annotate.annotation_actions.project_task, cells.detect_task]
    for task, gate in zip(tasks, gates, strict=True):
        task.ended.connect(ends.append)
        task.start(gate)
    until(lambda: len(workspace.footer.rows) == 2)
    running = [row.label for row in workspace.footer.rows.values()]
    assert running == ["Cells", "Annotate"]
    shown = sorted(workspace.footer.rows.values(), key=lambda row: row.y())
    assert [row.label for row in shown] == ["Cells", "Annotate"]
    for gate in gates:
        gate.open.set()
    until(lambda: not workspace.footer.rows)
    assert ends == [TaskOutcome.DONE] * 2


def test_loading_a_model_has_nothing_to_cancel(shared_viewer, until):
    viewer = shared_viewer(show=True)
    workspace = open_workspace(viewer, CELLS)
    (row,) = workspace.footer.rows.values()
    assert not row.stop.isVisible()
    until(lambda: not workspace.footer.rows)


def test_trainings_and_batches_are_shown_there_too(viewer, until):
    workspace = open_workspace(viewer, CELLS)
    train, batch = workspace.open_tab(TRAIN), workspace.open_tab(BATCH)
    until(lambda: not workspace.footer.rows)
    stopped = []
    for activity in (train.run_view.activity, batch.progress.activity):
        activity._stop = lambda activity=activity: stopped.append(activity)
        activity.begin("Epoch 1 of 9 · 2 min left")
        activity.report("Epoch 2 of 9 · 1 min left", 0.2)
    assert rows(workspace) == [
        ("Train", "Epoch 2 of 9 · 1 min left"),
        ("Batch", "Epoch 2 of 9 · 1 min left"),
    ]
    workspace.open_tab(STAINS)
    for row in workspace.footer.rows.values():
        assert row.stop.text() == "Stop"
        row.stop.click()
        row.stop.click()
        assert not row.stop.isEnabled()
    assert stopped == [train.run_view.activity, batch.progress.activity]
    for activity in stopped:
        activity.end()
    assert rows(workspace) == []


def test_a_panel_in_a_window_of_its_own_has_its_own_bar(viewer, until):
    workspace = open_workspace(viewer, CELLS)
    cells, gate = workspace.panel(CELLS), Gate()
    until(lambda: not workspace.footer.rows)
    workspace.float_tab(CELLS)
    cells.detect_task.start(gate)
    until(lambda: cells.progress_bar.bar.isVisible())
    until(lambda: rows(workspace) == [("Cells", "tile 2 of 4")])
    workspace.put_back(CELLS)
    assert not cells.progress_bar.bar.isVisible()
    workspace.float_tab(CELLS)
    workspace.parentWidget().destroyOnClose()
    until(lambda: cells.progress_bar.bar.isVisible())
    gate.open.set()
    until(lambda: not cells.detect_task.running)
