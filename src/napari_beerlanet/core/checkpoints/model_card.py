"""What a model's record says for people: its scores, and on how much they stand.

A score on a handful of boxes says little, so such a model is headed by what it was trained and
validated on, and by what it has forgotten of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.common.messages import count_of, format_score

MIN_VALIDATION_IMAGES = 5
"""Images below which a score on them says more about these images than about a model."""

_MIN_IMAGES_WITHOUT_COUNTS = 20  # of a validation whose boxes were not counted


def image_counts(training: Mapping[str, Any]) -> Mapping[str, int]:
    """How many images (of a classifier: crops) each split of a training had."""
    images = training.get("images") or {}
    return images if isinstance(images, Mapping) else {"train": int(images)}


def headline(info: Mapping[str, Any]) -> str:
    """The score on the largest test set, or what there is instead of a score that is reliable."""
    training = info.get("training") or {}
    metrics = training.get("metrics") or {}
    tests = [m for m in metrics.values() if isinstance(m, Mapping) and "mAP50" in m]
    if tests:
        largest = max(tests, key=lambda m: m.get("images") or 0)
        return f"mAP50 {format_score(largest['mAP50'])}{_on_images(largest.get('images'))}"
    images = image_counts(training).get("val")
    if metrics.get("balanced_accuracy") is not None and _enough_crops(training):
        score = format_score(metrics["balanced_accuracy"])
        return f"balanced accuracy {score} on {count_of(int(images or 0), 'crop')}"
    if metrics.get("mAP50") is None:
        return evidence(training)
    if validation_suffices(training):
        return f"mAP50 {format_score(metrics['mAP50'])}{_on_images(images)}"
    return evidence(training) or f"mAP50 {format_score(metrics['mAP50'])}, on unknown images"


def evidence(training: Mapping[str, Any]) -> str:
    """ "trained on 2 images, validated on 1; reference 95.7 → 81.8 %", as far as it is recorded.

    Of a classifier "trained on 34 crops of 3 images, validated on 12".
    """
    images = image_counts(training)
    if not images.get("train"):
        return ""
    parts = [f"trained on {_training_amount(training)}"]
    if images.get("val"):
        parts.append(f"validated on {images['val']}")
    reference = (training.get("compared") or {}).get("reference")
    forgetting = ""
    if reference:
        before, after = (100 * _main_score(pair) for pair in reference)
        forgetting = f"; reference {before:.1f} → {after:.1f} %"
    return ", ".join(parts) + forgetting


def _enough_crops(training: Mapping[str, Any]) -> bool:
    """Whether a classifier's score stands on enough validation crops of every class."""
    crops = (training.get("crops") or {}).get("val") or {}
    return bool(crops) and min(crops.values()) >= MIN_CLASS_BOXES


def validation_suffices(training: Mapping[str, Any]) -> bool:
    """Whether a score on the validation images may head a model: enough images, and boxes of each
    class that was trained."""
    images = int(image_counts(training).get("val") or 0)
    boxes = training.get("boxes") or {}
    if not boxes:
        return images >= _MIN_IMAGES_WITHOUT_COUNTS
    trained = [name for name, count in boxes["train"].items() if count]
    enough = all(boxes["val"].get(name, 0) >= MIN_CLASS_BOXES for name in trained)
    return images >= MIN_VALIDATION_IMAGES and enough


