"""The Fine-tune panel: train a detector or a classifier on a project, keep or discard it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QRadioButton, QVBoxLayout, QWidget

from napari_beerlanet.core.checkpoints.info import CLASSIFIER
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.training.runs import Run
from napari_beerlanet.ui.common.background_process import CloseConfirmation, RunEnd
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    form,
    row,
    separator,
    wrapping_label,
)
from napari_beerlanet.ui.common.notifications import notify_error, show_info
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_project_store, get_session
from napari_beerlanet.ui.finetune.form import (
    ClassifierForm,
    FineTuneForm,
    InitialModelChoice,
    ProjectChoice,
)
from napari_beerlanet.ui.finetune.model_comparison import ModelComparisonPanel
from napari_beerlanet.ui.finetune.run_list import RunList
from napari_beerlanet.ui.finetune.run_view import RunView, TrainingProcess
from napari_beerlanet.ui.finetune.start import (
    NEW_CLASSIFIER,
    EstimateLabel,
    EstimateRequest,
    create_run,
    inspect_project,
    set_run_device,
)

if TYPE_CHECKING:
    from napari.viewer import Viewer

    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.project.project import Project
    from napari_beerlanet.core.training.estimate import CropSummary, DatasetSummary
    from napari_beerlanet.ui.finetune.start import InitialModel

_MIN_WIDTH = 370  # pixels, including the scroll bar
_NO_PROJECT = (
    "Choose a project: a folder with a data.yaml. The tab “Annotate” creates one from images "
    "that you have annotated."
)


class FineTuneWidget(Panel):
    """Fine-tune a model on a project's images, in a separate process."""

    title = "Fine-tune"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.summary: DatasetSummary | CropSummary | None = None  # once the data were inspected
        self._data_task, self._create_task = self.task(), self.task()
        self._build()
        self._connect()
        window = getattr(self.viewer.window, "_qt_window", None)
        self.close_confirmation = CloseConfirmation(window, lambda: self.run_view.process, self)
        self._update_models()
        self._update_controls()
        QTimer.singleShot(0, self._open_recent)

    def _build(self) -> None:
        self.project_choice = ProjectChoice()
        self.data_line, self.data_bar = (
            wrapping_label(_NO_PROJECT),
            TaskProgressBar(self._data_task, quiet=True),
        )
        self.model_choice, self.form = InitialModelChoice(), FineTuneForm()
        self.classifier_choice = InitialModelChoice(CLASSIFIER)
        self.classifier_form = ClassifierForm()
        self.train_detector, self.train_classifier = (
            QRadioButton("Detector"),
            QRadioButton("Classifier"),
        )
        self.train_detector.setToolTip("Train a model that finds cells, on the project's boxes.")
        self.train_classifier.setToolTip(
            "Train a model that classifies cells, on the project's cells that have a type."
        )
        self.train_detector.setChecked(True)
        self.estimate = EstimateLabel(self.task(), self._estimate_request)
        self.start_button = button(
            "Start training",
            "Train in a separate process.",
            self.start,
        )
        self.start_reason = DisabledReason(self.start_button)
        self.start_bar = TaskProgressBar(self._create_task, quiet=True)
        self.run_view = RunView(self.task())
        self.comparison, self.run_list = ModelComparisonPanel(self), RunList()
        self.resume_line = wrapping_label()
        self.resume_line.hide()
        chosen = form()
        chosen.addRow("Project", self.project_choice)
        self.body.addLayout(chosen)
        self.body.addWidget(self.data_line)
        self.body.addWidget(self.data_bar)
        self.settings = QWidget()
        inside = QVBoxLayout(self.settings)
        inside.setContentsMargins(0, 0, 0, 0)
        initial_model = form()
        initial_model.addRow("Train", row(self.train_detector, self.train_classifier))
        initial_model.addRow("Initial model", self.model_choice)
        initial_model.addRow("Initial model", self.classifier_choice)
        self._initial_model = initial_model
        inside.addLayout(initial_model)
        for part in (
            *(self.form, self.classifier_form, self.estimate),
            *(self.start_button, self.start_reason),
        ):
            inside.addWidget(part)
        self._show_form()
        parts = (self.settings, self.start_bar, self.resume_line, self.run_view, self.comparison)
        for widget in (*parts, self.run_view.details):
            self.body.addWidget(widget)
        self.body.addWidget(separator())
        self.body.addWidget(self.run_list)
        self.body.addStretch(1)
        self.setMinimumWidth(_MIN_WIDTH)

    def _connect(self) -> None:
        self.project_choice.chosen.connect(self.open_project)
        self.model_choice.changed.connect(self.estimate.update_soon)
        self.model_choice.changed.connect(self._preselect_scope)
        self.form.changed.connect(self.estimate.update_soon)
        self.classifier_form.changed.connect(self.estimate.update_soon)
        self.classifier_choice.changed.connect(self._classifier_chosen)
        self.train_classifier.toggled.connect(self._task_chosen)
        self.run_view.ended.connect(self._on_run_ended)
        self.run_view.resume.connect(self.resume)
        self.run_list.resume.connect(self.resume)
        self.run_list.follow.connect(self.follow)
        self.run_list.show_result.connect(self._show_result)
        self.comparison.kept.connect(self._on_model_kept)
        self.comparison.discarded.connect(self._on_model_discarded)
        get_session(self.viewer).model_changed.connect(self._model_loaded)
        self.connect_event(get_session(self.viewer).classifier_changed, self._classifier_loaded)
        self.connect_event(get_project_store(self.viewer).changed, self._project_opened)
        self.connect_event(get_project_store(self.viewer).updated, self._project_updated)

    # --- project and data ------------------------------------------------------------------------

    def _open_recent(self) -> None:
        """Open the last project again, which finds a run that is still active."""
        if not self._closed and self.project_choice.project is None:
            shared = get_project_store(self.viewer).project
            for path in [shared.path] if shared is not None else self.project_choice.existing():
                self.project_choice.choose(path)
                return

    def _project_opened(self, project: Project | None = None) -> None:
        """Another panel has opened a project: use it, unless a run is active."""
        if project is not None and not self.run_view.running:
            self.project_choice.choose(project.path)

    def _project_updated(self) -> None:
        """Another panel has added images: inspect the data again."""
        project = get_project_store(self.viewer).project
        if project is not None and not self.run_view.running and not self.comparison.pending:
            self.project_choice.choose(project.path)

    def open_project(self, folder: Path) -> None:
        """Inspect a project's data and runs; follow an active run."""
        self.summary = None
        self.estimate.cancel()
        self.data_line.setText("Inspecting the data …")
        self._update_models()
        runs = self.run_list.refresh(folder)
        active = [run for run in runs if run.is_active]
        if active and not self.run_view.running:
            self.follow(active[0])
            show_info(f"Following the active training run {active[0].name}.")
        self._offer_to_resume(runs)
        self._update_controls()
        self._inspect(folder)

    def _inspect(self, folder: Path) -> None:
        """Read the data of what is to be trained."""
        task, model = self.task_name, self.classifier_choice.selected
        parent = str(model) if isinstance(model, (str, Path)) and str(model) else None
        self._data_task.start(
            lambda report: inspect_project(folder, report, task, parent),
            self._on_project_inspected,
            self._on_project_refused,
        )

    @property
    def task_name(self) -> str:
        """What is to be trained: "detect" or "classify"."""
        return "classify" if self.train_classifier.isChecked() else "detect"

    def _task_chosen(self) -> None:
        """Another kind of model is to be trained: another form, other data."""
        self._show_form()
        self._inspect_again()

    def _inspect_again(self) -> None:
        folder = self.project_choice.project
        self.summary = None
        self.estimate.cancel()
        if folder is not None:
            self.data_line.setText("Inspecting the data …")
            self._inspect(folder)
        self._update_controls()

    def _show_form(self) -> None:
        classifies = self.task_name == "classify"
        self._initial_model.setRowVisible(self.model_choice, not classifies)
        self._initial_model.setRowVisible(self.classifier_choice, classifies)
        self.form.setVisible(not classifies)
        self.classifier_form.setVisible(classifies)
        self.classifier_form.set_new(self.classifier_choice.selected == NEW_CLASSIFIER)

    def _classifier_chosen(self) -> None:
        """A classifier keeps the types that it knows, so the data differ with it."""
        self._show_form()
        if self.task_name == "classify":
            self._inspect_again()

    def _on_project_inspected(
        self, inspected: tuple[DatasetSummary | CropSummary, list[str]]
    ) -> None:
        self.summary, devices = inspected
        self.run_view.shown_above = self.summary.notes[:3]
        self.data_line.setText("\n".join([self.summary.sentence(), *self.run_view.shown_above]))
        self.form.set_devices(devices)
        self.classifier_form.set_devices(devices)
        self._preselect_scope()
        self._update_controls()
        self.estimate.update_soon()

    def _preselect_scope(self) -> None:
        """By the amount of data, and whether the initial model knows its classes."""
        if self.task_name == "detect" and self.summary and self.model_choice.selected is not None:
            summary = cast("DatasetSummary", self.summary)
            images = len(summary.dataset.splits["train"])
            self.form.preselect_scope(summary.scope(self.model_choice.classes), images)

    def _on_project_refused(self, error: BaseException) -> None:
        self.data_line.setText("This project cannot be used for training:")
        self._update_controls()

    def _offer_to_resume(self, runs: list[Run]) -> None:
        interrupted = bool(runs) and runs[0].state is RunState.INTERRUPTED
        self.resume_line.setVisible(interrupted)
        if interrupted:
            self.resume_line.setText(
                f"{runs[0].name} was interrupted after epoch {runs[0].epoch}: resume it below."
            )
            self.run_list.header.setChecked(True)

    def _estimate_request(self) -> EstimateRequest | None:
        """What to estimate the duration of, None where there is nothing."""
        project, (model, settings) = self.project_choice.project, self._chosen()
        if project is None or model is None or self.summary is None or self.run_view.running:
            return None
        return EstimateRequest(project, model, settings, self.summary.dataset)

    def _chosen(self) -> tuple[InitialModel | None, dict[str, Any]]:
        """The initial model and the settings of what is to be trained."""
        if self.task_name == "detect":
            return self.model_choice.selected, self.form.settings()
        model = self.classifier_choice.selected
        return model, self.classifier_form.settings(model == NEW_CLASSIFIER)

    # --- training --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a run with the present settings."""
        project, (model, settings) = self.project_choice.project, self._chosen()
        if project is None or model is None or self.run_view.running:
            return
        self.estimate.cancel()
        self.start_button.setEnabled(False)
        self._create_task.start(
            lambda report: create_run(project, model, settings),
            self._launch,
            lambda error: self._update_controls(),
        )

    def resume(self, run: Run) -> None:
        """Resume a run that ended early, on the selected device."""
        if self.run_view.running:
            notify_error("Another training run is active; stop it or let it finish first.")
            return
        try:
            chosen = self.classifier_form if run.task == "classify" else self.form
            set_run_device(run.path, chosen.device.value)
        except (ValueError, OSError) as error:
            notify_error(error)
            return
        self._launch(run.path)

    def _launch(self, path: Path) -> None:
        process = self._show_run(path)
        process.start()
        self._update_controls()
        self.run_list.refresh()
        self.run_list.set_starting(path)

    def follow(self, run: Run) -> None:
        """Follow a run that is already active in its process."""
        if self.run_view.folder == run.path and self.run_view.running:
            return
        process = self._show_run(run.path)
        if not process.attach(run):
            self.run_view.detach()
            self.run_view.set_visible(False)
            self.run_list.refresh()
        self._update_controls()

    def _show_run(self, path: Path) -> TrainingProcess:
        self.comparison.clear()
        self.start_bar.set_message("")
        self.resume_line.hide()
        process = TrainingProcess(path, self)
        self.run_view.follow(process)
        return process

    def _on_run_ended(self, end: RunEnd) -> None:
        folder = self.run_view.folder
        self._update_models()
        self.run_list.set_starting(None)
        self.run_list.refresh()
        if end.state in (RunState.FAILED, RunState.INTERRUPTED, RunState.DIVERGED):
            self.start_bar.show_error(ValueError(end.message or "The training failed."))
        if end.state is RunState.INTERRUPTED:
            self.run_list.header.setChecked(True)
        elif folder is not None and (folder / "best.safetensors").exists():
            self.comparison.evaluate_run(folder)
        self._update_controls()
        self.estimate.update_soon()

    # --- the result ------------------------------------------------------------------------------

    def _show_result(self, run: Run) -> None:
        if not self.run_view.running:
            self.run_view.set_visible(False)
            self.comparison.evaluate_run(run.path)
            self._update_controls()

    def _on_model_kept(self, path: Path) -> None:
        self._show_settings()
        later = " The comparison continues." if self.comparison.kept_path == path else ""
        use = "classification" if self.comparison.kept_kind == CLASSIFIER else "detection"
        self.start_bar.set_message(f"Saved as {path.stem} and loaded for {use}.{later}")
        self._update_models()

    def _on_model_discarded(self, folder: Path) -> None:
        self._show_settings()
        self.start_bar.set_message(
            f"Discarded. The run stays in runs/{folder.name} until you delete it below."
        )

    def _show_settings(self) -> None:
        """Back to the settings, for the next run."""
        self.run_view.detach()
        self.run_view.set_visible(False)
        self._update_controls()
        self.estimate.update_soon()

    # --- state of the controls -------------------------------------------------------------------

    def _model_loaded(self, model: Detector | None = None) -> None:
        """Another panel has loaded a model: start from that one."""
        self._update_models()
        if model is not None:
            self.model_choice.list.setCurrentIndex(0)

    def _classifier_loaded(self, model: Classifier | None = None) -> None:
        """Another panel has loaded a classifier: start from that one."""
        self._update_models()
        if model is not None:
            self.classifier_choice.list.setCurrentIndex(0)

    def _update_models(self) -> None:
        shared = get_session(self.viewer)
        project = self.project_choice.project
        self.model_choice.set_models(shared.model, shared.model_key, project)
        self.classifier_choice.set_models(shared.classifier, shared.classifier_key, project)

    def _update_controls(self) -> None:
        running = self.run_view.running
        self.settings.setVisible(not running and not self.comparison.pending)
        self.project_choice.setEnabled(not running)
        reason = ""
        if running:
            reason = "A training run is active."
        elif self.project_choice.project is None:
            reason = "Choose a project first."
        elif self.summary is None and self._data_task.running:
            reason = "The project's data are being inspected."
        elif self.summary is None:
            reason = "This project cannot be used for training, see above."
        self.start_reason.update_button(reason)

    def on_closed(self) -> None:
        """The training continues; the panel follows it again when it is opened the next time."""
        get_session(self.viewer).model_changed.disconnect(self._model_loaded)
        self.close_confirmation.end()
        self.estimate.cancel()
        self.run_view.detach()
