"""Pieces of HTML. Every text that comes from outside passes `escaped`; nothing loads anything."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.resources import files

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load for a report: nothing but what is inside of it."""


def escaped(text: object) -> str:
    """Text that stands for itself wherever it is put; what is no character becomes a sign."""
    plain = str(text).encode("utf-8", "replace").decode("utf-8")
    kept = (c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in plain)
    return html.escape("".join(kept), quote=True)


def page(title: str, body: str, language: str = "en") -> str:
    """A whole document with our styles."""
    style = (files(__package__) / "report.css").read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str, kind: str = "") -> str:
    """A part of the report under a heading; "" where it has no content."""
    content = "\n".join(part for part in parts if part)
    name = f' class="{kind}"' if kind else ""
    return f"<section{name}>\n<h2>{escaped(title)}</h2>\n{content}\n</section>" if content else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    name = f' class="{kind}"' if kind else ""
    return f"<p{name}>{escaped(text)}</p>" if text else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "", numbers: bool = True
) -> str:
    """A table; cells are HTML already. With `numbers` all columns but the first stand right."""
    names = " ".join(name for name in (kind, "numbers" if numbers else "") if name)
    top = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    thead = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table class="{names}">{thead}<tbody>\n{body}\n</tbody></table></div>'
    )


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values, one under the other; what has no value is left out."""
    shown = [(name, value) for name, value in rows if value not in (None, "", [], {})]
    cells = "".join(f"<dt>{escaped(n)}</dt><dd>{escaped(v)}</dd>" for n, v in shown)
    return f"<dl>{cells}</dl>" if cells else ""


def figure(content: str, caption: str = "", kind: str = "") -> str:
    """A picture or chart with words under it."""
    name = f' class="{kind}"' if kind else ""
    words = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    return f"<figure{name}>{content}{words}</figure>"


def picture(address: str, words: str, width: int, height: int) -> str:
    """An image by its data address; `words` say what is to be seen."""
    return f'<img src="{address}" alt="{escaped(words)}" width="{width}" height="{height}">'


def chip(name: str, colour: str) -> str:
    """A class's name behind a spot of its colour ("#rrggbb")."""
    return f'<span class="chip"><i style="background:{escaped(colour)}"></i>{escaped(name)}</span>'


def card(value: str, label: str, note: str = "") -> str:
    """A large number with words under it."""
    small = f"<small>{escaped(note)}</small>" if note else ""
    return f'<div class="card"><b>{escaped(value)}</b><span>{escaped(label)}</span>{small}</div>'


def block(kind: str, *parts: str) -> str:
    """Parts side by side or in a grid, as the style of `kind` says."""
    content = "\n".join(part for part in parts if part)
    return f'<div class="{kind}">\n{content}\n</div>' if content else ""


def number(value: float, digits: int = 3) -> str:
    """A number with so many decimals, a dash where there is none."""
    return "–" if value != value else f"{value:.{digits}f}"
