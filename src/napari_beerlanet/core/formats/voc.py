"""Pascal VOC XML: one file per image, with its size and a box per object.

Boxes are taken as labelImg and its kin write them, from edge to edge and counted from 0, and not
as in the contest of 2012, where pixels were counted from 1 and the last one was part of the box.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.messages import quoted, shortened
from napari_beerlanet.core.formats.common import (
    AnyPath,
    BoxRows,
    DetectionRecord,
    ImageShape,
    agreed_shape,
    check_token_count,
    detection_records,
    parse_value,
    parsing,
    read_bytes,
    to_detections,
    write_text,
)

_MAX_ATTRIBUTES = 1 << 20  # such files have none; many of one tag take for ever
_BOX_TAGS = ("xmin", "ymin", "xmax", "ymax")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_voc(path: AnyPath, detections: Detections, image_name: str = "") -> None:
    """Write the image's size and its objects.

    Confidence and further columns (`attributes`, as CVAT writes them) are additions that others
    pass over.
    """
    root = ET.Element("annotation")
    _add_element(root, "filename", _NOT_XML.sub("?", image_name))
    if detections.image_shape is not None:
        size = ET.SubElement(root, "size")
        height, width = detections.image_shape
        for name, number in (("width", width), ("height", height), ("depth", 3)):
            _add_element(size, name, int(number))
    for entry in detection_records(detections):
        _add_object(root, entry)
    ET.indent(root)
    # Parsers make a line feed of a carriage return that is not written as a reference.
    text = ET.tostring(root, encoding="unicode").replace("\r", "&#13;")
    write_text(path, f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n")


def read_voc(
    path: AnyPath,
    image_shape: ImageShape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read the objects of one image."""
    content = _read_checked(path)
    with parsing(path, "Pascal VOC XML"):
        root = _parse_xml(content)
        if root.tag != "annotation":
            raise ValueError(f"it is about <{shortened(root.tag)}>, not <annotation>")
        width, height = (int(float(root.findtext(f"size/{s}") or 0)) for s in ("width", "height"))
        shape = agreed_shape(path, width, height, image_shape)
        rows = BoxRows()
        for entry in root.iter("object"):
            box = [float(_required_text(entry, f"bndbox/{side}")) for side in _BOX_TAGS]
            confidence = entry.findtext("confidence")
            named = (
                (_required_text(attribute, "name"), _required_text(attribute, "value"))
                for attribute in entry.iterfind("attributes/attribute")
            )
            extra = {name: parse_value(text, name) for name, text in named}
            score = float(confidence) if confidence else None
            rows.add(_required_text(entry, "name"), box, score, extra)
        return to_detections(path, rows, names, shape)


def voc_image_name(path: AnyPath) -> str:
    """The name of the image that a file is about, "" where it does not say."""
    content = _read_checked(path)
    with parsing(path, "Pascal VOC XML"):
        return _parse_xml(content).findtext("filename") or ""


def _read_checked(path: AnyPath) -> bytes:
    content = read_bytes(path)
    check_token_count(path, content, b"=", _MAX_ATTRIBUTES)
    return content


class _WithoutDoctype(ET.TreeBuilder):
    """Refuses declarations: with entities, a small file may grow to fill all memory."""

    def doctype(self, name: str, public: str, system: str) -> None:
        raise ValueError("it declares a document type, which such files do not need")


def _parse_xml(content: bytes) -> ET.Element:
    try:
        return ET.fromstring(content, ET.XMLParser(target=_WithoutDoctype()))
    except ET.ParseError as error:
        raise ValueError(f"no XML ({error})") from error


def _required_text(element: ET.Element, path: str) -> str:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"<{element.tag}> has no {path}")
    return text


def _add_element(parent: ET.Element, tag: str, content: Any) -> None:
    text = str(content)
    strange = _NOT_XML.search(text)
    if strange:
        raise ValueError(
            f"XML cannot hold the character {quoted(strange[0])} in {quoted(text)}; "
            "choose another name or another format."
        )
    ET.SubElement(parent, tag).text = text


def _add_object(root: ET.Element, detection: DetectionRecord) -> None:
    entry = ET.SubElement(root, "object")
    _add_element(entry, "name", detection.name)
    _add_element(entry, "pose", "Unspecified")
    _add_element(entry, "truncated", 0)
    _add_element(entry, "difficult", 0)
    _add_element(entry, "confidence", detection.score)
    corners = ET.SubElement(entry, "bndbox")
    for side, value in zip(_BOX_TAGS, detection.box, strict=True):
        _add_element(corners, side, value)
    if detection.extra:
        attributes = ET.SubElement(entry, "attributes")
        for column, value in detection.extra.items():
            attribute = ET.SubElement(attributes, "attribute")
            _add_element(attribute, "name", column)
            _add_element(attribute, "value", value)
