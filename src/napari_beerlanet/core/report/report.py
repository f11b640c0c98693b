"""The report on one image: a single self-contained HTML file, for the screen and for print."""

from __future__ import annotations

import html
import json
import os
import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from napari_beerlanet.core.common.messages import system_reason
from napari_beerlanet.core.common.storage import FileError, atomic_path, regular_file
from napari_beerlanet.core.images.rgb import check_rgb
from napari_beerlanet.core.report.charts import CHART_HEIGHT, CHART_WIDTH, chart_x, chart_y
from napari_beerlanet.core.report.sections import malaria_content, report_content
from napari_beerlanet.core.report.subject import ReportSubject

_PAGE = "malaria.html.jinja"
_RECORD_NAME = "napari-beerlanet-record"
_RECORD_META = re.compile(f'<meta name="{_RECORD_NAME}" content="([^"]*)">')
_HEAD_CHARACTERS = 1 << 16  # in which a record is

CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load for a report: nothing but what is inside of it."""


def write_report(
    path: str | os.PathLike[str], subject: ReportSubject, one_page: bool = False
) -> None:
    """Write the report whole or not at all; see `render_report`."""
    _write_text(path, render_report(subject, one_page))


def _write_text(path: str | os.PathLike[str], text: str) -> None:
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({system_reason(error)}).") from error


def write_page(
    path: str | os.PathLike[str], content: Mapping[str, Any], template_name: str = _PAGE
) -> None:
    """Write a page with this content by a template of this room, whole or not at all."""
    template = report_environment().get_template(template_name)
    text = template.render(content, record="", record_name=_RECORD_NAME)
    _write_text(path, text)


def render_report(subject: ReportSubject, one_page: bool = False) -> str:
    """The report as HTML.

    `one_page`: of a malaria smear, as a laboratory files it; a `ValueError` where no red cells
    have been classified.
    """
    check_rgb(subject.pixels if subject.picture is None else subject.picture)
    name = _PAGE if one_page else "report.html.jinja"
    content = malaria_content(subject) if one_page else report_content(subject)
    record = json.dumps(dict(subject.record)) if subject.record else ""
    template = report_environment().get_template(name)
    return template.render(content, record=record, record_name=_RECORD_NAME)


def read_report_record(path: Path) -> dict[str, Any]:
    """What a report was made from, see `ReportSubject.record`; {} where there is no such report."""
    try:
        with regular_file(path).open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD_CHARACTERS)
        found = _RECORD_META.search(head)
        content = json.loads(html.unescape(found[1])) if found else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@cache
def report_environment() -> Environment:
    """The templates, in which every text is escaped that they do not declare safe."""
    package = __package__ or ""
    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        finalize=clean_text,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals |= {
        "policy": CONTENT_SECURITY_POLICY,
        "style": (files(package) / "report.css").read_text(encoding="utf-8"),
        "chart_width": CHART_WIDTH,
        "chart_height": CHART_HEIGHT,
        "x": chart_x,
        "y": chart_y,
    }
    return environment


def clean_text(value: Any) -> Any:
    """A text without what is no character (control characters, halves of surrogate pairs)."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    plain = value.encode("utf-8", "replace").decode("utf-8")
    is_text = (c in "\n\t" or unicodedata.category(c) != "Cc" for c in plain)
    return "".join(c if good else "\ufffd" for c, good in zip(plain, is_text, strict=True))
