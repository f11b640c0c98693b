"""The Malaria preset: from the pixels of a thin smear to its parasitaemia, by stage.

The detector finds the cells, the classifier says of each red cell whether it is infected, and of
what stage the parasite is. Schizonts and gametocytes fill their cell or have left nothing of it to
see, so a detector that knows no parasites calls them white cells; it also calls some pairs of red
cells so. Objects of such classes without the size and stain of their class (`class_agreement`) are
red cells here, and classified as these. Where a red cell has been found in the same place, they
are that cell, found twice, and left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.batch.settings import MALARIA_PRESET
from napari_beerlanet.core.boxes.classes import (
    ClassCounts,
    Parasitaemia,
    applicable_classes,
    healthy_types,
    infected_types,
)
from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN, Detections
from napari_beerlanet.core.checkpoints.info import model_limits, still_unknown
from napari_beerlanet.core.common.messages import count_of, name_list, shortened
from napari_beerlanet.core.common.progress import Report, subprogress

if TYPE_CHECKING:  # torch comes with them
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector

_SAME_CELL_IOU = 0.5
_DETECTION_SHARE = 0.7  # of the reported progress


@dataclass(frozen=True)
class MalariaSmear:
    """What the preset says of an image: `detections` with types, and what is known against them.

    `warnings` are sentences on why counts may be wrong here, `limits` on what the models do not
    know anywhere.
    """

    detections: Detections
    warnings: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    @property
    def counts(self) -> ClassCounts:
        """By class and type, with the parasitaemia."""
        return ClassCounts.of(self.detections)

    @property
    def parasitaemia(self) -> Parasitaemia | None:
        """Infected red cells, by stage, of all; None where no red cell was found."""
        return self.counts.parasitaemia


def count_malaria(
    rgb: Any,
    confidence: float = MALARIA_PRESET["confidence"],
    iou: float = MALARIA_PRESET["iou"],
    report: Report | None = None,
    *,
    detector: Detector | str | os.PathLike[str] = MALARIA_PRESET["model"],
    classifier: Classifier | str | os.PathLike[str] = MALARIA_PRESET["classifier"],
    device: str = "auto",
    **settings: Any,
) -> MalariaSmear:
    """Find the cells of a thin smear (H, W, 3 or 4), classify the red ones, count the infected.

    Parameters
    ----------
    confidence, iou
        Minimum score of the detector, and of duplicates, as for `Detector.detect`.
    detector, classifier
        Models, or their names or paths. The classifier's types are red cells without parasites
        ("uninfected") and stages of parasites.
    settings
        Further arguments of `Detector.detect`, for instance object_size or pixel_size.
    """
    finder, namer = load_models(detector, classifier, device)
    found = finder.detect(
        rgb, confidence, iou, report=subprogress(report, 0.0, _DETECTION_SHARE), **settings
    )
    typed = namer.classify_detections(
        rgb,
        claim_red_cells(found, finder.info, namer.info),
        confidence=confidence,
        report=subprogress(report, _DETECTION_SHARE, 1.0),
    )
    return describe_smear(typed, finder.info, namer.info)


def load_models(
    detector: Detector | str | os.PathLike[str],
    classifier: Classifier | str | os.PathLike[str],
    device: str = "auto",
) -> tuple[Detector, Classifier]:
    """The models of the preset; a classifier that knows no parasites is a `ValueError`."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, load_detector

    finder: Any = detector
    if isinstance(detector, (str, os.PathLike)):
        finder = load_detector(detector, device)
    namer: Any = classifier
    if isinstance(classifier, (str, os.PathLike)):
        namer = load_classifier(classifier, device)
    if not healthy_types(namer.classes) or not infected_types(namer.classes):
        raise ValueError(
            "Parasitaemia needs a classifier of infected and uninfected red cells; the types of "
            f"{shortened(namer.info.get('name') or 'this one')} are {name_list(namer.classes)}."
        )
    return finder, namer


def claim_red_cells(
    found: Detections, detector: Mapping[str, Any], classifier: Mapping[str, Any]
) -> Detections:
    """Detections in which those that are red cells, and called otherwise, are called red cells.

    `detector` and `classifier` are the `info` of both models. Nothing changes where the classifier
    does not know what the detector says that it does not know.
    """
    red, twice = find_red_cells(found, detector, classifier)
    meant = applicable_classes(classifier.get("applies_to") or (), found.names)
    renamed = red[[found.names[k] not in meant for k in found.labels[red]]]
    if not len(renamed) and not len(twice):
        return found
    # Detections are sorted by score, so those above one threshold are the first of all candidates;
    # with a threshold for each class they are not, and the other candidates are given up.
    source = found if found.candidates is None else found.candidates
    if not np.array_equal(source.xyxy[: len(found)], found.xyxy):
        source = found
    labels, agreement = source.labels.copy(), source.columns[AGREEMENT_COLUMN].copy()
    labels[renamed], agreement[renamed] = found.names.index(meant[0]), np.nan
    notes = [
        f"{count_of(number, 'red cell was', 'red cells were')} called {name} by the detector."
        for name, number in found[renamed].counts().items()
        if number
    ]
    claimed = replace(
        source,
        labels=labels,
        columns={**source.columns, AGREEMENT_COLUMN: agreement},
        report={**found.report, "notes": [*found.report.get("notes", []), *notes]},
        candidates=None,
    )
    kept = np.setdiff1d(np.arange(len(claimed)), twice)
    return replace(claimed[kept[kept < len(found)]], candidates=claimed[kept])


def find_red_cells(
    found: Detections, detector: Mapping[str, Any], classifier: Mapping[str, Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which detections are red cells (m,), and which are one of these found twice (d,)."""
    meant = applicable_classes(classifier.get("applies_to") or (), found.names)
    red = np.flatnonzero([found.names[k] in meant for k in found.labels])
    unknown = detector.get("unknown") or {}
    known = set(unknown) - set(still_unknown(unknown, classifier["classes"]))
    called = {name for what in known for name in unknown[what]} - set(meant)
    agreement = found.columns.get(AGREEMENT_COLUMN)
    if agreement is None or not called or not len(red):
        return red, np.empty(0, np.int64)
    from napari_beerlanet.core.boxes.matching import overlap_pairs  # numba comes with it
    from napari_beerlanet.core.detection.stain_statistics import MIN_AGREEMENT

    is_called = np.array([found.names[k] in called for k in found.labels], bool)
    odd = np.flatnonzero(is_called & (agreement < MIN_AGREEMENT))
    pairs = overlap_pairs(found.xyxy[odd], found.xyxy[red])  # few of a slide's million cells
    twice = np.zeros(len(odd), bool)
    twice[pairs.detection[pairs.iou >= _SAME_CELL_IOU]] = True
    return np.union1d(red, odd[~twice]), odd[twice]


def describe_smear(
    detections: Detections, detector: Mapping[str, Any], classifier: Mapping[str, Any]
) -> MalariaSmear:
    """Everything that is known against detections with types, of models by their `info`."""
    from napari_beerlanet.core.detection.stain_statistics import detection_warnings

    infected = ClassCounts.of(detections).parasitaemia
    few = ["No red cells were found."] if infected is None else infected.warnings
    strange = detection_warnings(detector, detections, detections.pixel_size)
    unusual = detections.report.get("classification", {}).get("warnings", [])
    return MalariaSmear(
        detections,
        list(dict.fromkeys([*few, *strange, *unusual])),
        model_limits(detector, classifier),
    )
