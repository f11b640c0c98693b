"""Results of a batch: a table and a plot of the counts of all images, and each to be opened."""

from __future__ import annotations

import html
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import pyqtgraph as pg
from napari.layers import Image
from qtpy.QtCore import QAbstractTableModel, QModelIndex, Qt, QTimer
from qtpy.QtGui import QColor, QFont
from qtpy.QtWidgets import (
    QComboBox,
    QFileDialog,
    QHeaderView,
    QLabel,
    QScrollArea,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.batch.counts import ImageCounts, StudyCounts
from napari_beerlanet.core.boxes.classes import assign_colours, class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.core.images.slide import open_slide
from napari_beerlanet.ui.common.controls import (
    PlotTheme,
    button,
    copy_text,
    heading,
    not_none,
    row,
    wrapping_label,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer.layers import user_images

if TYPE_CHECKING:
    from napari.viewer import Viewer

_OPEN, _IMAGE, _TOTAL, _PER_MM2, _PARASITAEMIA = "", "image", "all cells", "per mm²", "parasitaemia"
_REMARKS = "remarks"
_TYPE_PREFIX = "type "  # of the column of a cell type, as in the CSV
_MAX_LINES = 10  # of the table, above which it scrolls
_LINE_PX = 22
_MAX_IMAGE_PX = 140  # width of the names; longer ones are elided, with the path as tooltip
_MAX_TICK_CHARACTERS = 30  # of all names under the bars, which would overlap with more
_MAX_EAGER_PIXELS = 4_000_000  # of an image that is read at once
_SORT_ROLE = int(Qt.ItemDataRole.UserRole)
_NO_PARENT = QModelIndex()


class CountsModel(QAbstractTableModel):
    """The table of a study's counts: sortable, with the sums always last."""

    def __init__(self, study: StudyCounts) -> None:
        super().__init__()
        self.study = study
        self.images: list[ImageCounts] = list(study.images)
        self._types = {f"{_TYPE_PREFIX}{name}": name for name in study.types}
        self.columns = [_OPEN, _IMAGE, _TOTAL, *study.classes, *self._types]
        self.columns += [_PER_MM2] if study.has_areas else []
        self.columns += [_PARASITAEMIA] if study.sum.parasitaemia is not None else []
        self.columns += [_REMARKS]

    def rowCount(self, parent: QModelIndex = _NO_PARENT) -> int:
        """Qt's own name: the images, and their sum."""
        return 0 if parent.isValid() else len(self.images) + 1

    def columnCount(self, parent: QModelIndex = _NO_PARENT) -> int:
        """Qt's own name."""
        return 0 if parent.isValid() else len(self.columns)

    def headerData(
        self,
        section: int,
        orientation: Qt.Orientation,
        role: int = Qt.ItemDataRole.DisplayRole,
    ) -> Any:
        """Qt's own name: names of the columns."""
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return self.columns[section]
        return None

    def image_at(self, line: int) -> ImageCounts:
        """The image of a line, or the sums."""
        return self.images[line] if line < len(self.images) else self.study.sum

    def data(self, index: QModelIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Qt's own name: text, alignment, style, and the whole of a remark as a tooltip."""
        image, column = self.image_at(index.row()), self.columns[index.column()]
        is_sum = image is self.study.sum
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(image, column)
        if role == _SORT_ROLE:
            return self._value(image, column)
        if role == Qt.ItemDataRole.TextAlignmentRole and column not in (_OPEN, _IMAGE, _REMARKS):
            return Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.FontRole:
            font = QFont()
            font.setBold(is_sum)
            font.setUnderline(column == _OPEN and not is_sum)
            return font
        if role == Qt.ItemDataRole.ToolTipRole:
            return self._tooltip(image, column)
        return None

    def _value(self, image: ImageCounts, column: str) -> Any:
        if column in (_IMAGE, _OPEN):
            return image.name
        if column == _REMARKS:
            return " ".join(self.study.reservations()) if image is self.study.sum else image.remark
        if not image.counted:
            return None
        if column == _TOTAL:
            return image.total
        if column == _PER_MM2:
            return image.per_mm2()
        if column == _PARASITAEMIA:
            return None if image.parasitaemia is None else image.parasitaemia.share
        if column in self._types:
            return image.types.get(self._types[column], 0)
        return image.counts.get(column, 0)

    def _text(self, image: ImageCounts, column: str) -> str:
        if column == _OPEN:
            return "Open" if image.counted and image is not self.study.sum else ""
        value = self._value(image, column)
        if column == _PARASITAEMIA and image.parasitaemia is not None:
            return f"{100 * image.parasitaemia.share:.2f} %"
        if column == _IMAGE and image is not self.study.sum and not image.counted:
            return f"{value} ({image.status})"
        if isinstance(value, float):
            return f"{value:,.0f}"
        return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "–")

    def _tooltip(self, image: ImageCounts, column: str) -> str:
        if column == _OPEN and image.counted and image is not self.study.sum:
            return "Open the image with its boxes."
        if column == _PER_MM2:
            interval = image.per_mm2_interval()
            return (
                ""
                if interval is None
                else f"95 % interval {interval[0]:,.0f} to {interval[1]:,.0f} per mm² (Poisson), "
                f"on {image.area:.3g} mm²"
            )
        if column == _PARASITAEMIA and image.parasitaemia is not None:
            return " ".join(
                [f"95 % interval (Wilson): {image.parasitaemia}.", *image.parasitaemia.warnings]
            )
        share = image.type_shares.get(self._types.get(column, ""))
        if share is not None:
            return f"{share} of {share.whole:,} classified cells; 95 % interval (Wilson)"
        return image.path if column == _IMAGE else self._text(image, column)

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        """Qt's own name: sort the images; those without a value come last, and the sums after."""
        name, down = self.columns[column], order == Qt.SortOrder.DescendingOrder
        values = {id(image): self._value(image, name) for image in self.images}
        known = [image for image in self.images if values[id(image)] is not None]
        others = [image for image in self.images if values[id(image)] is None]
        self.layoutAboutToBeChanged.emit()
        known.sort(key=lambda image: values[id(image)], reverse=down)
        self.images = [*known, *others]
        self.layoutChanged.emit()


@dataclass(frozen=True)
class OpenedResult:
    """What is shown of a result: data and settings of the image layer, and the boxes."""

    counts: ImageCounts
    pixels: Any
    settings: dict[str, Any]
    detections: Detections | None


class BatchResults(QWidget):
    """Table and plot of a study's counts; hidden while there are none.

    `bring_into_view`: the next counts are those of a run that has just ended, so scroll to them.
    """

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self._viewer: Viewer = panel.viewer
        self.study: StudyCounts | None = None
        self.model: CountsModel | None = None
        self._read_task, self._open_task = panel.task(), panel.task()
        self._folder: Path | None = None
        self.bring_into_view = False
        self._opened: WeakKeyDictionary[Image, Path | None] = WeakKeyDictionary()
        self.summary, self.reservations = wrapping_label(), wrapping_label()
        self.legend = QLabel()
        self.legend.setWordWrap(True)
        self.bars = QComboBox()
        self.bars.setToolTip("What the bars of the plot show.")
        self.bars.addItems(["Cells by type", "Cells by class"])
        self.bars.currentIndexChanged.connect(self._draw)
        self.table = self._make_table()
        self.open_button = button(
            "Open", "Open the image of the selected line with its boxes.", self._open_selected
        )
        self.copy_button = button(
            "Copy table", "Copy the table for a spreadsheet.", self.copy_table
        )
        self.export_button = button("Export CSV …", "Save the table as a CSV file.", self._browse)
        self.bar = TaskProgressBar(self._open_task)
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)
        buttons = row(self.open_button, self.copy_button, self.export_button)
        parts = (self.summary, self.reservations, self.table, self.bars, self.legend, buttons)
        for part in (heading("Counts"), *parts):
            self._layout.addWidget(part)
        self._layout.addWidget(self.bar)
        self.hide()

    def _make_table(self) -> QTableView:
        table = QTableView()
        table.setToolTip("Counts of all images. Click a heading to sort, “Open” to see the boxes.")
        table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QTableView.SelectionMode.SingleSelection)
        table.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        table.setWordWrap(False)  # or a long name is cut at its first space
        table.setHorizontalScrollMode(QTableView.ScrollMode.ScrollPerPixel)
        lines = not_none(table.verticalHeader())
        lines.hide()
        lines.setDefaultSectionSize(_LINE_PX)
        table.setSortingEnabled(True)
        table.clicked.connect(self._clicked)
        table.doubleClicked.connect(lambda index: self._open_line(index.row()))
        return table

    @cached_property
    def plot(self) -> pg.PlotWidget:
        """Bars of each image, a colour for each class or type; made with the first results."""
        plot = pg.PlotWidget(background=None)
        plot.setToolTip("Cells per image, in the order of the table.")
        plot.setLabel("left", "cells")
        plot.setMouseEnabled(x=False, y=False)
        plot.hideButtons()
        plot.setMenuEnabled(False)
        plot.setFixedHeight(190)
        PlotTheme(plot)
        self._layout.insertWidget(self._layout.indexOf(self.legend) + 1, plot)
        return plot

    # --- showing ----------------------------------------------------------------------------------

    def load(self, folder: Path | None) -> None:
        """Read the results of a folder off the GUI thread, and show them."""
        self._folder = folder
        if folder is None:
            self.show_counts(None)
            return
        self._read_task.start(lambda report: StudyCounts.read(folder), self.show_counts)

    def show_counts(self, study: StudyCounts | None) -> None:
        """Show other counts; the order of the table stays."""
        header = not_none(self.table.horizontalHeader())
        before = self.model.columns if self.model is not None else []
        self.study = study if study is not None and study.images else None
        self.setVisible(self.study is not None)
        if self.study is None:
            self.model = None
            return
        column, order = header.sortIndicatorSection(), header.sortIndicatorOrder()
        self.model = CountsModel(self.study)
        same = self.model.columns == before
        header.setSortIndicator(column if same else -1, order)
        self.table.setModel(self.model)
        self.model.layoutChanged.connect(self._draw)
        for k, name in enumerate(self.model.columns):
            wide = QHeaderView.ResizeMode.Stretch if name == _REMARKS else None
            header.setSectionResizeMode(k, wide or QHeaderView.ResizeMode.ResizeToContents)
            if name == _IMAGE and self.table.sizeHintForColumn(k) > _MAX_IMAGE_PX:
                header.setSectionResizeMode(k, QHeaderView.ResizeMode.Interactive)
                header.resizeSection(k, _MAX_IMAGE_PX)  # the counts are what must be seen
        header.setMinimumSectionSize(40)
        lines = min(self.model.rowCount(), _MAX_LINES)
        extra = header.sizeHint().height() + 2 * self.table.frameWidth()
        bar = not_none(self.table.horizontalScrollBar()).sizeHint().height()
        self.table.setFixedHeight(lines * _LINE_PX + extra + bar)
        self.summary.setText(self.study.summary())
        self.reservations.setText(" ".join(self.study.reservations()))
        self.bars.setVisible(bool(self.study.types))
        self._draw()
        if self.bring_into_view:
            self.bring_into_view = False
            QTimer.singleShot(0, self._scroll_here)  # once it is laid out

    def _scroll_here(self) -> None:
        around = self.parentWidget()
        while around is not None and not isinstance(around, QScrollArea):
            around = around.parentWidget()
        if around is not None:
            around.ensureWidgetVisible(self.plot, 0, 0)
            around.ensureWidgetVisible(self.summary, 0, 0)

    def class_colour(self, name: str) -> str:
        """The model's colour of a class."""
        assert self.study is not None
        usual = class_colours(len(self.study.classes))[self.study.classes.index(name)]
        return self.study.colours.get(name, usual)

    @property
    def shows_types(self) -> bool:
        """Whether the bars are of cell types, and not of classes."""
        return self.study is not None and bool(self.study.types) and not self.bars.currentIndex()

    def _bar_colours(self) -> dict[str, str]:
        """What the bars show, each in its colour."""
        assert self.study is not None
        if self.shows_types:
            return assign_colours(self.study.types, preferred=self.study.type_colours)
        return {name: self.class_colour(name) for name in self.study.classes}

    def _draw(self, *_: Any) -> None:
        if self.study is None or self.model is None:
            return
        self.plot.clear()
        images = [image for image in self.model.images if image.counted]
        places, base = np.arange(len(images)), np.zeros(len(images))
        colours = self._bar_colours()
        for name, colour in colours.items():
            counts = [image.types if self.shows_types else image.counts for image in images]
            heights = np.array([count.get(name, 0) for count in counts], float)
            bars = pg.BarGraphItem(
                x=places, y0=base, height=heights, width=0.8, brush=QColor(colour), pen=None
            )
            self.plot.addItem(bars)
            base = base + heights
        self.legend.setText(
            "&nbsp; ".join(
                f'<span style="color: {colour}">■</span> {html.escape(name)}'
                for name, colour in colours.items()
            )
        )
        names = _distinct_ends([image.name for image in images])
        fit = sum(map(len, names)) <= _MAX_TICK_CHARACTERS
        self.plot.getAxis("bottom").setTicks([list(enumerate(names)) if fit else []])
        self.plot.setLabel("bottom", "" if fit else f"{len(images):,} images")
        self.plot.setXRange(-0.6, max(len(images), 1) - 0.4, padding=0)
        self.plot.setYRange(0, max(float(base.max(initial=0)), 1) * 1.05, padding=0)

    # --- taking away ------------------------------------------------------------------------------

    def copy_table(self) -> None:
        """Put the table on the clipboard, as a spreadsheet takes it."""
        if self.study is not None:
            copy_text(self._in_order().text("\t"))
            self.bar.set_message("Table copied.")

    def export_csv(self, path: Path) -> None:
        """Save the table, in its present order."""
        if self.study is None:
            return
        try:
            self._in_order().write_csv(path)
            self.bar.set_message(f"Table saved: {path}")
        except OSError as error:
            self.bar.set_message(notify_error(error))

    def _in_order(self) -> StudyCounts:
        assert self.study is not None
        assert self.model is not None
        return replace(self.study, images=list(self.model.images))

    def _browse(self) -> None:
        start = str((self._folder or Path()) / "counts.csv")
        path, _ = QFileDialog.getSaveFileName(self, "Save table", start, "Table (*.csv)")
        if path:
            self.export_csv(Path(path))

    # --- opening a result -------------------------------------------------------------------------

    def _clicked(self, index: QModelIndex) -> None:
        if self.model is not None and self.model.columns[index.column()] == _OPEN:
            self._open_line(index.row())

    def _open_selected(self) -> None:
        chosen = self.table.currentIndex()
        if chosen.isValid():
            self._open_line(chosen.row())
        else:
            self.bar.set_message("Select an image in the table first.")

    def _open_line(self, line: int) -> None:
        if self.model is not None and line < len(self.model.images):
            self.open_result(self.model.images[line])

    def open_result(self, counts: ImageCounts) -> None:
        """Show an image and its boxes; the file is read off the GUI thread."""
        if not counts.counted:
            self.bar.set_message(f"{counts.name} has no results. {counts.error}".strip())
            return
        if counts.boxes is not None and self._reveal(counts):
            return
        is_open = _open_layer(self._viewer, counts.path) is not None
        self._open_task.start(
            lambda report: _read_result(counts, not is_open, report), self._show_result
        )

    def _show_result(self, result: OpenedResult) -> None:
        viewer, session = self._viewer, get_session(self._viewer)
        layer = _open_layer(viewer, result.counts.path)
        if layer is None and result.pixels is not None:
            with _source_of(result.counts.path):
                layer = Image(result.pixels, **result.settings)
            viewer.add_layer(layer)
            viewer.reset_view()
        if layer is None:  # it was removed while the boxes were read
            return
        layer.visible = True
        if result.detections is not None and self.study is not None:
            names = result.detections.names
            usual = class_colours(len(names))
            shades = [self.study.colours.get(n, c) for n, c in zip(names, usual, strict=True)]
            earlier = session.detection_layers.get(layer)
            there = earlier is not None and earlier.alive
            if earlier is not None and there:  # what the user has found or edited there stays
                earlier.layer.visible = False
            shown = DetectionLayer(
                viewer,
                layer,
                result.detections,
                shades,
                confidence=self.study.confidence,
                tag="batch" if there else "",
            )
            session.set_detections(layer, result.detections, shown)
            self._opened[layer] = result.counts.boxes
        self.bar.set_message(f"{result.counts.name} is open.")

    def _reveal(self, counts: ImageCounts) -> bool:
        """Show boxes of a result that are in the viewer already; whether they are."""
        layer = _open_layer(self._viewer, counts.path)
        if layer is None or self._opened.get(layer) != counts.boxes:
            return False
        shown = get_session(self._viewer).detection_layers.get(layer)
        if not isinstance(shown, DetectionLayer) or not shown.alive:
            return False
        layer.visible = True
        shown.reveal()
        self.bar.set_message(f"{counts.name} is open.")
        return True


