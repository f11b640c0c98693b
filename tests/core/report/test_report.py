"""The report: complete in itself, right in its numbers, harmless whatever the names hold."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import Proportion, wilson_interval
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError, pixel_hash
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.core.report.charts import (
    ChartLine,
    ConfusionTable,
    HistogramChart,
    LineChart,
)
from napari_beerlanet.core.report.pictures import crop_with_box, evenly_spaced
from napari_beerlanet.core.report.report import (
    CONTENT_SECURITY_POLICY,
    render_report,
    report_environment,
    write_report,
)
from napari_beerlanet.core.report.subject import ReportSubject
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.samples import blood_smear

HOSTILE = '<script>alert("1")</script>'
QUOTES = "\"'><img src=x onerror=alert(1)>&amp;\x00\x1b\ud83d"
VOID = {"meta", "img", "br", "link", "input", "hr", "line", "rect", "circle", "polyline"}
FIXED = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


class Reader(HTMLParser):
    """What a browser would see: tags that close, attributes, text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def check_harmless(text):
    """Nothing runs, nothing is loaded: by the tags that are there, and by the policy in it."""
    page = Reader(text)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form"} & set(page.tags)
    for _tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "srcset", "action", "xlink:href")
        if name == "src":
            assert re.fullmatch(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", value)
        if name == "style":
            assert re.fullmatch(r"background:#[0-9a-fA-F]{6}|--share:[0-9.]+", value)
    assert not re.search(r"@import|url\(|https?://", text)
    assert f'content="{CONTENT_SECURITY_POLICY}"' in text
    return page


@pytest.fixture(scope="module")
def smear():
    return blood_smear((120, 160), cell_diameter=30).image


def found(names, n=24, shape=(120, 160), status=True, seed=0, **rest):
    random = np.random.default_rng(seed)
    corner = random.uniform(0, 0.8, (n, 2)) * (shape[1], shape[0])
    labels = random.integers(0, len(names), n)
    columns = {"status": random.choice(["accepted", "rejected", "unreviewed"], n)} if status else {}
    boxes, scores = np.hstack([corner, corner + 25]), random.uniform(0.05, 1, n)
    return Detections(boxes, labels, scores, names, columns, image_shape=shape, **rest)


def everything(smear, names, **rest):
    d = found(names)
    truth = Annotations(d.xyxy[::2] + 1.0, d.labels[::2], list(names))
    more = {
        "name": f"smear {HOSTILE}.png",
        "decomposition": decompose(smear, iterations=3, components=3),
        "evaluation": LiveEvaluation.of(d, truth),
        "model": {
            "name": QUOTES,
            "classes": list(names),
            "components": 8,
            "iterations": 10,
            "training": {
                "data": HOSTILE,
                "metrics": {HOSTILE: {"mAP50": 0.5, "mAP50-95": 0.25, "images": HOSTILE}},
                "versions": {HOSTILE: QUOTES},
            },
        },
        "hashes": {HOSTILE: QUOTES},
        "settings": {HOSTILE: QUOTES},
        "facts": {QUOTES: HOSTILE},
        "notes": [HOSTILE],
        "date": FIXED,
    }
    return ReportSubject(**{"pixels": smear, "detections": d, **more, **rest})


# --- complete and harmless -----------------------------------------------------------------------


def test_names_that_are_html_stay_names(smear):
    names = [HOSTILE, QUOTES, "</style></svg></table>"]
    text = render_report(everything(smear, names))
    page = check_harmless(text)
    assert text.count("alert(") > 5
    assert 'class <script>alert("1")</script>' not in text
    assert HOSTILE in page.text
    assert "</style></svg></table>" in page.text
    assert text.encode("utf-8")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=3, unique=True))
def test_any_name_is_harmless(names):
    pixels = np.full((60, 60, 3), 200, np.uint8)
    d = found(names, 5, (60, 60))
    truth = Annotations(d.xyxy, d.labels, list(names))
    subject = ReportSubject(names[0], pixels, d, evaluation=LiveEvaluation.of(d, truth), date=FIXED)
    check_harmless(render_report(subject))


def test_the_style_is_part_of_the_package():
    style = files("napari_beerlanet.core.report") / "report.css"
    assert "@media print" in style.read_text(encoding="utf-8")


def test_escaping():
    template = report_environment().from_string("{{ text }}")
    assert template.render(text="<a b='c' d=\"e\">&") == (
        "&lt;a b=&#39;c&#39; d=&#34;e&#34;&gt;&amp;"
    )
    assert template.render(text="\x00\x1b\x85x\n") == "\ufffd\ufffd\ufffdx\n"
    template.render(text="\ud83d").encode("utf-8")


