"""What is chosen in Compare normalizations: methods, and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from napari.layers import Image
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QCheckBox, QFileDialog, QGridLayout, QHBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.images.files import IMAGE_SUFFIXES
from napari_beerlanet.core.normalization.methods import METHODS, SUFFIX
from napari_beerlanet.samples import PHOTOGRAPHS, photograph_path
from napari_beerlanet.ui.common.controls import button, combo_box, plain_tooltip
from napari_beerlanet.ui.common.recent import RecentPaths
from napari_beerlanet.ui.normalize.job import Reference
from napari_beerlanet.ui.viewer.planes import current_plane

if TYPE_CHECKING:
    from napari import Viewer

RECENT_REFERENCES = RecentPaths("references", "references.json")
"""Images and fitted normalizers that were used as references."""
_METHOD_COLUMNS = 2  # check boxes side by side
_SEVERAL = "macenko-multi"  # with one reference it is Macenko
OFFERED_METHODS = [method for method in METHODS.values() if method.name != "none"]
"""The image itself is shown anyway."""
_Paths = tuple[Path, ...]


def remember_reference(path: Path) -> None:
    """Offer a file first the next time; samples are offered anyway."""
    if path not in [photograph_path(name) for name in PHOTOGRAPHS]:
        RECENT_REFERENCES.add(path.absolute())


class MethodChoice(QWidget):
    """A check box for each method; `changed` when others are checked."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, QCheckBox] = {}
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        for place, method in enumerate(OFFERED_METHODS):
            box = QCheckBox(method.label)
            box.setToolTip(f"{method.description} ({method.licence})")
            box.setChecked(method.needs_template and method.name != _SEVERAL)
            box.toggled.connect(lambda *_: self.changed.emit())
            layout.addWidget(box, *divmod(place, _METHOD_COLUMNS))
            self.boxes[method.name] = box

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the checked methods."""
        return tuple(name for name, box in self.boxes.items() if box.isChecked())

    @property
    def needs_reference(self) -> bool:
        """Whether one of them does."""
        return any(METHODS[name].needs_template for name in self.chosen)


class ReferencePicker(QWidget):
    """What the image shall look like: another open image, a recent file, files, or a sample.

    `changed` when another one is chosen. As long as the user has chosen none, it is the topmost
    other image, or else the file that was used last.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.list = combo_box(
            "The image whose colours the others get: another open image, a file, a sample, or a "
            "saved normalizer. Files can also be dropped here.",
            12,
            expanding=True,
        )
        self.open = button(
            "Open …",
            "Choose an image file, several of the same stain, or a saved normalizer.",
            self.open_dialog,
        )
        self._images: list[ref[Image]] = []
        self._opened: list[_Paths] = []
        self._keys: list[ref[Image] | _Paths] = []
        self._chosen: ref[Image] | _Paths | None = None  # by the user
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)
        self.setAcceptDrops(True)
        self.list.activated.connect(self._activated)
        self.offer([])

    def offer(self, images: Sequence[Image]) -> None:
        """Offer these layers beside files and samples; the user's choice stays if it is there."""
        self._images = [ref(image) for image in reversed(images)]
        before = self.key
        recent = [(path,) for path in RECENT_REFERENCES.paths() if path.is_file()]
        files = list(dict.fromkeys([*self._opened, *recent]))
        self._keys = [*self._images, *files, *((photograph_path(name),) for name in PHOTOGRAPHS)]
        with signals_blocked(self.list):
            self.list.clear()
            for place, key in enumerate(self._keys):
                text, tip = _described(key)
                self.list.addItem(text)
                self.list.setItemData(place, plain_tooltip(tip), Qt.ItemDataRole.ToolTipRole)
            places = [k for k, key in enumerate(self._keys) if key == self._chosen]
            self.list.setCurrentIndex(places[0] if places else 0)
        if self.key != before:
            self.changed.emit()

    @property
    def key(self) -> ref[Image] | tuple[Path, ...] | None:
        """The chosen layer or files, None while there are none."""
        place = self.list.currentIndex()
        return self._keys[place] if 0 <= place < len(self._keys) else None

    @property
    def is_normalizer(self) -> bool:
        """Whether a saved normalizer is chosen, which is of one method."""
        return isinstance(self.key, tuple) and Reference(paths=self.key).is_normalizer

    def reference(self, viewer: Viewer) -> Reference | None:
        """What is chosen, for a thread."""
        key = self.key
        layer = key() if isinstance(key, ref) else None
        if layer is not None:
            return Reference(current_plane(layer, viewer))
        return Reference(paths=key) if isinstance(key, tuple) else None

    def choose_files(self, paths: Sequence[str | Path]) -> None:
        """Choose images, or a saved normalizer, as the user does with *Open …*."""
        self._chosen = tuple(Path(path) for path in paths)
        if self._chosen not in self._opened:
            self._opened.insert(0, self._chosen)
        self.offer([image for weak in self._images[::-1] if (image := weak()) is not None])

    def choose_image(self, image: Image) -> None:
        """Choose one of the offered layers."""
        self._chosen = ref(image)
        self.offer([one for weak in self._images[::-1] if (one := weak()) is not None])

    def open_dialog(self) -> None:
        """Let the user choose files."""
        images = " ".join(f"*{suffix}" for suffix in sorted(IMAGE_SUFFIXES))
        kinds = f"Images and normalizers ({images} *{SUFFIX})"
        paths, _ = QFileDialog.getOpenFileNames(self, "Choose a reference", "", kinds)
        if paths:
            self.choose_files(paths)

    def _activated(self, place: int) -> None:
        self._chosen = self.key
        self.changed.emit()

    def dragEnterEvent(self, event: Any) -> None:
        """Accept files."""
        if event.mimeData().hasUrls():
            event.acceptProposedAction()

    def dropEvent(self, event: Any) -> None:
        """Choose the files that are dropped."""
        event.acceptProposedAction()
        self.choose_files([url.toLocalFile() for url in event.mimeData().urls()])


def _described(key: ref[Image] | _Paths) -> tuple[str, str]:
    """Name and tooltip of a reference."""
    if not isinstance(key, tuple):
        layer = key()
        name = layer.name if layer is not None else ""
        return name, f"The open image “{name}”."
    samples = {photograph_path(name): name for name in PHOTOGRAPHS}
    if key[0] in samples:
        return f"Sample: {samples[key[0]]}", "An image that comes with this plugin."
    return (key[0].name if len(key) == 1 else f"{len(key)} images"), "\n".join(map(str, key))