def _read_result(counts: ImageCounts, with_image: bool, report: Report) -> OpenedResult:
    """Pixels and boxes of a result; in a thread."""
    report_progress(report, 0, 2, f"reading {counts.name}")
    pixels: Any = None
    settings: dict[str, Any] = {}
    shape: tuple[int, int] | None = None
    if with_image:
        slide = open_slide(counts.path)
        levels, (height, width) = slide.dask(), slide.shape
        settings = {"name": Path(counts.path).stem, "rgb": True}
        if slide.pixel_size is not None:
            settings |= {"scale": slide.pixel_size, "units": ("um", "um")}
        if height * width <= _MAX_EAGER_PIXELS:
            pixels = load_array(levels[0])
        else:
            pixels = levels if len(levels) > 1 else levels[0]
            settings |= {"multiscale": True} if len(levels) > 1 else {}
        shape = slide.shape
    report_progress(report, 1, 2, f"reading the boxes of {counts.name}")
    detections = None
    if counts.boxes is not None:
        detections = read_detections(counts.boxes, shape)
    elif counts.total:
        raise FileError(
            f"{counts.name}: its boxes were not saved as CSV or GeoJSON; run it again with one of "
            "these formats."
        )
    return OpenedResult(counts, pixels, settings, detections)


def _open_layer(viewer: Viewer, path: str) -> Image | None:
    """The layer of an image file that is open already."""
    wanted = Path(path).absolute()
    for layer in user_images(viewer):
        known = layer.source.path or layer.metadata.get("path")
        if known and Path(known).absolute() == wanted:
            return layer
    return None


def _source_of(path: str) -> Any:
    """While layers are made: they are of this file, as if napari had opened it."""
    try:
        from napari.layers._source import layer_source
    except ImportError:
        return nullcontext()
    return layer_source(path=path)


def _distinct_ends(names: list[str]) -> list[str]:
    """Names without what all begin with."""
    letters = zip(*names, strict=False) if len(names) > 1 else ()
    shared = list(takewhile(lambda those: len(set(those)) == 1, letters))
    return [name[len(shared) :] or name for name in names]
