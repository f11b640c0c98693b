"""What panels are set to, as settings of a study, and the button that takes them to a folder."""

from __future__ import annotations

from typing import Any

from qtpy.QtWidgets import QPushButton

from napari_beerlanet.ui.controls import button
from napari_beerlanet.ui.decompose_form import DecomposeForm
from napari_beerlanet.ui.detect_form import DetectForm


def finding_settings(model: str, form: DetectForm) -> dict[str, Any]:
    """How cells are found, by the names of `StudySettings`."""
    return {
        "model": model,
        "confidence": form.confidence.value,
        "iou": form.overlap.value,
        "object_size": form.object_size,
        "device": form.chosen_device,
    }


def stain_settings(form: DecomposeForm) -> dict[str, Any]:
    """How stains are taken apart, by the names of `StudySettings`."""
    set_, slide = form.settings(), form.slide
    return {
        "components": "auto" if set_.counted else set_.components,
        "iterations": set_.iterations,
        "lam": set_.lam,
        "gamma": set_.gamma,
        "spectra": None if set_.spectra is None else set_.spectra.tolist(),
        "leave_out": () if slide.left_out.isHidden() else slide.choice.leave_out,
    }


def batch_button(panel: Any) -> QPushButton:
    """Opens “Run on folder” with what a panel is set to; it has `study_settings` and a layer."""

    def opened() -> None:
        from napari_beerlanet.ui.batch_widget import open_batch

        open_batch(panel)

    return button("Run on folder …", "Do this with many images, with these settings.", opened)
