"""The paper's Table 2: methods by test sets and metrics, mean ± deviation over seeds, and APU.

APU, average percent underperformance: for each column the percent difference to the best value of
that column, (best − value) / best × 100, averaged over a row's columns of one kind of task.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple, get_args

from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    METRIC_TITLES,
    BenchmarkSettings,
    TaskKind,
)
from napari_beerlanet.core.common.storage import csv_cell, csv_text, regular_file

PAGE_FILE, VALUES_FILE = "benchmark.html", "values.csv"
TABLE_FILES = ("table.md", "table.tex", "table.csv", VALUES_FILE)
"""In a results folder: Markdown, LaTeX, mean and deviation, and each value."""

_PAPER_FILE = "paper_table.csv"
_KIND_TITLES: dict[TaskKind, str] = {"detect": "Detection", "classify": "Classification"}
_DECIMALS = 2
_MISSING = "–"

Rank = Literal["best", "second", ""]


class Column(NamedTuple):
    """A metric of a task on the images of a laboratory."""

    kind: TaskKind
    task: str
    laboratory: str
    metric: str

    @property
    def dataset(self) -> str:
        """The data set as it heads columns: the task, and the laboratory where that is another."""
        same = not self.laboratory or self.laboratory == self.task
        return self.task if same else f"{self.task} → {self.laboratory}"

    @property
    def metric_title(self) -> str:
        """What the metric is called in the table."""
        return METRIC_TITLES.get(self.metric, self.metric)


@dataclass(frozen=True)
class Cell:
    """Values in percent, one for each seed, and their place in the column."""

    values: tuple[float, ...]
    rank: Rank = ""

    @property
    def mean(self) -> float | None:
        """None where there is no value."""
        return fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation (of a sample); None of fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def text(self) -> str:
        """ "91.03 ± 0.41"."""
        if self.mean is None:
            return _MISSING
        spread = "" if self.deviation is None else f" ± {_number(self.deviation)}"
        return _number(self.mean) + spread


@dataclass(frozen=True)
class TableRow:
    """A method: a cell for each column, and the APU of each kind of task with its rank."""

    method: str
    cells: tuple[Cell, ...]
    apu: Mapping[TaskKind, Cell]

    @property
    def title(self) -> str:
        """What the method is called."""
        return METHODS[self.method].title if self.method in METHODS else self.method


@dataclass(frozen=True)
class ResultTable:
    """Values in percent by method and column, a value per seed; `seeds` are expected of each."""

    columns: tuple[Column, ...]
    methods: tuple[str, ...]
    values: Mapping[tuple[str, Column], Mapping[int, float]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of tasks that there are, in the order of their columns."""
        return tuple(dict.fromkeys(column.kind for column in self.columns))

    @cached_property
    def rows(self) -> tuple[TableRow, ...]:
        """A row per method, in order."""
        cells = {
            (method, column): Cell(self._values(method, column))
            for method in self.methods
            for column in self.columns
        }
        apus = {
            (m, kind): Cell(self._apu(cells, m, kind)) for m in self.methods for kind in self.kinds
        }
        made = []
        for method in self.methods:
            ranked = tuple(
                Cell(
                    cells[method, column].values,
                    _rank(cells[method, column], [cells[m, column] for m in self.methods], max),
                )
                for column in self.columns
            )
            apu = {
                kind: Cell(
                    apus[method, kind].values,
                    _rank(apus[method, kind], [apus[m, kind] for m in self.methods], min),
                )
                for kind in self.kinds
            }
            made.append(TableRow(method, ranked, apu))
        return tuple(made)

    def _values(self, method: str, column: Column) -> tuple[float, ...]:
        by_seed = self.values.get((method, column), {})
        return tuple(by_seed[seed] for seed in sorted(by_seed))

    def _apu(
        self, cells: Mapping[tuple[str, Column], Cell], method: str, kind: TaskKind
    ) -> tuple[float, ...]:
        """The APU of a row; nothing where a column of the kind has no value."""
        columns = [column for column in self.columns if column.kind == kind]
        below = []
        for column in columns:
            mean = cells[method, column].mean
            if mean is None:
                return ()
            means = [m for name in self.methods if (m := cells[name, column].mean) is not None]
            best = max(means)
            below.append((best - mean) / best * 100 if best > 0 else 0.0)
        return (fmean(below),)

    def notes(self) -> list[str]:
        """Sentences on what is missing."""
        short = [
            f"{row.title}, {column.dataset} ({len(cell.values)} of {len(self.seeds)} seeds)"
            for row in self.rows
            for column, cell in zip(self.columns, row.cells, strict=True)
            if len(cell.values) < len(self.seeds)
        ]
        short = list(dict.fromkeys(short))
        return [f"Not complete: {'; '.join(short)}."] if short else []

    # --- as text ---------------------------------------------------------------------------------

    def head(self) -> list[tuple[TaskKind, list[tuple[str, list[str]]]]]:
        """Kinds of tasks with their data sets, each with its metrics; APU comes after each kind."""
        head: list[tuple[TaskKind, list[tuple[str, list[str]]]]] = []
        for kind in self.kinds:
            mine = [column for column in self.columns if column.kind == kind]
            sets = [
                (name, [column.metric_title for column in group])
                for name, group in groupby(mine, key=lambda column: column.dataset)
            ]
            head.append((kind, sets))
        return head

    def texts(self, row: TableRow, mark: Callable[[str, Rank], str]) -> list[str]:
        """The cells of a row as texts, an APU after each kind's columns."""
        shown = []
        for kind in self.kinds:
            pairs = zip(self.columns, row.cells, strict=True)
            shown += [mark(cell.text, cell.rank) for column, cell in pairs if column.kind == kind]
            shown.append(mark(row.apu[kind].text, row.apu[kind].rank))
        return shown

    def titles(self, join: str = " ") -> list[str]:
        """What columns are called, an APU after each kind's."""
        return [
            title
            for kind in self.kinds
            for title in (
                *(f"{c.dataset}{join}{c.metric_title}" for c in self.columns if c.kind == kind),
                f"APU {_KIND_TITLES[kind].lower()}",
            )
        ]

    def markdown(self) -> str:
        """The best bold, the second best starred."""
        marks = {"best": "**{}**", "second": "{}*", "": "{}"}
        head = ["Method (%)", *map(_markdown_text, self.titles())]
        lines = [_markdown_line(head), "|---" + "|---:" * (len(head) - 1) + "|"]
        for row in self.rows:
            cells = self.texts(row, lambda text, rank: marks[rank].format(text))
            lines.append(_markdown_line([_markdown_text(row.title), *cells]))
        return "\n".join(lines) + "\n"

    def latex(self, caption: str = "", label: str = "tab:benchmark") -> str:
        """A table as in the paper: kinds of tasks, data sets, metrics, and a row per method."""
        marks = {"best": r"\textbf{{{}}}", "second": "{}*", "": "{}"}
        head, kinds, sets, metrics = self.head(), ["Task"], ["Data set"], [r"Metrics (\%)"]
        for kind, parts in head:
            width = sum(len(names) for _, names in parts) + 1
            kinds.append(rf"\multicolumn{{{width}}}{{c}}{{{_KIND_TITLES[kind]}}}")
            for name, names in parts:
                sets.append(rf"\multicolumn{{{len(names)}}}{{c}}{{{latex_text(name)}}}")
                metrics += [latex_text(metric) for metric in names]
            sets.append("")
            metrics.append("APU")
        widths = "|".join("c" * (sum(len(names) for _, names in parts) + 1) for _, parts in head)
        lines = [r"\begin{table}[t]", r"\centering"]
        lines += [rf"\caption{{{latex_text(caption)}}}"] if caption else []
        lines += [rf"\label{{{label}}}", rf"\begin{{tabular}}{{l|{widths}}}", r"\hline"]
        lines += [" & ".join(cells) + r" \\" for cells in (kinds, sets, metrics)]
        lines.append(r"\hline")
        for row in self.rows:
            cells = self.texts(row, lambda text, rank: marks[rank].format(latex_text(text)))
            lines.append(" & ".join([latex_text(row.title), *cells]) + r" \\")
        lines += [r"\hline", r"\end{tabular}", r"\end{table}"]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """A row per method; of each column mean, standard deviation and number of seeds."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        head = ["method"]
        for column in self.columns:
            name = f"{column.kind}/{column.task}/{column.laboratory}/{column.metric}"
            head += [f"{name} mean", f"{name} sd", f"{name} seeds"]
        writer.writerow(map(csv_cell, [*head, *(f"{kind} APU" for kind in self.kinds)]))
        for row in self.rows:
            cells: list[object] = [row.method]
            for cell in row.cells:
                cells += [_exact(cell.mean), _exact(cell.deviation), len(cell.values)]
            writer.writerow([*cells, *(_exact(row.apu[kind].mean) for kind in self.kinds)])
        return out.getvalue()

    def values_csv(self) -> str:
        """A row per value: task, laboratory, metric, method, seed."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["kind", "task", "laboratory", "metric", "method", "seed", "percent"])
        for method in self.methods:
            for column in self.columns:
                for seed, value in sorted(self.values.get((method, column), {}).items()):
                    writer.writerow(map(csv_cell, [*column, method, seed, _exact(value)]))
        return out.getvalue()


