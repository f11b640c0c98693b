"""Find cells in the image: a model, where to look, Run; boxes and counts that follow the slider."""

from __future__ import annotations

from typing import Any

from napari.layers import Image
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QPushButton, QVBoxLayout, QWidget

from napari_beerlanet.ui import detection_mesh
from napari_beerlanet.ui.batch_settings import batch_button, finding_settings
from napari_beerlanet.ui.cell_ruler import CellRuler
from napari_beerlanet.ui.controls import heading, row, rule
from napari_beerlanet.ui.counts_panel import CountsPanel
from napari_beerlanet.ui.detect_form import DetectForm
from napari_beerlanet.ui.detect_model import ModelPart
from napari_beerlanet.ui.detect_result import ResultPart
from napari_beerlanet.ui.detect_where import windows
from napari_beerlanet.ui.detect_work import Order, Result, carry_out
from napari_beerlanet.ui.empty import EmptyState
from napari_beerlanet.ui.layers import ImageChoice, Renames
from napari_beerlanet.ui.model_choice import dropped_model
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.planes import current_plane, pixel_size
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session
from napari_beerlanet.ui.slide_results import Earlier, SlideResults, earlier
from napari_beerlanet.ui.slide_shower import SlideSearch
from napari_beerlanet.ui.tasks import Outcome

_SOON = 15  # milliseconds: movements of the slider within this are one


