"""The forms of the Fine-tune panel: project, initial model, what to train, hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QComboBox,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.checkpoints.checkpoint import model_kind, packaged_models, read_info
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR
from napari_beerlanet.core.checkpoints.model_card import training_size
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.project.files import MODELS_DIR
from napari_beerlanet.core.training.runs import list_runs
from napari_beerlanet.core.training.settings import LENGTHS, RunSettings, TrainSettings
from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    button,
    combo_box,
    field_widget,
    form,
    heading,
    hint,
    not_none,
    plain_tooltip,
    wrapping_label,
)
from napari_beerlanet.ui.common.recent import add_recent_project, recent_projects
from napari_beerlanet.ui.finetune.start import NEW_CLASSIFIER

if TYPE_CHECKING:
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.ui.finetune.start import InitialModel

SCOPES = {
    "stain": ("Stain only", "Same cells, different colours. The safest; one image may be enough."),
    "head": ("Head", "New classes, or classes annotated differently. The stains stay as learned."),
    "all": ("Everything", "Best with five or more images that look different from before."),
}
"""The scopes of `TrainSettings`: the name of each on the screen, and when to use it."""

_LABELS = {
    "length": "Length",
    "epochs": "Epochs",
    "image_size": "Image size",
    "batch": "Batch size",
    "learning_rate": "Learning rate",
    "jitter": "Colour jitter",
    "seed": "Seed",
    "device": "Device",
}
_OPTIONAL = ("epochs", "image_size", "learning_rate")  # None leaves them to the schedule

_BACKBONES = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "shufflenet_v2_x0_5",
)
_FRONT_ENDS = {
    "beerlanet": "BeerLaNet",
    "none": "None",
    "grey": "Grey",
    "lstainnorm": "LStainNorm",
}
_CLASSIFIER_LABELS = {
    "backbone": "Backbone",
    "front_end": "Front end",
    "input_size": "Input size",
    "epochs": "Epochs",
    "batch": "Batch size",
    "learning_rate": "Learning rate",
    "jitter": "Colour jitter",
    "seed": "Seed",
    "device": "Device",
}
_OF_NETWORK = ("backbone", "front_end", "input_size")  # a model to start from has them already


class FineTuneForm(QWidget):
    """The `TrainSettings` that users choose, all but model and data; `changed` when one changes.

    Defaults, bounds and tooltips are those of `TrainSettings`; each widget has the setting's name.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._scope_is_chosen = False
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(heading("What to train"))
        self.scopes = self._scope_buttons(layout)
        self.length = field_widget(
            TrainSettings, "length", choices=[(name.capitalize(), name) for name in LENGTHS]
        )
        self.epochs = _optional_spin_box(TrainSettings, "epochs", max=10_000)
        self.image_size = _optional_spin_box(TrainSettings, "image_size", max=4096, step=32)
        self.batch = field_widget(TrainSettings, "batch", max=512)
        self.learning_rate = _optional_spin_box(TrainSettings, "learning_rate", max=1, step=0.0001)
        self.jitter = _jitter_choice(TrainSettings)
        self.seed = field_widget(TrainSettings, "seed", max=2**31 - 1)
        auto = TrainSettings.default("device")
        self.device: Any = field_widget(
            TrainSettings, "device", widget_type="ComboBox", choices=[auto], value=auto
        )
        self.advanced = CollapsibleGroup("Advanced")
        lines, advanced_lines = form(), form()
        layout.addLayout(lines)
        layout.addWidget(self.advanced)
        self.advanced.body.addLayout(advanced_lines)
        for name, label in _LABELS.items():
            widget = getattr(self, name)
            (lines if name == "length" else advanced_lines).addRow(label, widget.native)
            widget.changed.connect(lambda _: self.changed.emit())

    def _scope_buttons(self, layout: QVBoxLayout) -> dict[str, QRadioButton]:
        group, buttons = QButtonGroup(self), {}
        for scope, (name, explanation) in SCOPES.items():
            radio = QRadioButton(name)
            radio.setToolTip(explanation)
            group.addButton(radio)
            line = wrapping_label(explanation)
            line.setContentsMargins(22, 0, 0, 2)
            layout.addWidget(radio)
            layout.addWidget(line)
            buttons[scope] = radio
        buttons[TrainSettings.default("scope")].setChecked(True)
        group.buttonToggled.connect(lambda _, on: self.changed.emit() if on else None)
        group.buttonClicked.connect(self._scope_chosen)
        self.scope_line = hint()
        layout.addWidget(self.scope_line)
        return buttons

    def preselect_scope(self, scope: str, images: int) -> None:
        """Select what suits so many training images, unless the user has chosen otherwise."""
        if not self._scope_is_chosen:
            self.scopes[scope].setChecked(True)
            number = count_of(images, "training image")
            self.scope_line.setText(f"“{SCOPES[scope][0]}” is preselected for {number}.")

    def _scope_chosen(self) -> None:
        self._scope_is_chosen = True
        self.scope_line.setText("")

    def set_devices(self, names: list[str]) -> None:
        """Offer the devices of this machine."""
        self.device.choices = list(dict.fromkeys([*self.device.choices, *names]))

    @property
    def scope(self) -> str:
        """The selected scope."""
        return next(scope for scope, radio in self.scopes.items() if radio.isChecked())

    def settings(self) -> dict[str, Any]:
        """By the names of `TrainSettings`; None leaves one to the schedule."""
        values = {name: getattr(self, name).value for name in _LABELS}
        for name in _OPTIONAL:
            (kind,) = TrainSettings.spec(name).types
            is_auto = values[name] == getattr(self, name).min
            values[name] = None if is_auto else kind(values[name])
        return {"scope": self.scope, **values}