def columns_of(settings: BenchmarkSettings) -> tuple[Column, ...]:
    """The columns of a benchmark's table, those of detection first."""
    return tuple(
        Column(task.kind, task.name, test.name, metric)
        for kind in get_args(TaskKind)
        for task in settings.tasks
        if task.kind == kind
        for test in task.tests
        for metric in task.columns
    )


def table_of(settings: BenchmarkSettings, records: Iterable[Mapping[str, object]]) -> ResultTable:
    """The table of a benchmark from the records of its finished jobs."""
    columns = columns_of(settings)
    values: dict[tuple[str, Column], dict[int, float]] = {}
    for record in records:
        results = record["results"]
        assert isinstance(results, Mapping)
        for column in columns:
            if column.task == record["task"] and column.laboratory in results:
                value = results[column.laboratory].get(column.metric)
                if value is not None:
                    cell = values.setdefault((str(record["method"]), column), {})
                    cell[int(str(record["seed"]))] = 100 * float(value)
    return ResultTable(columns, settings.methods, values, settings.seeds)


def read_values(path: Path) -> dict[tuple[str, Column], dict[int, float]]:
    """Values in percent by method and column, by seed, as `values_csv` has written them."""
    values: dict[tuple[str, Column], dict[int, float]] = {}
    with regular_file(path).open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            line = {name: csv_text(cell) for name, cell in cells.items()}
            kind: TaskKind = "detect" if line["kind"] == "detect" else "classify"
            column = Column(kind, line["task"], line["laboratory"], line["metric"])
            by_seed = values.setdefault((line["method"], column), {})
            by_seed[int(line["seed"])] = float(line["percent"])
    return values


