"""The panel “Fine-tune”: a project, a model to begin with, training, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QVBoxLayout, QWidget

from napari_beerlanet.core.runs import Run, State
from napari_beerlanet.ui.controls import button, form, rule
from napari_beerlanet.ui.finetune_begin import begin, look_at_project, use_device
from napari_beerlanet.ui.finetune_choices import ModelChoice, ProjectChoice
from napari_beerlanet.ui.finetune_closing import ClosingQuestion
from napari_beerlanet.ui.finetune_estimate import Asked, Estimate
from napari_beerlanet.ui.finetune_form import FinetuneForm, wrapped
from napari_beerlanet.ui.finetune_progress import RunSection
from napari_beerlanet.ui.finetune_runs import RunList
from napari_beerlanet.ui.notices import complain, show_info
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.project_store import projects
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session
from napari_beerlanet.ui.training_process import End, TrainingProcess
from napari_beerlanet.ui.verdict import Verdict

_NARROWEST = 370  # pixels, the scroll bar included
_NO_PROJECT = (
    "Choose a project: a folder with a data.yaml. “Annotate” makes one from images that you "
    "have corrected."
)


class FinetunePanel(Panel):
    """Train a model further on a project's images, in a process of its own."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.summary: Any = None  # of the data, once it was looked at
        self._data_task, self._begin_task = self.task(), self.task()
        self._build()
        self._connect()
        window = getattr(self.viewer.window, "_qt_window", None)
        self.closing = ClosingQuestion(window, lambda: self.run.process, self)
        self._theme()
        self._fill_models()
        self._enable()
        QTimer.singleShot(0, self._open_recent)

    def _build(self) -> None:
        self.project = ProjectChoice()
        self.data_line, self.data_bar = wrapped(_NO_PROJECT), RunBar(self._data_task, quiet=True)
        self.model, self.form = ModelChoice(), FinetuneForm()
        self.estimate = Estimate(self.task(), self._asked)
        self.start_button = button("Start training", "Train in a process of its own.", self.start)
        self.start_bar = RunBar(self._begin_task, quiet=True)
        self.run = RunSection(self.task(), self.viewer.theme)
        self.verdict, self.runs = Verdict(self), RunList()
        self.resume_line = wrapped()
        self.resume_line.hide()
        chosen = form()
        chosen.addRow("Project", self.project)
        self.body.addLayout(chosen)
        self.body.addWidget(self.data_line)
        self.body.addWidget(self.data_bar)
        self.settings = QWidget()
        inside = QVBoxLayout(self.settings)
        inside.setContentsMargins(0, 0, 0, 0)
        begin_with = form()
        begin_with.addRow("Begin with", self.model)
        inside.addLayout(begin_with)
        for part in (self.form, self.estimate, self.start_button):
            inside.addWidget(part)
        parts = (self.settings, self.start_bar, self.resume_line, self.run, self.verdict)
        for widget in (*parts, self.run.details):
            self.body.addWidget(widget)
        self.body.addWidget(rule())
        self.body.addWidget(self.runs)
        self.body.addStretch(1)
        self.setMinimumWidth(_NARROWEST)

    def _connect(self) -> None:
        self.project.chosen.connect(self.open_project)
        self.model.changed.connect(self.estimate.renew)
        self.form.changed.connect(self.estimate.renew)
        self.run.ended.connect(self._ended)
        self.runs.resume.connect(self.resume)
        self.runs.follow.connect(self.follow)
        self.runs.show_result.connect(self._show_result)
        self.verdict.kept.connect(self._kept)
        self.verdict.discarded.connect(self._discarded)
        session(self.viewer).model_changed.connect(self._model_loaded)
        self.listen(self.viewer.events.theme, self._theme)
        self.listen(projects(self.viewer).changed, self._project_opened)
        self.listen(projects(self.viewer).updated, self._project_updated)

    # --- project and data ------------------------------------------------------------------------

    def _open_recent(self) -> None:
        """The project that was open last, if it is there: a run that went on is found so."""
        if not self._over and self.project.project is None:
            shared = projects(self.viewer).project
            for path in [shared.path] if shared is not None else self.project.recent():
                self.project.choose(path)
                return

    def _project_opened(self, project: Any = None) -> None:
        """Another panel has opened a project: take it, unless a training goes on."""
        if project is not None and not self.run.running:
            self.project.choose(project.path)

    def _project_updated(self) -> None:
        """Another panel has added images: look at the data again."""
        project = projects(self.viewer).project
        if project is not None and not self.run.running and self.verdict.folder is None:
            self.project.choose(project.path)

    def open_project(self, folder: Path) -> None:
        """Look at a project's data and runs; one of them that goes on is followed."""
        self.summary = None
        self.estimate.cancel()
        self.data_line.setText("Looking at the data …")
        self._fill_models()
        found = self.runs.refresh(folder)
        working = [run for run in found if run.goes_on]
        if working and not self.run.running:
            self.follow(working[0])
            show_info(f"{working[0].name}: the training that went on was found again.")
        self._offer_to_resume(found)
        self._enable()
        self._data_task.start(
            lambda report: look_at_project(folder, report), self._looked, self._bad
        )

    def _looked(self, found: tuple[Any, list[str]]) -> None:
        self.summary, devices = found
        self.data_line.setText("\n".join([self.summary.sentence(), *self.summary.notes[:3]]))
        self.form.offer_devices(devices)
        self._enable()
        self.estimate.renew()

    def _bad(self, error: BaseException) -> None:
        self.data_line.setText("This project cannot be trained with:")
        self._enable()

    def _offer_to_resume(self, found: list[Run]) -> None:
        cut = bool(found) and found[0].state is State.INTERRUPTED
        self.resume_line.setVisible(cut)
        if cut:
            self.resume_line.setText(
                f"{found[0].name} was interrupted after epoch {found[0].epoch}: resume it below."
            )
            self.runs.head.setChecked(True)

    def _asked(self) -> Asked | None:
        """What the time is to be estimated of."""
        project, model = self.project.project, self.model.given
        if project is None or model is None or self.summary is None or self.run.running:
            return None
        return project, model, self.form.settings(), self.summary.dataset

    # --- training --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a run with the settings as they are."""
        project, model = self.project.project, self.model.given
        if project is None or model is None or self.run.running:
            return
        settings = self.form.settings()
        self.estimate.cancel()
        self.start_button.setEnabled(False)
        self._begin_task.start(
            lambda report: begin(project, model, settings),
            self._launch,
            lambda error: self._enable(),
        )

    def resume(self, run: Run) -> None:
        """Go on with a run that ended before its time, on the device that is chosen now."""
        if self.run.running:
            complain("Another training goes on in this panel; stop it or let it finish first.")
            return
        try:
            use_device(run.path, self.form.device.currentText())
        except (ValueError, OSError) as error:
            complain(error)
            return
        self._launch(run.path)

    def _launch(self, path: Path) -> None:
        process = self._show_run(path)
        process.start()
        self._enable()
        self.runs.refresh()

    def follow(self, run: Run) -> None:
        """Show a run that goes on in a process which is there already."""
        if self.run.folder == run.path and self.run.running:
            return
        process = self._show_run(run.path)
        if not process.attach(run):
            self.run.leave()
            self.run.set_shown(False)
            self.runs.refresh()
        self._enable()

    def _show_run(self, path: Path) -> TrainingProcess:
        self.verdict.clear()
        self.start_bar.say("")
        self.resume_line.hide()
        process = TrainingProcess(path, self)
        self.run.follow(process)
        return process

    def _ended(self, end: End) -> None:
        folder = self.run.folder
        self._fill_models()
        self.runs.refresh()
        if end.state in (State.FAILED, State.INTERRUPTED):
            self.start_bar.fail(ValueError(end.message or "Training has failed."))
        if end.state is State.INTERRUPTED:
            self.runs.head.setChecked(True)
        elif folder is not None and (folder / "best.safetensors").exists():
            self.verdict.judge(folder)
        self._enable()
        self.estimate.renew()

    # --- what came of it -------------------------------------------------------------------------

    def _show_result(self, run: Run) -> None:
        if not self.run.running:
            self.run.set_shown(False)
            self.verdict.judge(run.path)
            self._enable()

    def _kept(self, path: Path) -> None:
        self._put_away()
        self.start_bar.say(f"Kept as {path.stem}, and loaded for detection.")
        self._fill_models()

    def _discarded(self, folder: Path) -> None:
        self._put_away()
        self.start_bar.say(
            f"Discarded. The run stays in runs/{folder.name} until you delete it below."
        )

    def _put_away(self) -> None:
        """Back to the settings for the next training."""
        self.run.leave()
        self.run.set_shown(False)
        self._enable()
        self.estimate.renew()

    # --- the rest --------------------------------------------------------------------------------

    def _model_loaded(self, model: Any = None) -> None:
        self._fill_models()

    def _fill_models(self) -> None:
        shared = session(self.viewer)
        self.model.fill(shared.model, shared.model_key, self.project.project)

    def _enable(self) -> None:
        running = self.run.running
        self.settings.setVisible(not running and self.verdict.folder is None)
        self.project.setEnabled(not running)
        self.start_button.setEnabled(self.summary is not None and not running)

    def _theme(self, event: Any = None) -> None:
        self.run.curves.set_theme(self.viewer.theme)

    def ended(self) -> None:
        """The training goes on; it is found again when the panel is opened the next time."""
        session(self.viewer).model_changed.disconnect(self._model_loaded)
        self.closing.end()
        self.estimate.cancel()
        self.run.leave()