# --- what it says --------------------------------------------------------------------------------


def test_counts_after_threshold_and_review(smear):
    d = Detections(
        [[10 * k, 10, 10 * k + 20, 30] for k in range(6)], [0, 0, 0, 1, 1, 0],
        [0.9, 0.8, 0.7, 0.6, 0.2, 0.1], ["RBC", "WBC"],
        {"status": ["accepted", "rejected", "unreviewed", "accepted", "accepted", "unreviewed"]},
    )  # fmt: skip
    subject = ReportSubject("a.png", smear, d, confidence=0.25, date=FIXED)
    # One is rejected, one is below the threshold, and one below it was accepted all the same.
    assert subject.counted_detections.counts() == {"RBC": 2, "WBC": 2}
    text = check_harmless(render_report(subject)).text
    assert "4 objects above confidence 0.25; 4 of 5 reviewed" in text
    assert "after review" not in text
    assert "4 of 5 reviewed." in text
    assert "Rejected by the reviewer (1)" in text
    other = ReportSubject("a.png", smear, d, confidence={"RBC": 0.75, "WBC": 0.95}, date=FIXED)
    assert other.counted_detections.counts() == {"RBC": 1, "WBC": 2}
    assert "RBC 0.75, WBC 0.95" in Reader(render_report(other)).text


def test_candidates_are_known_and_do_not_count(smear):
    d = found(["RBC"], 30, status=False)
    subject = ReportSubject("a.png", smear, d.above(0.5), confidence=0.5, date=FIXED)
    assert len(subject.candidates) == 30
    assert len(subject.counted_detections) == len(d.above(0.5)) < 30
    text = Reader(render_report(subject)).text
    assert "RBC: 30 candidates" in text
    assert "Nobody has reviewed these detections yet." in text


def test_every_crop_says_its_class(smear):
    d = found(["RBC", "WBC"], 12)
    page = Reader(render_report(ReportSubject("a.png", smear, d, confidence=0.0, date=FIXED)))
    crops = page.text.split("Examples")[1]
    told = {
        name: sorted(re.findall(rf"\b{name} ([0-9]+) %", crops), key=int, reverse=True)
        for name in d.names
    }
    for label, name in enumerate(d.names):  # the rejected, too, among which are both classes
        assert told[name] == [f"{100 * score:.0f}" for score in d.scores[d.labels == label]]
    rejected = crops.split("Rejected by the reviewer")[1]
    assert {name for name in d.names if re.search(rf"\b{name} [0-9]+ %", rejected)} == set(d.names)


def test_cells_per_area_where_the_pixel_size_is_known(smear):
    d = found(["RBC", "WBC"], 24, status=False, pixel_size=(0.5, 0.5))
    text = Reader(render_report(ReportSubject("a", smear, d, confidence=0.0, date=FIXED))).text
    area = 120 * 160 * 0.25 / 1e6
    count = d.counts()["RBC"]
    low, high = chi2.ppf(0.025, 2 * count) / 2, chi2.ppf(0.975, 2 * count + 2) / 2
    assert f"{count / area:,.0f} ({low / area:,.0f} to {high / area:,.0f})" in text
    assert f"RBC {count / area:,.0f} per mm²" in text
    without = found(["RBC", "WBC"], 24, status=False)
    assert "mm²" not in render_report(ReportSubject("a", smear, without, date=FIXED))


def test_parasitaemia_where_it_applies(smear):
    d = found(["RBC", "infected RBC", "WBC"], 40, status=False)
    subject = ReportSubject("a.png", smear, d, confidence=0.0, date=FIXED)
    counts = subject.counted_detections.counts()
    share = 100 * counts["infected RBC"] / (counts["RBC"] + counts["infected RBC"])
    text = Reader(render_report(subject)).text
    assert f"{share:.2f} % parasitaemia 95 % interval" in text
    assert f"{counts['infected RBC']} infected of" in text
    other = ReportSubject("a.png", smear, found(["RBC", "WBC"], status=False), date=FIXED)
    assert "parasitaemia" not in render_report(other)


# --- cell types ----------------------------------------------------------------------------------

STAGES = ["uninfected", "ring", "schizont"]