def paper_table() -> ResultTable:
    """The paper's own numbers, which are means of three seeds."""
    rows = _paper_rows()
    names = [name for name in rows[0] if "/" in name]
    columns = {name: _paper_column(name) for name in names}
    values = {
        (row["method"], columns[name]): {0: float(row[name])} for row in rows for name in names
    }
    return ResultTable(tuple(columns.values()), tuple(r["method"] for r in rows), values, (0,))


def paper_apu() -> dict[tuple[str, TaskKind], float]:
    """The APU columns as the paper prints them, by method and kind of task."""
    return {
        (row["method"], kind): float(row[f"{kind} APU"])
        for row in _paper_rows()
        for kind in get_args(TaskKind)
    }


def _paper_rows() -> list[dict[str, str]]:
    text = (files(__package__ or "") / _PAPER_FILE).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _paper_column(name: str) -> Column:
    kind, task, metric = name.split("/")
    return Column("detect" if kind == "detect" else "classify", task, "", metric)


def _rank(cell: Cell, others: Sequence[Cell], best: Callable[[list[float]], float]) -> Rank:
    """Its place in a column, by what is printed; equal ones share it."""
    if cell.mean is None:
        return ""
    shown = [round(c.mean, _DECIMALS) for c in others if c.mean is not None]
    mine, first = round(cell.mean, _DECIMALS), best(shown)
    if mine == first:
        return "best"
    return "second" if mine == best([value for value in shown if value != first]) else ""


def _number(value: float) -> str:
    return f"{value:z.{_DECIMALS}f}"


def _exact(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(float(value))


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_text(text: str) -> str:
    """A text as one cell: what would end it or be taken for markup is escaped."""
    plain = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\|*_`[]<>#" else c for c in plain)


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "→": r"$\rightarrow$", "±": r"$\pm$", "×": r"$\times$", "–": "--", "µ": r"$\mu$",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def latex_text(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
