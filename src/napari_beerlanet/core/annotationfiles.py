"""The files of a project's folder `annotations`: an image and what is annotated in it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .annotations import Annotations
from .projectfiles import FORMAT, ProjectError, load_object
from .sources import Source


def read_annotation_file(path: Path) -> dict[str, Any]:
    """A file's content, with a source and a format that is known."""
    content = load_object(path, "annotations of napari-beerlanet")
    if not isinstance(content.get("source"), dict) or not isinstance(content.get("format"), int):
        raise ProjectError(f"{path}: damaged, or not annotations of napari-beerlanet.")
    if content["format"] > FORMAT:
        raise ProjectError(f"{path}: of a newer version of this program; update napari-beerlanet.")
    return content


def read_source(path: Path) -> Source:
    """The image that a file is about."""
    content = read_annotation_file(path)
    try:
        return Source.read(content["source"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProjectError(f"{path}: damaged; it does not say which image it is about.") from error


def read_annotations(path: Path, source: Source) -> Annotations:
    """What a file says of an image."""
    content = read_annotation_file(path)
    try:
        return Annotations.read(content, source.shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProjectError(f"{path}: damaged; remove it to annotate the image anew.") from error


def annotation_file(source: Source, annotations: Annotations) -> bytes:
    """An image's annotations as a file."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"format": FORMAT, "saved": now, "source": asdict(source), **annotations.write()}
    return _encoded(content)


def with_names(path: Path, renamed: Mapping[str, str]) -> bytes:
    """A file with other names for its classes."""
    content = read_annotation_file(path)
    content["classes"] = [renamed.get(name, name) for name in content["classes"]]
    for entry in content["objects"]:
        entry["class"] = renamed.get(entry["class"], entry["class"])
    return _encoded(content)


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "replace")
