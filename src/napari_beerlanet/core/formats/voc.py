"""Pascal VOC XML: one file per image, with its size and a box per object.

Boxes are taken as labelImg and its kin write them, from edge to edge and counted from 0, and not
as in the contest of 2012, where pixels were counted from 1 and the last one was part of the box.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from ..boxes import Detections
from .shared import (
    AnyPath,
    Entry,
    Rows,
    Shape,
    agreed_shape,
    check_amount,
    entries,
    parse_value,
    parsing,
    read_bytes,
    to_detections,
    write_text,
)

_MOST_ATTRIBUTES = 1 << 20  # such files have none; many of one tag take for ever
_BOX = ("xmin", "ymin", "xmax", "ymax")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_voc(path: AnyPath, detections: Detections, image_name: str = "") -> None:
    """Write the image's size and its objects.

    Confidence and further columns (`attributes`, as CVAT writes them) are additions that others
    pass over.
    """
    root = ET.Element("annotation")
    _add(root, "filename", _NOT_XML.sub("?", image_name))
    if detections.image_shape is not None:
        size = ET.SubElement(root, "size")
        height, width = detections.image_shape
        for name, number in (("width", width), ("height", height), ("depth", 3)):
            _add(size, name, int(number))
    for entry in entries(detections):
        _add_object(root, entry)
    ET.indent(root)
    # Parsers make a line feed of a carriage return that is not written as a reference.
    text = ET.tostring(root, encoding="unicode").replace("\r", "&#13;")
    write_text(path, f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n")


def read_voc(
    path: AnyPath,
    image_shape: Shape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read the objects of one image."""
    content = _content(path)
    with parsing(path, "Pascal VOC XML"):
        root = _parse(content)
        if root.tag != "annotation":
            raise ValueError(f"it is about <{root.tag}>, not <annotation>")
        width, height = (int(float(root.findtext(f"size/{s}") or 0)) for s in ("width", "height"))
        shape = agreed_shape(path, width, height, image_shape)
        rows = Rows()
        for entry in root.iter("object"):
            box = [float(_text(entry, f"bndbox/{side}")) for side in _BOX]
            confidence = entry.findtext("confidence")
            extra = {
                _text(attribute, "name"): parse_value(_text(attribute, "value"))
                for attribute in entry.iterfind("attributes/attribute")
            }
            score = float(confidence) if confidence else None
            rows.add(_text(entry, "name"), box, score, extra)
        return to_detections(path, rows, names, shape)


def voc_name(path: AnyPath) -> str:
    """The name of the image that a file is about, "" where it does not say."""
    content = _content(path)
    with parsing(path, "Pascal VOC XML"):
        return _parse(content).findtext("filename") or ""


def _content(path: AnyPath) -> bytes:
    content = read_bytes(path)
    check_amount(path, content, [b"<"])
    check_amount(path, content, [b"="], _MOST_ATTRIBUTES)
    return content


class _WithoutDoctype(ET.TreeBuilder):
    """Refuses declarations: with entities, a small file may grow to fill all memory."""

    def doctype(self, name: str, public: str, system: str) -> None:
        raise ValueError("it declares a document type, which such files do not need")


def _parse(content: bytes) -> ET.Element:
    try:
        return ET.fromstring(content, ET.XMLParser(target=_WithoutDoctype()))
    except ET.ParseError as error:
        raise ValueError(f"no XML ({error})") from error


def _text(element: ET.Element, path: str) -> str:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"<{element.tag}> has no {path}")
    return text


def _add(parent: ET.Element, tag: str, content: Any) -> None:
    text = str(content)
    strange = _NOT_XML.search(text)
    if strange:
        raise ValueError(
            f"XML cannot hold the character {strange[0]!r} in {text!r:.60}; "
            "choose another name or another format."
        )
    ET.SubElement(parent, tag).text = text


def _add_object(root: ET.Element, detection: Entry) -> None:
    entry = ET.SubElement(root, "object")
    _add(entry, "name", detection.name)
    _add(entry, "pose", "Unspecified")
    _add(entry, "truncated", 0)
    _add(entry, "difficult", 0)
    _add(entry, "confidence", detection.score)
    corners = ET.SubElement(entry, "bndbox")
    for side, value in zip(_BOX, detection.box, strict=True):
        _add(corners, side, value)
    if detection.extra:
        attributes = ET.SubElement(entry, "attributes")
        for column, value in detection.extra.items():
            attribute = ET.SubElement(attributes, "attribute")
            _add(attribute, "name", column)
            _add(attribute, "value", value)