class DetectWidget(Panel):
    """The panel "Find cells"."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.session = session(self.viewer)
        self.work, self.looking = self.task(), self.task()
        self._build()
        self.slide = SlideSearch(self.viewer, self.session, self.work, self)
        self.kept = SlideResults()
        self.ruler = CellRuler(self.viewer, self)
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_SOON)
        self._connect()
        self.setAcceptDrops(True)
        detection_mesh.prepare()
        self.model.begin()
        self._image_chosen()

    def _build(self) -> None:
        self.model = ModelPart(self, self.session)
        self.image = ImageChoice(self)
        self.form = DetectForm(self.image)
        self.run = QPushButton("Find cells")
        self.run.setToolTip("Search with these settings (Ctrl+Shift+F).")
        self.runbar = RunBar(self.work)
        self.counts = CountsPanel()
        self.result = ResultPart(self, self.session, self.counts)
        self.empty = EmptyState(self)
        self.body.addWidget(heading("Model"))
        self.body.addWidget(self.model.choice)
        self.body.addWidget(self.model)
        self.body.addWidget(rule())
        self.body.addWidget(self.empty)
        self.rest = QWidget()
        rest = QVBoxLayout(self.rest)
        rest.setContentsMargins(0, 0, 0, 0)
        buttons = row(self.run, batch_button(self), stretch=0)
        for widget in (self.form, buttons, self.runbar, rule(), self.counts):
            rest.addWidget(widget)
        self.body.addWidget(self.rest)
        self.body.addStretch(1)

    def _connect(self) -> None:
        self.image.chosen.connect(lambda *_: self._image_chosen())
        self.model.ready.connect(self._update_run)
        self.run.clicked.connect(lambda *_: self.find())
        self.work.started.connect(self._update_run)
        self.work.ended.connect(self._ended)
        self.form.confidence_changed.connect(lambda *_: self._soon.start())
        self._soon.timeout.connect(lambda: self.result.show(self.form.confidence.value))
        self.form.labels_changed.connect(self.result.set_labels)
        self.form.draw_asked.connect(self._draw)
        self.ruler.measured.connect(self.form.take_size)
        self.ruler.ended.connect(lambda: self.form.draw.setChecked(False))
        self.slide.shown.connect(self.result.growing)
        self.slide.said.connect(self._slide_said)
        self.shortcut("Ctrl+Shift+F", self.find)
        self._names = Renames(self, self._layers_changed)

    # --- what is chosen ---------------------------------------------------------------------------

    def _layers_changed(self) -> None:
        self.empty.update_text()
        self._image_chosen()

    def _image_chosen(self) -> None:
        there = self.image.layer is not None
        self.empty.setVisible(not there)
        self.rest.setVisible(there)
        self.result.follow(self.image.layer)
        self._look_for_earlier()
        self._update_run()

    def _look_for_earlier(self, say: bool = True) -> None:
        """Whether the slide was searched before, and how far."""
        layer = self.image.layer
        plane = None if layer is None else current_plane(layer, self.viewer)
        slide = plane is not None and plane.is_slide
        self.form.set_slide(slide)
        if self.work.running:
            return
        self._offer(None)
        if slide and layer is not None and plane is not None:
            kept = self.kept.of(layer, plane)
            self.looking.start(lambda report: earlier(kept), lambda it: self._offer(it, say))

    def _offer(self, before: Earlier | None, say: bool = True) -> None:
        """The button says what pressing it does."""
        unfinished = before is not None and not before.finished
        self.run.setText("Go on" if unfinished else "Find cells")
        self.form.say_slide(_told(before) if before is not None and say else "")

    def _update_run(self) -> None:
        ready = self.image.layer is not None and bool(self.model.choice.key)
        self.run.setEnabled(ready and not self.work.running)

    def _ended(self, outcome: Outcome) -> None:
        if outcome is not Outcome.DONE:
            self.result.keep(self.slide.shower)
        self._look_for_earlier(say=False)  # the run bar has just said it
        self._update_run()

    def _draw(self, on: bool) -> None:
        if on and self.image.layer is not None:
            self.form.say_size("Draw a box over one typical cell.")
            self.ruler.start(self.image.layer)
        else:
            self.form.say_size("")
            self.ruler.stop()

    # --- running ----------------------------------------------------------------------------------

    def find(self) -> None:
        """Run with what the form says."""
        layer = self.image.layer
        if layer is None or self.work.running:
            return
        try:
            order = self._order(layer)
        except Exception as error:
            self.runbar.fail(error)
            return
        self._source = layer
        self.form.say_size("")
        self.form.say_slide("")
        if order.streamed:
            look = self.form.confidence.value, self.form.labels.isChecked()
            self.slide.start(layer, order, *look, self._done, self._failed)
        else:
            self.work.start(lambda report: carry_out(order, report), self._done, self._failed)

    def _order(self, layer: Image) -> Order:
        plane = current_plane(layer, self.viewer)
        kept = self.kept.of(layer, plane)
        return Order(
            plane,
            windows(self.form.chosen_where, layer, plane, self.viewer),
            self.model.choice.key,
            self.model.loaded,
            self.form.chosen_device,
            self.form.overlap.value,
            self.form.object_size,
            pixel_size(layer),
            self.form.densities.isChecked(),
            self.form.skip_glass.isChecked(),
            kept.path,
            kept.results,
            kept.source,
        )

    def _done(self, result: Result) -> None:
        source, self._source = self._source, None
        self.model.took(result.model, result.order.key)
        if source is None or source not in self.viewer.layers:
            self.runbar.say("The image was removed meanwhile; nothing was added.")
            return
        if result.order.streamed:
            self.slide.settle(result)
            self.result.settle(source, result, self.slide.shower)
        else:
            look = self.form.confidence.value, self.form.labels.isChecked()
            self.result.put(source, result, *look)
        self.runbar.say(summary(result))
        size = result.detections.report.get("object_size")
        if size is not None:
            how = result.detections.report["chosen"]
            self.form.say_size(f"Cells were taken to be {size:.0f} pixels wide: {how}.")

    def _slide_said(self, text: str) -> None:
        """While it runs, the run bar has no room for a line."""
        if self.work.running:
            self.form.say_slide(text)
        else:
            self.runbar.say(text)

    def _failed(self, error: BaseException) -> None:
        self._source = None
        self.model.choice.refresh()  # a file may be gone

    # --- dropping a model -------------------------------------------------------------------------

    def dragEnterEvent(self, event: Any) -> None:
        """Take files of models."""
        if dropped_model(event.mimeData()):
            event.acceptProposedAction()

    def dropEvent(self, event: Any) -> None:
        """Choose the model that is dropped."""
        path = dropped_model(event.mimeData())
        if path:
            event.acceptProposedAction()
            self.choose_model(path)

    def choose_model(self, key: str) -> None:
        """Choose a packaged model by its name or a file by its path."""
        self.model.choice.choose(key)

    # --- many images ------------------------------------------------------------------------------

    @property
    def study_layer(self) -> Image | None:
        """The image whose folder is proposed."""
        return self.image.layer

    def study_settings(self) -> dict[str, Any]:
        """What is set, by the names of `StudySettings`."""
        return finding_settings(self.model.choice.key, self.form)

    def ended(self) -> None:
        """Leave the layers as they are."""
        self._soon.stop()
        self.ruler.stop()
        self.slide.close()
        self.result.close()
        self.model.close_part()


def _told(before: Earlier) -> str:
    """One line on an earlier search."""
    by = f" by “{before.model}”" if before.model else ""
    if before.finished:
        return f"Searched before{by}: with the same settings its boxes are there at once."
    return (
        f"{before.done:,} of {before.total:,} tiles were searched before{by}. With the same "
        "settings it goes on from there."
    )


def summary(result: Result) -> str:
    """One line on a run: how many, how long, where, and what it had to put up with."""
    report = result.detections.report
    seconds = f"{result.seconds:.1f} s" if result.seconds < 10 else f"{result.seconds:.0f} s"
    line = f"Done in {seconds} on {report['device']}."
    return " ".join([line, *report.get("notes", [])])