def typed(names=("RBC", "WBC"), types=STAGES, n=30, **rest):
    """Some detections of which the first class is classified; the classifier is never certain."""
    d = found(list(names), n, status=False, **rest)
    rows = np.flatnonzero(d.labels == 0)
    p = np.random.default_rng(1).dirichlet(np.ones(len(types)), len(rows)).astype(np.float32)
    return d.with_types(list(types), p, rows=rows, classifier="stages")


def test_types_are_counted_with_intervals(smear):
    d = typed()
    info = {"name": "stages", "classes": STAGES, "unknown": {"babesia": ["ring"]},
            "training": {"metrics": {"val": {"accuracy": 0.9, "balanced_accuracy": 0.8,
                                             "crops": 40}}}}  # fmt: skip
    subject = ReportSubject("a.png", smear, d, 0.0, classifier=info,
                            hashes={"the classifier": "abc"}, date=FIXED)  # fmt: skip
    page = check_harmless(render_report(subject))
    counts = d.type_counts()
    whole = sum(counts.values())
    for name, count in counts.items():
        low, high = wilson_interval(count, whole)
        share = Proportion(count, whole)
        mean = d.columns["probability"][d.columns["type"] == name].mean()
        assert f"{name} {count} {share} {mean:.2f}" in page.text
        assert share.interval == (low, high)
    assert "The classifier: does not know babesia; may call them ring." in page.text
    assert f"Only {whole} red cells counted" in page.text
    assert "Hash of the classifier abc" in page.text
    assert "val 40 90.0 % 80.0 %" in page.text
    plain = Reader(render_report(ReportSubject("a.png", smear, found(["RBC"]), date=FIXED)))
    assert "Cell types" not in plain.text


def test_types_have_the_colours_that_are_given_or_the_classifiers(smear):
    info = {"name": "stages", "classes": STAGES, "colours": ["#111111", "#222222", "#333333"]}
    subject = ReportSubject("a.png", smear, typed(), 0.0, classifier=info, date=FIXED)
    assert subject.type_shades == dict(zip(STAGES, info["colours"], strict=True))
    chosen = replace(subject, type_colours={"ring": "#abcdef", "odd": "#000000"})
    assert chosen.type_shades == subject.type_shades | {"ring": "#abcdef"}
    assert "#abcdef" in render_report(chosen)


def test_what_the_classifier_knows_is_not_said_to_be_unknown(smear):
    model = {"name": "finder", "classes": ["RBC", "WBC"],
             "unknown": {"parasites": ["WBC"], "blasts": ["WBC"]}}  # fmt: skip
    info = {"name": "stages", "classes": STAGES}
    subject = ReportSubject("a.png", smear, typed(), 0.0, model=model, classifier=info, date=FIXED)
    text = Reader(render_report(subject)).text
    assert "The detector: does not know blasts; may call them WBC." in text
    assert "The detector does not know parasites: those outside of the red cells" in text
    assert "The detector: does not know parasites" not in text


def test_galleries_of_the_most_and_the_least_certain(smear):
    d = typed(n=90)
    page = Reader(render_report(ReportSubject("a.png", smear, d, 0.0, date=FIXED)))
    part = page.text.split("Cell types")[1].split("Review")[0]
    for name in STAGES:
        sure = np.sort(d.columns["probability"][d.columns["type"] == name])[::-1]
        told = re.findall(rf"\b{name} ([0-9]+) %", part)
        most, least = sure[:8], sure[8:][::-1][:8]
        wanted = [f"{100 * v:.0f}" for v in [*most, *least]]
        assert told[-len(wanted) :] == wanted
        assert len(wanted) > 8


def test_types_against_annotations(smear):
    d = typed(n=24)
    named = np.flatnonzero(d.labels == 0)
    types = [str(name) for name in d.columns["type"]]
    types[named[0]] = "schizont" if types[named[0]] != "schizont" else "ring"
    truth = Annotations(d.xyxy + 0.5, d.labels, ["RBC", "WBC"], types=types)
    subject = ReportSubject("a", smear, d, 0.0, evaluation=LiveEvaluation.of(d, truth), date=FIXED)
    text = Reader(render_report(subject)).text
    right, whole = len(named) - 1, len(named)
    low, high = wilson_interval(right, whole)
    assert (
        f"{whole} cells with a type on both sides: accuracy {100 * right / whole:.1f} % "
        f"(95 % interval {100 * low:.0f} to {100 * high:.0f} %)" in text
    )
    untyped = Annotations(d.xyxy, d.labels, ["RBC", "WBC"])
    other = ReportSubject("a", smear, d, 0.0, evaluation=LiveEvaluation.of(d, untyped), date=FIXED)
    assert "Types against annotations" not in render_report(other)


