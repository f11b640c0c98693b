"""Counts of cell types beside those of classes: shares, their intervals, and why to doubt them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QVBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import (
    ClassCounts,
    Parasitaemia,
    in_life_cycle_order,
)
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.ui.common.controls import heading
from napari_beerlanet.ui.common.panel import ThemedLabel
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer

_WARNING_SIGN = "⚠"
_MAX_LISTED = 20  # types; the rest is one line


def count_boxes(layer: DetectionLayer | None, facts: Mapping[str, str]) -> ClassCounts | None:
    """Classes and types of the boxes of the displayed plane that pass the filter.

    None where nothing was detected on the plane.
    """
    passing = layer.filtered() if layer is not None and layer.alive else None
    if passing is None:
        return None
    store, mask = passing
    numbers = np.bincount(store.labels[mask], minlength=len(store.names))
    types = store.type_counts(mask)[1:]
    return ClassCounts(
        dict(zip(store.names, numbers.tolist(), strict=True)),
        facts,
        dict(zip(store.type_names, types.tolist(), strict=True)),
    )


class TypeCountsView(QWidget):
    """Types with counts, shares and intervals, and the classifier's warnings; hidden without types.

    It shows what `show_types` was given last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.class_counts: ClassCounts | None = None
        self.limits = _text("What the classifier was not trained on; its types mislead there.")
        self.warnings = _text("Why these types may be unreliable.")
        self.warnings.set_kind("warning")
        self.table = _text(
            "Boxes of each type above the confidence threshold, their percentage of all that are "
            "classified, and its 95 % confidence interval for a count of this size (Wilson)."
        )
        self.parasitaemia = _text(
            "Infected of all red cells that are classified, the 95 % interval of that share for a "
            "count of this size (Wilson), and infected red cells for 100 white cells."
        )
        self.basis = _text("What the percentages are of.")
        self.basis.set_kind("hint")
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        for widget in (
            heading("Cell types"),
            self.limits,
            self.warnings,
            self.table,
            self.parasitaemia,
            self.basis,
        ):
            layout.addWidget(widget)
        self.hide()

    def show_layer(self, counts: ClassCounts | None, layer: DetectionLayer | None) -> None:
        """Show the types among the counts of a layer, and what its classifier says."""
        if counts is None or not counts.types or layer is None:
            self.clear()
            return
        report = layer.report
        self.show_types(
            counts,
            layer.type_colours,
            report.get("classifier_warnings") or [],
            str(report.get("classifier_limits") or ""),
            str(report.get("classifier") or ""),
        )

    def clear(self) -> None:
        """There are no types."""
        self.class_counts = None
        self.hide()

    def show_types(
        self,
        counts: ClassCounts,
        colours: Sequence[str],
        warnings: Sequence[str],
        limits: str,
        classifier: str,
    ) -> None:
        """Show counts, each type in its colour."""
        self.class_counts = counts
        colour_of = dict(zip(counts.types, colours, strict=False))
        listed = [name for name in in_life_cycle_order(list(counts.types)) if name in colour_of]
        listed = listed[:_MAX_LISTED]
        rows = "".join(
            f"<tr><td><span style='color:{colour_of[name]}'>■</span>&nbsp;{html.escape(name)}</td>"
            f"<td align='right'><b>{counts.types[name]:,}</b></td>{_share_cells(counts, name)}</tr>"
            for name in listed
        )
        more = len(counts.types) - len(listed)
        rows += f"<tr><td>… and {count_of(more, 'more type')}</td></tr>" if more > 0 else ""
        self.table.setText(f"<table width='100%'>{rows}</table>")
        self.basis.setText(html.escape(_basis(counts, classifier)))
        self.limits.setText(f"<i>{html.escape(limits)}</i>")
        self.limits.setVisible(bool(limits))
        infected = counts.parasitaemia
        sentences = [*(infected.warnings if infected is not None else ()), *warnings]
        lines = (f"{_WARNING_SIGN} {html.escape(sentence)}" for sentence in sentences)
        self.warnings.setText("<br>".join(lines))
        self.warnings.setVisible(bool(sentences))
        self.parasitaemia.setText("" if infected is None else _parasitaemia_text(infected))
        self.parasitaemia.setVisible(infected is not None)
        self.show()


def _parasitaemia_text(infected: Parasitaemia) -> str:
    text = (
        f"Parasitaemia <b>{infected}</b><br>{infected.infected:,} of {infected.cells:,} red cells"
    )
    per_100 = infected.per_100_white_cells
    if per_100 is None:
        return text
    rate = f"{per_100:,.1f}" if per_100 < 100 else f"{per_100:,.0f}"
    return f"{text}; {rate} per 100 white cells ({infected.white_cells:,} counted)"


def _share_cells(counts: ClassCounts, name: str) -> str:
    part = counts.type_shares.get(name)
    if part is None:
        return "<td></td><td></td>"
    value, low, high = (100 * share for share in (part.share, *part.interval))
    return f"<td align='right'>{value:.1f}&nbsp;%</td><td align='right'>({low:.1f}–{high:.1f})</td>"


def _basis(counts: ClassCounts, classifier: str) -> str:
    """ "Of 60 classified cells, with the 95 % interval. 250 are not classified. Classifier: …"."""
    typed = sum(counts.types.values())
    if not typed:
        return "No classified cell is above the confidence threshold."
    parts = [f"Of {count_of(typed, 'classified cell')}, with the 95 % interval."]
    untyped = counts.total - typed
    if untyped:
        parts.append(f"{untyped:,} {'is' if untyped == 1 else 'are'} not classified.")
    return " ".join([*parts, *([f"Classifier: {classifier}."] if classifier else [])])


def _text(tooltip: str) -> ThemedLabel:
    label = ThemedLabel()
    label.setTextFormat(Qt.TextFormat.RichText)
    label.setToolTip(tooltip)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