class ClassifierForm(QWidget):
    """The `ClassifierTrainSettings` that users choose; `changed` when one changes.

    Without a model to start from (`set_new`), backbone, its weights and the front end are chosen.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        of = ClassifierTrainSettings
        self.backbone = _BackboneChoice()
        self.front_end = field_widget(
            of, "front_end", choices=[(label, key) for key, label in _FRONT_ENDS.items()]
        )
        self.input_size = field_widget(of, "input_size", step=16)
        self.epochs = _optional_spin_box(of, "epochs", max=10_000)
        self.batch = _optional_spin_box(of, "batch", max=4096)
        self.learning_rate = _optional_spin_box(of, "learning_rate", max=1, step=0.0001)
        self.jitter = _jitter_choice(of)
        self.seed = field_widget(of, "seed", max=2**31 - 1)
        auto = of.default("device")
        self.device: Any = field_widget(
            of, "device", widget_type="ComboBox", choices=[auto], value=auto
        )
        self.weights = _PathEntry(
            "Random weights", of.spec("weights").description, "Weights (*.pt *.pth *.safetensors)"
        )
        self.reference = _PathEntry("No reference crops", of.spec("reference").description, None)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        self.network, self.advanced = QWidget(), CollapsibleGroup("Advanced")
        network_lines, lines, advanced_lines = form(), form(), form()
        self.network.setLayout(network_lines)
        network_lines.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.network)
        layout.addLayout(lines)
        layout.addWidget(self.advanced)
        self.advanced.body.addLayout(advanced_lines)
        for name, label in _CLASSIFIER_LABELS.items():
            widget = getattr(self, name)
            to = network_lines if name in _OF_NETWORK else advanced_lines
            to.addRow(label, widget.native)
            widget.changed.connect(lambda _: self.changed.emit())
        network_lines.insertRow(1, "Weights", self.weights)
        lines.addRow("Reference crops", self.reference)
        for entry in (self.weights, self.reference):
            entry.changed.connect(self.changed)

    def set_new(self, new: bool) -> None:
        """Whether a new classifier is trained, from a backbone."""
        self.network.setVisible(new)

    def set_devices(self, names: list[str]) -> None:
        """Offer the devices of this machine."""
        self.device.choices = list(dict.fromkeys([*self.device.choices, *names]))

    def settings(self, new: bool) -> dict[str, Any]:
        """By the names of `ClassifierTrainSettings`; None leaves one to the number of crops."""
        values = {name: getattr(self, name).value for name in _CLASSIFIER_LABELS}
        for name in ("epochs", "batch", "learning_rate"):
            kind = ClassifierTrainSettings.spec(name).types[0]
            is_auto = values[name] == getattr(self, name).min
            values[name] = None if is_auto else kind(values[name])
        values["weights"] = self.weights.path or None
        if not new:
            values = {
                name: v for name, v in values.items() if name not in (*_OF_NETWORK, "weights")
            }
        return {"task": "classify", "reference": self.reference.path or None, **values}


class _BackboneChoice(QComboBox):
    """Common backbones, and any other that the user writes; `value` and `changed` as magicgui's."""

    changed = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.setEditable(True)
        self.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.setToolTip(ClassifierTrainSettings.spec("backbone").description)
        self.addItems(_BACKBONES)
        self.value = ClassifierTrainSettings.default("backbone")
        self.activated.connect(lambda _: self.changed.emit(self.value))
        line = not_none(self.lineEdit())
        line.setToolTip(self.toolTip())
        line.editingFinished.connect(lambda: self.changed.emit(self.value))

    @property
    def native(self) -> QComboBox:
        """The widget itself."""
        return self

    @property
    def value(self) -> str:
        """The name of a network of torchvision, as it is written."""
        return self.currentText().strip()

    @value.setter
    def value(self, name: str) -> None:
        self.setEditText(name)
        self.changed.emit(name)