def test_one_page_of_a_smear(smear):
    d = typed(n=60)
    info = {"name": "stages", "classes": STAGES, "applies_to": ["RBC"]}
    hashes = {"the image file": "ab" * 32}
    subject = ReportSubject("a.png", smear, d, 0.0, classifier=info, hashes=hashes, date=FIXED)
    page = check_harmless(render_report(subject, one_page=True))
    counts = d.type_counts()
    cells, infected = sum(counts.values()), counts["ring"] + counts["schizont"]
    low, high = wilson_interval(infected, cells)
    assert "Research use only" in page.text
    assert (
        f"{100 * infected / cells:.2f} % parasitaemia 95 % interval {100 * low:.2f} to "
        f"{100 * high:.2f} %" in page.text
    )
    assert f"{infected} infected red cells of {cells} counted" in page.text
    for name in STAGES:
        assert f"{name} {counts[name]} {Proportion(counts[name], cells)}" in page.text
    white = d.counts()["WBC"]
    assert f"{100 * infected / white:,.0f} parasites per 100 white cells {white} white" in page.text
    assert "Only" in page.text
    assert "ab" * 32 in page.text
    # The probability of an infection, whatever its stage, and never more than 100 %.
    sure = 1 - d.columns["P(uninfected)"][np.isin(d.columns["type"], STAGES[1:])]
    told = re.findall(r"\b(?:ring|schizont) ([0-9]+) %", page.text.split("Infected cells")[1])
    assert told[0] == f"{100 * sure.max():.0f}"
    assert told[8] == f"{100 * sure.min():.0f}"
    assert max(map(int, told)) <= 100


def test_one_page_where_nothing_is_infected_or_nothing_was_found(smear):
    info = {"name": "stages", "classes": STAGES}
    none = Detections.empty(["RBC"])
    text = Reader(
        render_report(ReportSubject("a", smear, none, classifier=info, date=FIXED), True)
    ).text
    assert "No red cells were found." in text
    with pytest.raises(ValueError, match="such as malaria"):
        render_report(ReportSubject("a", smear, found(["RBC"]), date=FIXED), one_page=True)
    healthy = found(["RBC"], status=False)
    p = np.tile(np.array([[1, 0, 0]], np.float32), (len(healthy), 1))
    subject = ReportSubject("a", smear, healthy.with_types(STAGES, p), 0.0, date=FIXED)
    text = Reader(render_report(subject, one_page=True)).text
    assert "0.00 % parasitaemia" in text
    assert "Infected cells" not in text.replace("Infected cells are counted", "")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=3, unique=True))
def test_any_type_is_harmless(types):
    pixels = np.full((60, 60, 3), 200, np.uint8)
    d = typed(("RBC",), ["uninfected", *(f"{name} ring" for name in types)], 6, shape=(60, 60))
    subject = ReportSubject("a", pixels, d, 0.0, date=FIXED)
    check_harmless(render_report(subject))
    check_harmless(render_report(subject, one_page=True))


def test_measures_are_those_of_quality(smear):
    subject = everything(smear, ["RBC", "WBC"])
    text = Reader(render_report(subject)).text
    v = subject.evaluation.match_at(0.25)
    assert (
        f"{len(v.true_positives)} true, {len(v.false_positives)} false, {len(v.missed)} missed"
        in text
    )
    for score in [*v.per_class, v.mean, v.all_boxes]:
        numbers = (score.precision, score.recall, score.f1, score.ap50, score.ap)
        assert " ".join(f"{100 * number:.1f} %" for number in numbers) in text
    coco = subject.evaluation.average_precisions("coco").mean(axis=0)
    assert f"As COCO's own program computes it: {coco[0]:.3f} and {coco.mean():.3f}." in text
    assert f"highest on average at {subject.evaluation.best_threshold():.2f}" in text


def test_stains_model_versions_hashes_and_date(smear):
    subject = everything(smear, ["RBC", "WBC"], hashes={})
    text = Reader(render_report(subject)).text
    assert "16 November 2026" in text
    assert "2026-11-16T12:00:00+00:00" in text
    assert pixel_hash(smear) in text
    assert "ultralytics" in text
    assert "Decomposed stains" in render_report(subject)
    assert pixel_hash(smear) != pixel_hash(smear[::-1])


