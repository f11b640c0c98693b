"""The page of a benchmark: one HTML file with the table, pictures, classes, curves and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from napari_beerlanet._version import __version__
from napari_beerlanet.core.benchmark.job import PICTURES_FOLDER
from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    BenchmarkSettings,
    TaskKind,
    TaskSettings,
)
from napari_beerlanet.core.benchmark.table import Cell, ResultTable, paper_apu, paper_table
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.core.report.charts import ChartLine, LineChart
from napari_beerlanet.core.report.pictures import EmbeddedImage, embed_image
from napari_beerlanet.core.report.report import write_page
from napari_beerlanet.core.report.sections import RowName

_TEMPLATE = "benchmark.html.jinja"
_PICTURE_QUALITY = 80

Record = Mapping[str, Any]


def write_benchmark_page(
    path: Path,
    settings: BenchmarkSettings,
    table: ResultTable,
    records: Sequence[Record],
    failures: Mapping[str, str],
    paper: bool = False,
) -> None:
    """Write the page as things stand, whole or not at all; `failures` are errors by job."""
    write_page(
        path, page_content(path.parent, settings, table, records, failures, paper), _TEMPLATE
    )


def page_content(
    out: Path,
    settings: BenchmarkSettings,
    table: ResultTable,
    records: Sequence[Record],
    failures: Mapping[str, str],
    paper: bool = False,
) -> dict[str, Any]:
    """What the template shows."""
    colours = dict(zip(settings.methods, class_colours(len(settings.methods)), strict=True))
    total = len(settings.tasks) * len(settings.methods) * len(settings.seeds)
    seconds = sum(sum((record.get("seconds") or {}).values()) for record in records)
    return {
        "title": "Benchmark of stain normalization",
        "subtitle": f"{len(records)} of {count_of(total, 'job')} done, "
        f"{format_duration(seconds)} of computing. Made by napari-beerlanet {__version__}.",
        "table": _table_content(table),
        "paper": _table_content(paper_table(), paper_apu()) if paper else None,
        "spread": spread_text(len(settings.seeds)),
        "notes": [*table.notes(), *dict.fromkeys(n for r in records for n in r.get("notes", ()))],
        "failures": list(failures.items()),
        "methods": [
            (RowName(METHODS[name].title, colours[name]), METHODS[name].description)
            for name in settings.methods
        ],
        "tasks": [
            {
                "name": task.name,
                "pictures": _pictures(out, task, settings, records),
                "classes": _class_tables(task, settings, records),
                "curves": _curves(task, settings, records, colours),
            }
            for task in settings.tasks
        ],
        "legend": [(METHODS[name].title, colours[name]) for name in settings.methods],
        "facts": _facts(settings, records),
        "versions": _merged(records, "versions"),
        "hashes": _hashes(settings, records),
    }


def spread_text(count: int) -> str:
    """What a number of a table over so many seeds is."""
    return f"Mean ± standard deviation over {count} seeds" if count > 1 else "Of one seed"


def _table_content(
    table: ResultTable, printed: Mapping[tuple[str, TaskKind], float] | None = None
) -> dict[str, Any]:
    """Rows of cells, each with whether it is an APU; `printed` APUs take the place of ours."""
    rows = []
    for row in table.rows:
        cells: list[tuple[Cell, bool]] = []
        for kind in table.kinds:
            pairs = zip(table.columns, row.cells, strict=True)
            cells += [(cell, False) for column, cell in pairs if column.kind == kind]
            apu = row.apu[kind]
            cells.append(
                (replace(apu, values=(printed[row.method, kind],)) if printed else apu, True)
            )
        rows.append((row.title, cells))
    return {"head": table.head(), "rows": rows}


def _of_task(task: TaskSettings, method: str, records: Iterable[Record]) -> list[Record]:
    """A method's records on a task, by seed."""
    mine = [r for r in records if (r["task"], r["method"]) == (task.name, method)]
    return sorted(mine, key=lambda record: int(record["seed"]))


def _pictures(
    out: Path, task: TaskSettings, settings: BenchmarkSettings, records: Sequence[Record]
) -> list[tuple[str, list[tuple[str, EmbeddedImage | None]]]]:
    """For each laboratory its picture by each method, of the method's first seed."""
    first = {m: mine[0] for m in settings.methods if (mine := _of_task(task, m, records))}
    titles = ["the training laboratory", *(test.name for test in task.tests)]
    return [
        (
            title,
            [
                (METHODS[method].title, _embed(out, record["pictures"][number]))
                for method, record in first.items()
            ],
        )
        for number, title in enumerate(titles)
        if first
    ]


def _embed(out: Path, picture: Mapping[str, Any]) -> EmbeddedImage | None:
    try:
        with Image.open(out / PICTURES_FOLDER / str(picture["file"])) as image:
            return embed_image(
                image, f"{picture['laboratory']}: {picture['image']}", _PICTURE_QUALITY
            )
    except OSError:  # a picture is not worth a failure
        return None