class _PathEntry(QWidget):
    """The path of a file, or of a folder if there is no `kinds`; `changed` when it is another."""

    changed = Signal()

    def __init__(self, placeholder: str, tooltip: str, kinds: str | None) -> None:
        super().__init__()
        self._kinds, self._tooltip = kinds, tooltip
        self.text = QLineEdit()
        self.text.setPlaceholderText(placeholder)
        self.text.setToolTip(tooltip)
        self.text.editingFinished.connect(self.changed)
        label = "Folder …" if kinds is None else "File …"
        self.open = button(label, tooltip, self._browse)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.text, 1)
        layout.addWidget(self.open)

    @property
    def path(self) -> str:
        """What is entered, "" for nothing."""
        return self.text.text().strip()

    def set_path(self, path: str | Path) -> None:
        """Enter a path."""
        self.text.setText(str(path))
        self.changed.emit()

    def _browse(self) -> None:
        if self._kinds is None:
            path = QFileDialog.getExistingDirectory(self, "Open a folder")
        else:
            path, _ = QFileDialog.getOpenFileName(self, "Open a file", "", self._kinds)
        if path:
            self.set_path(path)


def _jitter_choice(settings: type[RunSettings]) -> Any:
    """How the colours of training images vary."""
    usual = settings.default("jitter")
    kinds = [("Stains and light", usual), ("HED", "hed"), ("None", "none")]
    return field_widget(settings, "jitter", widget_type="ComboBox", choices=kinds, value=usual)


def _optional_spin_box(settings: type[RunSettings], name: str, **options: Any) -> Any:
    """A spin box of a setting that may be None, which is “auto”: its lowest value.

    Also for whole numbers it is one of floats: magicgui's of integers shows no such text.
    """
    spec = settings.spec(name)
    lowest = spec.above if spec.minimum is None else spec.minimum - 1
    box = field_widget(
        settings, name, widget_type="FloatSpinBox", min=lowest, value=lowest, **options
    )
    box.native.setDecimals(6 if float in spec.types else 0)
    box.native.setSpecialValueText("auto")
    box.native.setKeyboardTracking(False)
    return box


class _ComboBoxWithButton(QWidget):
    """A combo box that grows with the dock, and a button beside it."""

    def __init__(
        self, tooltip: str, label: str, button_tip: str, open_: Callable[[], None]
    ) -> None:
        super().__init__()
        self.list = combo_box(tooltip, 6)
        self.list.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.open = button(label, button_tip, open_)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)


class ProjectChoice(_ComboBoxWithButton):
    """Recent projects, and a button to open another; `chosen` carries the folder."""

    chosen = Signal(object)

    def __init__(self) -> None:
        tooltip = "A folder with a data.yaml, as the tab “Annotate” creates it."
        super().__init__(tooltip, "Open …", "Open the folder of another project.", self._browse)
        self._paths: list[Path] = []
        self._set_paths(recent_projects(), None)
        self.list.activated.connect(lambda index: self.choose(self._paths[index]))

    @property
    def project(self) -> Path | None:
        """The selected folder."""
        index = self.list.currentIndex()
        return self._paths[index] if 0 <= index < len(self._paths) else None

    def existing(self) -> list[Path]:
        """The listed projects that still exist."""
        return [path for path in self._paths if (path / "data.yaml").is_file()]

    def choose(self, path: str | Path) -> None:
        """Select a folder, or the data.yaml in it."""
        folder = Path(path).absolute()
        folder = folder.parent if folder.suffix in (".yaml", ".yml") else folder
        if (folder / "data.yaml").is_file():
            add_recent_project(folder)
        self._set_paths([folder, *(one for one in self._paths if one != folder)], folder)
        self.chosen.emit(folder)

    def _set_paths(self, paths: list[Path], current: Path | None) -> None:
        self._paths = paths
        with signals_blocked(self.list):
            self.list.clear()
            for index, path in enumerate(paths):
                self.list.addItem(path.name or str(path))
                tip = plain_tooltip(str(path))
                self.list.setItemData(index, tip, Qt.ItemDataRole.ToolTipRole)
            self.list.setCurrentIndex(paths.index(current) if current in paths else -1)
            self.list.setPlaceholderText("No project selected")

    def _browse(self) -> None:
        start = str(self.project or Path.home())
        path = QFileDialog.getExistingDirectory(self, "Open project folder", start)
        if path:
            self.choose(path)