def test_nothing_is_less_than_zero_by_a_hair(smear):
    d = decompose(smear, iterations=3, components=3)
    spectra = d.spectra.copy()
    spectra[0] = -1e-9  # as from a file of spectra that another program has written
    d = replace(d, spectra=spectra)
    text = Reader(render_report(everything(smear, ["RBC"], decomposition=d))).text
    assert "-0" not in text.replace("2026-11-16T12:00:00", "")
    assert "0.00" in text


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_little_to_tell(n, dtype):
    """No detections, no model, no annotations; any kind of image, with an alpha channel."""
    pixels = np.ones((40, 50, 4)) * (1 if dtype == np.float32 else np.iinfo(dtype).max)
    d = found(["a"], n, (40, 50), status=False)
    text = render_report(ReportSubject("", pixels.astype(dtype), d, confidence=0.0, date=FIXED))
    assert f"{n} objects" in check_harmless(text).text


def test_annotations_without_detections(smear):
    d = Detections.empty(["RBC"])
    truth = Annotations(np.array([[0, 0, 20, 20.0]]), np.array([0]), ["RBC"])
    for known in (truth, Annotations.empty(["RBC"])):
        subject = ReportSubject("a", smear, d, evaluation=LiveEvaluation.of(d, known), date=FIXED)
        check_harmless(render_report(subject))


def test_written_whole_or_not_at_all(smear, tmp_path):
    subject = ReportSubject("a", smear, found(["RBC"], 3), date=FIXED)
    write_report(tmp_path / "r.html", subject)
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == render_report(subject)
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(FileError, match="cannot be written"):
        write_report(tmp_path / "none" / "r.html", subject)
    with pytest.raises(ValueError, match=r"grey|colour|RGB|shape"):
        render_report(ReportSubject("a", smear[..., 0], found(["RBC"], 3)))


def test_many_classes_and_many_detections(smear):
    names = [f"class {k}" for k in range(60)]
    text = render_report(ReportSubject("a", smear, found(names, 3000), confidence=0.0, date=FIXED))
    assert len(text) < 8_000_000
    check_harmless(text)


# --- charts and crops ----------------------------------------------------------------------------


def macro(name, chart):
    """A chart as the template draws it."""
    template = f'{{% from "macros.html.jinja" import {name} with context %}}{{{{ {name}(chart) }}}}'
    return report_environment().from_string(template).render(chart=chart)


def test_curves_stay_within_their_frame():
    line = ChartLine("a", "#102030", np.linspace(0, 1, 5000), np.linspace(1, 0, 5000), (0.5, 0.5))
    svg = macro("line_chart", LineChart([line], "recall", "precision", 0.25))
    points = re.search(r'points="([^"]+)"', svg)[1].split()
    assert 100 < len(points) < 1000
    xy = np.array([point.split(",") for point in points], float)
    assert (xy.min(axis=0) >= 0).all()
    assert (xy.max(axis=0) <= [340, 250]).all()
    assert xy[0].tolist() == [44, 12]
    assert xy[-1].tolist() == [328, 210]


def test_bars_and_confusion():
    svg = macro("histogram_chart", HistogramChart(np.array([0, 4, 2]), "#102030", "score", 0.4))
    heights = [float(h) for h in re.findall(r'height="([0-9.]+)"', svg)]
    assert heights == pytest.approx([0, 198, 99])
    assert svg.count('opacity="0.3"') == 1
    html = macro("confusion_table", ConfusionTable(np.array([[3, 1], [2, 0]]), ["RBC"]))
    assert re.findall(r"<td[^>]*>([0-9]*)</td>", html) == ["3", "1", "2", ""]


def test_crops_show_what_is_there():
    pixels = np.zeros((50, 50, 3), np.uint8)
    pixels[10:20, 10:20] = (0, 250, 0)
    shown = np.asarray(crop_with_box(pixels, np.array([10, 10, 20, 20.0]), "#ff0000"))
    assert shown.shape == (208, 208, 3)
    assert shown[104, 104].tolist() == [0, 250, 0]
    assert (shown == [255, 0, 0]).all(axis=-1).any()
    edge = np.asarray(crop_with_box(pixels, np.array([-20, -20, -5, -5.0]), "#ff0000"))
    assert edge[5, 5].tolist() == [255, 255, 255]


def test_examples_are_spread_over_the_scores():
    assert evenly_spaced(np.arange(100), 5).tolist() == [0, 25, 50, 74, 99]
    assert evenly_spaced(np.arange(3), 5).tolist() == [0, 1, 2]