def _class_tables(
    task: TaskSettings, settings: BenchmarkSettings, records: Sequence[Record]
) -> list[dict[str, Any]]:
    """For each test set a table: methods by classes, AP50 or recall in percent."""
    key, what = ("AP50", "AP50") if task.kind == "detect" else ("recall", "Recall")
    made = []
    for test in task.tests:
        counts: dict[str, int] = {}
        values: dict[tuple[str, str], list[float]] = {}
        for method in settings.methods:
            for record in _of_task(task, method, records):
                for name, scores in (
                    record["results"].get(test.name, {}).get("per_class", {}).items()
                ):
                    counts[name] = int(scores["count"])
                    if scores["count"]:
                        values.setdefault((method, name), []).append(100 * float(scores[key]))
        names = [name for name, count in counts.items() if count]
        rows = [
            (
                RowName(METHODS[method].title),
                *(Cell(tuple(values.get((method, name), ()))).text for name in names),
            )
            for method in settings.methods
            if any((method, name) in values for name in names)
        ]
        head = ["", *(f"{name} ({counts[name]})" for name in names)]
        if rows:
            made.append({"title": f"{what} on {test.name} (%)", "head": head, "rows": rows})
    return made


def _curves(
    task: TaskSettings,
    settings: BenchmarkSettings,
    records: Sequence[Record],
    colours: Mapping[str, str],
) -> LineChart | None:
    """The score on the training laboratory's validation images after each epoch, mean of seeds."""
    points: dict[str, dict[int, list[float]]] = {}
    for method in settings.methods:
        for record in _of_task(task, method, records):
            for epoch, score in record.get("curve", ()):
                points.setdefault(method, {}).setdefault(int(epoch), []).append(float(score))
    last = max((max(mine) for mine in points.values()), default=0)
    if not last:
        return None
    lines = [
        ChartLine(
            METHODS[method].title,
            colours[method],
            np.array([epoch / last for epoch in sorted(mine)]),
            np.array([fmean(mine[epoch]) for epoch in sorted(mine)]),
        )
        for method, mine in points.items()
    ]
    score = "mAP50" if task.kind == "detect" else "accuracy"
    caption = f"{score} on the training laboratory's validation images, mean of the seeds."
    return LineChart(lines, f"training (1 is epoch {last})", score, caption=caption)


def _facts(settings: BenchmarkSettings, records: Sequence[Record]) -> list[tuple[str, str]]:
    facts = [("seeds", ", ".join(map(str, settings.seeds)))]
    template = "a random training image for each seed" if settings.template == "random" else ""
    facts.append(("template", template or Path(settings.template).name))
    for task in settings.tasks:
        tests = ", ".join(f"{t.name} ({_last_names(t.data)})" for t in task.tests)
        facts.append(
            (task.name, f"{task.kind}, trained on {_last_names(task.train)}, tested on {tests}")
        )
        chosen = {
            name: getattr(task, name)
            for name in ("backbone", "weights", "epochs", "image_size", "batch", "detector")
        }
        if task.kind == "detect":
            chosen.pop("backbone")
        shown = [f"{k.replace('_', ' ')} {_last_names(str(v))}" for k, v in chosen.items() if v]
        facts.append(("", ", ".join([*shown, *(f"{k} {v}" for k, v in task.options.items())])))
    gan = next((record["staingan"] for record in records if record.get("staingan")), None)
    if gan is not None:
        facts.append(
            (
                "StainGAN",
                f"{gan['filters']} filters, {gan['blocks']} blocks, crops of {gan['crop']}, "
                f"{gan['steps']} steps (the paper's: 64 filters, 9 blocks, crops of 256)",
            )
        )
    return [(name, value) for name, value in facts if value]


def _last_names(path: str) -> str:
    """Of a path the last two names, which say enough."""
    return "/".join(Path(path).parts[-2:])


def _merged(records: Sequence[Record], key: str) -> list[tuple[str, str]]:
    """Values of all records by name; several where they differ."""
    found: dict[str, list[str]] = {}
    for record in records:
        for name, value in (record.get(key) or {}).items():
            if str(value) not in found.setdefault(name, []):
                found[name].append(str(value))
    return [(name, ", ".join(values)) for name, values in found.items()]


def _hashes(settings: BenchmarkSettings, records: Sequence[Record]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for record in records:
        for name, digest in (record.get("data") or {}).items():
            what = "training data" if name == "training" else name
            found[f"{record['task']}, {what}"] = str(digest)
        template = record.get("template")
        if template:
            found[f"template of seed {record['seed']}, {template['file']}"] = template["sha256"]
    return list(found.items())