class InitialModelChoice(_ComboBoxWithButton):
    """Initial models: the loaded one, packaged ones, the project's own, and the best of its runs.

    `kind`: "detector" or "classifier"; others are not offered. `selected` is a path or name for
    `load_checkpoint`, the loaded model if it has neither, or `NEW_CLASSIFIER`.
    """

    changed = Signal()

    def __init__(self, kind: str = DETECTOR) -> None:
        self.kind = kind
        tooltip = "The model to start from. It is not changed: training creates a new one."
        super().__init__(tooltip, "File …", "Start from a model file.", self._browse)
        self._sources: list[InitialModel] = []
        self._file: Path | None = None
        self.list.currentIndexChanged.connect(lambda _: self.changed.emit())

    @property
    def selected(self) -> InitialModel | None:
        """The selected model, None where there is none."""
        index = self.list.currentIndex()
        return self._sources[index] if 0 <= index < len(self._sources) else None

    @property
    def classes(self) -> list[str]:
        """The classes of the selected model; none of a file that does not say."""
        model = self.selected
        if model is None or model == NEW_CLASSIFIER:
            return []
        info = _info_of_file(model) if isinstance(model, (str, Path)) else model.info
        return [str(name) for name in info.get("classes", ())]

    def set_models(
        self,
        loaded: Detector | Classifier | None = None,
        key: str | None = None,
        project: Path | None = None,
    ) -> None:
        """List the models that exist now; the selection stays if it is among them."""
        before = self.selected
        offered: list[tuple[str, InitialModel]] = []
        if loaded is not None:
            name = loaded.info.get("name") or "unnamed"
            offered.append((f"{name} (loaded)", _reload_source(loaded, key)))
        offered += [(f"{name} (packaged)", name) for name in packaged_models(self.kind)]
        if project is not None:
            saved = _saved_models(project, self.kind)
            offered += [(_describe_saved_model(path), path) for path in saved]
            runs = list_runs(project, "classify" if self.kind == CLASSIFIER else "detect")
            offered += [(f"{run.name} (best epoch)", run.best) for run in runs if run.best]
        if self._file is not None:
            offered.append((self._file.name, self._file))
        if self.kind == CLASSIFIER:
            offered.append(("New, from a backbone", NEW_CLASSIFIER))
        self._sources = [source for _, source in offered]
        same = [k for k, source in enumerate(self._sources) if source is before or source == before]
        with signals_blocked(self.list):
            self.list.clear()
            self.list.addItems([text for text, _ in offered])
            self.list.setCurrentIndex(same[0] if same and before is not None else 0)
        if self.selected is not before:
            self.changed.emit()

    def choose_file(self, path: str | Path) -> None:
        """Start from a model file."""
        self._file = Path(path).absolute()
        if self._file not in self._sources:
            place = len(self._sources) - (self.kind == CLASSIFIER)
            self._sources.insert(place, self._file)
            self.list.insertItem(place, self._file.name)
        self.list.setCurrentIndex(self._sources.index(self._file))

    def _browse(self) -> None:
        kinds = "Models (*.safetensors *.pt)"
        path, _ = QFileDialog.getOpenFileName(self, "Open initial model", "", kinds)
        if path:
            self.choose_file(path)


def _describe_saved_model(path: Path) -> str:
    """The name of a project's model, and on how much it was trained."""
    size = training_size(_info_of_file(path))
    return f"{path.stem} (project{f', {size}' if size else ''})"


def _info_of_file(path: str | Path) -> dict[str, Any]:
    """What the header of a file says; nothing where there is none."""
    try:
        return read_info(path)
    except (FileError, OSError):
        return {}


def _saved_models(project: Path, kind: str) -> list[Path]:
    files = sorted((project / MODELS_DIR).glob("[!.]*.safetensors"))
    return [path for path in files if model_kind(_info_of_file(path)) == kind]


def _reload_source(loaded: Detector | Classifier, key: str | None) -> InitialModel:
    """The path or name that a loaded model can be loaded from again, or the model itself."""
    if key and (key in packaged_models() or Path(key).is_file()):
        return key
    return loaded
