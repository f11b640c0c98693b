"""The table: the paper's APU from the paper's numbers, ranks, and its formats."""

import csv
import io
import re
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import (
    Column,
    ResultTable,
    paper_apu,
    paper_table,
    table_of,
)


def test_the_papers_numbers_give_the_papers_apu():
    printed, rows = paper_apu(), {row.method: row for row in paper_table().rows}
    assert len(printed) == 14
    for (method, kind), value in printed.items():
        # The paper's are of numbers with more digits than it prints.
        assert rows[method].apu[kind].mean == pytest.approx(value, abs=0.011), (method, kind)


def test_the_papers_numbers_get_the_papers_marks():
    """Bold and stars as printed in the paper's Table 2."""
    starred = {r.method: [c.rank == "second" for c in r.cells] for r in paper_table().rows}
    bold = {r.method: [c.rank == "best" for c in r.cells] for r in paper_table().rows}
    assert [m for k in range(8) for m in bold if bold[m][k]] == [
        *("beerlanet", "beerlanet", "staingan", "staingan"),
        *("beerlanet", "beerlanet", "macenko", "lstainnorm"),
    ]
    assert [m for k in range(8) for m in starred if starred[m][k]] == [
        *("vahadane", "vahadane", "beerlanet", "beerlanet"),
        *("vahadane", "vahadane", "vahadane", "reinhard"),
    ]
    apu = {
        row.method: [row.apu[kind].rank for kind in ("detect", "classify")]
        for row in paper_table().rows
    }
    assert apu["beerlanet"] == ["best", "best"]
    assert (apu["lstainnorm"][0], apu["vahadane"][1]) == ("second", "second")


SETTINGS = BenchmarkSettings(
    tasks=[
        {"name": "types", "kind": "classify", "train": "c", "tests": {"y": "d"}},
        {
            "name": "cells",
            "kind": "detect",
            "train": "a",
            "tests": {"x": "b"},
            "metrics": ["mAP50"],
        },
    ],
    methods=["none", "macenko", "beerlanet"],
    seeds=[0, 1],
)


def record(method, seed, task="cells", lab="x", **results):
    return {"task": task, "method": method, "seed": seed, "results": {lab: results}}


def test_records_become_a_table_with_detection_first():
    made = table_of(
        SETTINGS,
        [
            record("none", 0, mAP50=0.5),
            record("none", 1, mAP50=0.6),
            record("macenko", 0, mAP50=0.7),
            record("beerlanet", 1, "types", "y", accuracy=0.9, balanced_accuracy=0.8),
            record("reinhard", 0, mAP50=0.99),
            record("none", 0, "another task", mAP50=0.99),
        ],
    )
    assert [c.kind for c in made.columns] == ["detect", "classify", "classify"]
    assert made.titles() == [
        *("cells → x mAP50", "APU detection"),
        *("types → y Acc", "types → y balanced Acc", "APU classification"),
    ]
    none, macenko, beerlanet = made.rows
    assert none.cells[0].text == "55.00 ± 7.07"
    assert (none.cells[0].rank, macenko.cells[0].rank) == ("second", "best")
    assert none.apu["detect"].mean == pytest.approx((70 - 55) / 70 * 100)
    assert macenko.apu["detect"].text == "0.00"
    assert beerlanet.apu["detect"].text == "–", "no mean of nothing"
    assert beerlanet.cells[1].text == "90.00"
    assert "Macenko, cells → x (1 of 2 seeds)" in made.notes()[0]
    line = made.markdown().splitlines()[2]
    assert line == "| No normalization | 55.00 ± 7.07* | 21.43* | – | – | – |"


def test_equal_ones_share_their_place():
    column = Column("detect", "a", "b", "mAP50")
    values = {("none", column): {0: 50.001}, ("grey", column): {0: 49.999}}
    values[("macenko", column)] = {0: 10.0}
    rows = ResultTable((column,), ("none", "grey", "macenko"), values, (0,)).rows
    assert [row.cells[0].rank for row in rows] == ["best", "best", "second"]
    nothing = ResultTable((column,), ("none", "grey"), {}, (0,)).rows
    assert [row.cells[0].rank for row in nothing] == ["", ""]


# Names as people give them: with what Markdown, LaTeX and CSV take for markup.
NAMES = st.text(st.sampled_from("ab |*_&%$#{}\\~^<>,\"'→é\n"), min_size=1, max_size=8)


@st.composite
def tables(draw):
    kinds = draw(st.lists(st.sampled_from(["detect", "classify"]), min_size=1, max_size=4))
    columns = {
        Column(kind, draw(NAMES), draw(NAMES), draw(st.sampled_from(["mAP50", "accuracy"])))
        for kind in sorted(kinds, reverse=True)
    }
    ordered = tuple(sorted(columns, key=lambda c: (c.kind != "detect", c)))
    methods = tuple(draw(st.permutations(list(METHODS)))[: draw(st.integers(1, 4))])
    values = {
        (m, c): draw(st.dictionaries(st.integers(0, 3), st.floats(0, 100), max_size=3))
        for m in methods
        for c in ordered
    }
    return ResultTable(ordered, methods, values, (0, 1, 2))


@settings(max_examples=60, deadline=None)
@given(tables())
def test_all_formats_have_all_numbers(table):
    width = 1 + len(table.columns) + len(table.kinds)
    lines = table.markdown().splitlines()
    assert len(lines) == 2 + len(table.methods)
    for line in lines:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == width + 1

    latex = table.latex("Caption & more").splitlines()
    body = [line for line in latex if line.endswith(r" \\")]
    assert len(body) == 3 + len(table.methods)
    for line in body[3:]:
        assert len(re.findall(r"(?<!\\)&", line)) == width - 1
    text = "\n".join(latex)
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"[^\\][%#_](?!\w*$)", re.sub(r"\\[%#_&$]", "", text))

    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["method"] for row in rows] == list(table.methods)
    long = list(csv.DictReader(io.StringIO(table.values_csv())))
    for row in rows:
        for column in table.columns:
            name = f"{column.kind}/{column.task}/{column.laboratory}/{column.metric}"
            seeds = table.values[row["method"], column]
            values = [seeds[k] for k in sorted(seeds)]
            assert int(row[f"{name} seeds"]) == len(values)
            if values:
                assert float(row[f"{name} mean"]) == fmean(values)
            if len(values) > 1:
                assert float(row[f"{name} sd"]) == stdev(values)
            mine = [
                float(r["percent"])
                for r in long
                if (r["kind"], r["task"], r["laboratory"], r["metric"], r["method"])
                == (*column, row["method"])
            ]
            assert mine == values


@settings(max_examples=60, deadline=None)
@given(tables())
def test_apu_is_zero_for_the_best_everywhere_and_never_negative(table):
    for kind in table.kinds:
        places = [k for k, column in enumerate(table.columns) if column.kind == kind]
        for row in table.rows:
            means = [row.cells[k].mean for k in places]
            apu = row.apu[kind].mean
            assert (apu is None) == (None in means)
            if apu is not None:
                assert -1e-9 <= apu <= 100 + 1e-9
                if all(
                    row.cells[k].mean
                    == max(m for r in table.rows if (m := r.cells[k].mean) is not None)
                    for k in places
                ):
                    assert apu == 0