def test_scores(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The name of each test set ("" for the validation) and the scores on it, with its counts."""
    training = info.get("training") or {}
    metrics = training.get("metrics") or {}
    if metrics.get("mAP50") is not None:
        images = image_counts(training).get("val")
        return [
            ("", _scores({"images": images, **metrics}, (training.get("boxes") or {}).get("val")))
        ]
    return [
        (name, _scores(m)) for name, m in metrics.items() if isinstance(m, Mapping) and "mAP50" in m
    ]


def model_facts(info: Mapping[str, Any], device: str = "") -> list[tuple[str, str]]:
    """Return name and value of everything worth knowing of a model."""
    facts = [("Name", str(info.get("name") or "—"))]
    if device:
        facts.append(("Runs on", device))
    if info.get("front_end", "beerlanet") == "beerlanet":
        stains = f"{info['components']} components, {info['iterations']} iterations"
        facts.append(("Stains", stains))
    facts += training_facts(info)
    if limits_text(info):
        facts.append(("Limits", limits_text(info)))
    if info.get("applies_to"):
        facts.append(("Meant for", ", ".join(info["applies_to"])))
    if info.get("image_size"):
        facts.append(("Image size", f"{info['image_size']} pixels"))
    if info.get("input_size"):
        facts.append(("Crop size", f"{info['input_size']} pixels"))
    if info.get("pixel_size"):
        facts.append(("Pixel size", f"{info['pixel_size']:.3g} µm"))
    for name, size in (info.get("object_sizes") or {}).items():
        range_ = f"{size['median']:.0f} pixels ({size['low']:.0f} to {size['high']:.0f})"
        facts.append((f"Size of {name}", f"{range_}, {size['count']:.0f} annotated"))
    return facts + [("Note", str(note)) for note in info.get("notes") or []]


def training_facts(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a model was trained on, its scores with their counts, and what it has forgotten."""
    training = info.get("training") or {}
    facts = [("Trained on", _trained_on(training))] if training.get("data") else []
    facts += [(f"On {name}" if name else "Validation", text) for name, text in test_scores(info)]
    compared = training.get("compared") or {}
    if compared.get("reference"):
        pairs = compared["reference"]
        before, after = (format_score(_main_score(pair)) for pair in pairs)
        name = "mAP50" if "mAP50" in pairs[0] else "balanced accuracy"
        facts.append(("Reference", f"{name} {before} before, {after} after"))
    facts += [("Forgotten", str(text)) for text in compared.get("forgotten") or ()]
    return facts


def training_size(info: Mapping[str, Any]) -> str:
    """How many images a model was trained on, for a list of models; "" where it is not known."""
    training = info.get("training") or {}
    images = image_counts(training).get("train")
    return count_of(int(images), "crop" if training.get("crops") else "image") if images else ""


def _training_amount(training: Mapping[str, Any]) -> str:
    """ "2 images"; of a classifier "34 crops", and of how many images if they have several."""
    number = int(image_counts(training)["train"])
    if not training.get("crops"):
        return count_of(number, "image")
    sources = int((training.get("sources") or {}).get("train") or number)
    return count_of(number, "crop") + (
        f" of {count_of(sources, 'image')}" if sources < number else ""
    )


def _main_score(metrics: Mapping[str, Any]) -> float:
    return float(metrics["mAP50"] if "mAP50" in metrics else metrics["balanced accuracy"])


def _trained_on(training: Mapping[str, Any]) -> str:
    images = image_counts(training).get("train")
    number = f"{_training_amount(training)} of " if images else ""
    epochs = f", {training['epochs']} epochs" if training.get("epochs") else ""
    date = f", {str(training['date'])[:10]}" if training.get("date") else ""
    boxes = (training.get("boxes") or {}).get("train")
    return f"{number}{training['data']}{epochs}{date}{_boxes(boxes)}"


def _scores(metrics: Mapping[str, Any], boxes: Mapping[str, int] | None = None) -> str:
    strict = metrics.get("mAP50-95")
    more = f", mAP50-95 {format_score(strict)}" if strict is not None else ""
    images = count_of(metrics["images"], "image") if metrics.get("images") else ""
    counts = ", ".join(part for part in (images, _boxes(boxes).strip(" ()")) if part)
    return f"mAP50 {format_score(metrics['mAP50'])}{more}{f' ({counts})' if counts else ''}"


def _boxes(boxes: Mapping[str, int] | None) -> str:
    return f" ({', '.join(f'{n} {name}' for name, n in boxes.items())})" if boxes else ""


def _on_images(images: Any) -> str:
    return f" on {count_of(int(images), 'image')}" if images else ""
