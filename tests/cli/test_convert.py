"""The commands `convert` and `report`."""

import json

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.cli.main import main
from napari_beerlanet.core.batch import outputs
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.formats import FORMATS, image_names, read_detections, write_detections
from napari_beerlanet.samples import blood_smear

SHAPE = (120, 160)
NAMES = ["RBC", "WBC", "<b>é</b>"]


def some(n=12, names=NAMES):
    random = np.random.default_rng(0)
    corner = random.uniform(0, 0.8, (n, 2)) * (SHAPE[1], SHAPE[0])
    columns = {
        "status": random.choice(["accepted", "rejected", "unreviewed"], n),
        "Model channel 1 mean": random.random(n).astype(np.float32),
    }
    labels, scores = random.integers(0, len(names), n), random.uniform(0.3, 1, n)
    boxes = np.hstack([corner, corner + random.uniform(5, 20, (n, 2))])
    return Detections(boxes, labels, scores, names, columns, image_shape=SHAPE)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "smear.png"
    Image.fromarray(blood_smear(SHAPE, cell_diameter=30).image).save(path)
    return path


def said(capsys):
    return capsys.readouterr()


@pytest.mark.parametrize("target", sorted(FORMATS))
@pytest.mark.parametrize("source", sorted(FORMATS))
def test_from_every_format_to_every_other(tmp_path, image, source, target, capsys):
    start = tmp_path / f"in{FORMATS[source].suffix}"
    end = tmp_path / "out" / f"end{FORMATS[target].suffix}"
    write_detections(start, some(), "smear.png", format=source)
    classes = ["--classes", *NAMES] if source == "yolo" else []
    assert main(["convert", str(start), str(end), "--image", str(image), *classes]) == 0
    assert "12 boxes" in said(capsys).out
    read = read_detections(end, SHAPE)
    np.testing.assert_allclose(read.xyxy, some().xyxy, atol=0.01)
    assert [read.names[k] for k in read.labels] == [NAMES[k] for k in some().labels]
    np.testing.assert_allclose(read.scores, some().scores, atol=1e-6)
    if "yolo" not in (source, target):
        assert read.columns["status"].tolist() == some().columns["status"].tolist()
    if target in ("csv", "coco", "voc"):
        assert image_names(end) == ["smear.png"]


def coco(path, names):
    content = {
        "images": [
            {"id": k, "file_name": n, "width": 160, "height": 120} for k, n in enumerate(names)
        ],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [
            {"id": k, "image_id": k, "category_id": 1, "bbox": [k, 1, 5, 5]}
            for k in range(len(names))
        ],
    }
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("target", ["yolo", "voc", "csv"])
def test_many_images_become_a_folder(tmp_path, target, capsys):
    coco(tmp_path / "in.json", ["train/a.png", "b.jpg"])
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "in.json"), str(out), "--to", target]) == 0
    assert "2 boxes of 2 images" in said(capsys).out
    suffix = FORMATS[target].suffix
    assert {p.name for p in out.iterdir()} - {"classes.txt"} == {f"a{suffix}", f"b{suffix}"}
    read = read_detections(out / f"b{suffix}", SHAPE)
    np.testing.assert_allclose(read.xyxy, [[1, 1, 6, 6]], atol=0.01)
    assert read.names == ["cell"]


def test_names_never_lead_out_of_the_folder(tmp_path):
    coco(
        tmp_path / "in.json",
        ["../../evil.png", "..\\..\\worse.png", "/etc/passwd", "..", "x\0y.png"],
    )
    out = tmp_path / "deep" / "out"
    assert main(["convert", str(tmp_path / "in.json"), str(out), "--to", "csv"]) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "evil.csv", "image.csv", "passwd.csv", "worse.csv", "xy.csv",
    ]  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {"in.json", "deep"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.csv", "a.json"], "none.csv: there is no such file."),
        (["in.csv", "a.tfrecord"], "not a known format of boxes"),
        (["in.csv", "folder"], "a folder is no format; say which with --to"),
        (["in.csv", "a.txt"], "YOLO needs the image's size; name it with --image"),
        (["in.txt", "a.csv"], "YOLO needs the image's size; name it with --image"),
        (["many.json", "a.csv"], "about 2 images; name a folder to write to"),
        (["same.json", "out", "--to", "csv"], "two of its images would both become a.csv"),
        (["bad.json", "a.csv"], "not COCO or GeoJSON that can be read"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, arguments, sentence, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    d = Detections([[0, 0, 5, 5]], [0], [0.5], ["a"])
    write_detections("in.csv", d)
    (tmp_path / "in.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (tmp_path / "bad.json").write_text("{")
    coco(tmp_path / "many.json", ["a.png", "b.png"])
    coco(tmp_path / "same.json", ["1/a.png", "2/a.png"])
    assert main(["convert", *arguments]) in (1, 2)
    error = said(capsys).err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- report --------------------------------------------------------------------------------------


def test_report_of_reviewed_detections(tmp_path, image, capsys):
    d = some()
    write_detections(tmp_path / "found.csv", d, "smear.png")
    write_detections(tmp_path / "truth.xml", d[::2], "smear.png")
    out = tmp_path / "sub" / "report.html"
    arguments = ["--detections", str(tmp_path / "found.csv"), "--out", str(out)]
    arguments += ["--annotations", str(tmp_path / "truth.xml"), "--no-stains"]
    assert main(["report", str(image), *arguments]) == 0
    text = out.read_text(encoding="utf-8")
    rejected = int((d.columns["status"] == "rejected").sum())
    assert f"<b>{12 - rejected}</b>" in text
    assert f"Rejected by the reviewer ({rejected})" in text
    assert "<h2>Metrics against annotations</h2>" in text
    assert "&lt;b&gt;é&lt;/b&gt;" in text
    assert "<b>é</b>" not in text
    assert str(out) in said(capsys).out


def test_a_report_that_is_done_is_left_as_it_is(tmp_path, image, capsys):
    d = some()
    found, truth, out = (tmp_path / name for name in ("found.csv", "truth.xml", "r/report.html"))
    write_detections(found, d, "smear.png")
    write_detections(truth, d[::2], "smear.png")
    words = ["report", str(image), "--detections", str(found), "--annotations", str(truth)]
    words += ["--no-stains", "--out", str(out)]

    def written(*more) -> bool:
        before = out.stat().st_mtime_ns if out.exists() else 0
        assert main([*words, *more]) == 0
        assert out.name in said(capsys).out, "where it is and what it counts, in any case"
        return out.stat().st_mtime_ns != before

    assert written()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"], "and nothing else"
    assert str(tmp_path) not in out.read_text(encoding="utf-8"), "no path of this machine"
    assert not written()
    assert written("--overwrite")
    assert written("--confidence", "0.6")
    assert not written("--confidence", "0.6")
    write_detections(truth, d[::3], "smear.png")
    assert written("--confidence", "0.6"), "other annotations"
    out.write_text("<html>mine</html>")
    assert written("--confidence", "0.6"), "another file of that name"
    Image.open(image).transpose(Image.Transpose.ROTATE_180).save(image)
    assert written("--confidence", "0.6"), "another image"


def test_a_report_on_an_image_that_is_never_in_memory(tmp_path, image, monkeypatch):
    """The study's engine draws it from a thumbnail and reads pixels where it needs them."""
    write_detections(tmp_path / "found.csv", some(), "smear.png")
    words = ["report", str(image), "--detections", str(tmp_path / "found.csv")]
    monkeypatch.setattr(outputs, "_MAX_PIXELS_IN_MEMORY", 1000)
    assert main([*words, "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Stains" in text
    assert "Examples" in text


def test_report_without_an_image(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.png"), "--out", str(tmp_path / "r.html")]) == 1
    assert "there is no such file" in said(capsys).err


@pytest.mark.slow
def test_report_of_the_packaged_model(tmp_path, image):
    assert main(["report", str(image), "--out", str(tmp_path / "r.html"), "--device", "cpu"]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    for part in ("Stains", "<h2>Model</h2>", "Examples", "SHA-256 of the checkpoint"):
        assert part in text


def test_report_counts_a_match_at_the_iou_that_is_asked_for(tmp_path, image):
    found = tmp_path / "found.csv"
    found.write_text("class,confidence,x1,y1,x2,y2\nRBC,0.9,10,10,30,30\n")
    words = ["report", str(image), "--detections", str(found), "--annotations", str(found)]
    out = tmp_path / "report.html"
    assert main([*words, "--out", str(out), "--match-iou", "0.65", "--no-stains"]) == 0
    assert "an IoU of at least 0.65" in out.read_text()


# --- many images, signals, strange names ---------------------------------------------------------


def test_a_table_of_many_images_is_read_once(tmp_path, monkeypatch, capsys):
    from napari_beerlanet.core.formats import csv_table

    names = [f"{k}.png" for k in range(300)]
    lines = [f"{name},cell,{k},1,{k + 5},6" for k, name in enumerate(names)]
    (tmp_path / "in.csv").write_text("\n".join(["image,class,x1,y1,x2,y2", *lines]))
    reads = []
    read_text = csv_table.read_text
    monkeypatch.setattr(
        csv_table, "read_text", lambda *args: reads.append(args) or read_text(*args)
    )
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "in.csv"), str(out), "--to", "voc"]) == 0
    assert "300 boxes of 300 images" in said(capsys).out
    assert len(list(out.iterdir())) == 300
    assert read_detections(out / "7.xml").xyxy.tolist() == [[7, 1, 12, 6]]
    assert len(reads) == 2  # the images' names, then all of it


@pytest.mark.parametrize("target", ["voc", "yolo", "csv"])
def test_as_many_classes_as_images(tmp_path, target):
    """Each file would have a list of all classes, were these not left out."""
    count = 1500
    content = {
        "images": [
            {"id": k, "file_name": f"{k}.png", "width": 9, "height": 9} for k in range(count)
        ],
        "categories": [{"id": k, "name": f"class {k}"} for k in range(count)],
        "annotations": [
            {"image_id": k, "category_id": k, "bbox": [1, 1, 5, 5]} for k in range(count)
        ],
    }
    (tmp_path / "in.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "in.json"), str(out), "--to", target]) == 0
    read = read_detections(out / f"1234{FORMATS[target].suffix}", (9, 9))
    assert [read.names[k] for k in read.labels] == ["class 1234"]


def test_a_signal_ends_it_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    import signal

    from napari_beerlanet.cli import convert
    from napari_beerlanet.cli.common import received_signals

    coco(tmp_path / "in.json", [f"{k}.png" for k in range(50)])
    read = convert._read_all

    def interrupted(options, names):
        for k, one in enumerate(read(options, names)):
            if k == 20:
                received_signals.append(signal.SIGTERM)
            yield one

    monkeypatch.setattr(convert, "_read_all", interrupted)
    out = tmp_path / "new" / "out"
    assert main(["convert", str(tmp_path / "in.json"), str(out), "--to", "yolo"]) == 143
    assert "terminated" in said(capsys).err
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, capsys):
    coco(tmp_path / "in.json", ["a.png", "b.png"])
    content = json.loads((tmp_path / "in.json").read_text())
    del content["images"][1]["width"]
    (tmp_path / "in.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    out.mkdir()
    (out / "other.txt").write_text("0 0.5 0.5 0.1 0.1")
    assert main(["convert", str(tmp_path / "in.json"), str(out), "--to", "yolo"]) == 2
    assert "b.txt: YOLO needs the image's size" in said(capsys).err
    assert [path.name for path in out.iterdir()] == ["other.txt"]


def test_names_do_not_steer_the_terminal(tmp_path, capsys):
    coco(tmp_path / "in.json", ["a.png", "b.png"])
    content = json.loads((tmp_path / "in.json").read_text())
    for image, suffix in zip(content["images"], ("png", "jpg"), strict=True):
        image["file_name"] = f"\x1b[2J\nfake: done.{suffix}"
    (tmp_path / "in.json").write_text(json.dumps(content))
    assert main(["convert", str(tmp_path / "in.json"), str(tmp_path / "o"), "--to", "voc"]) == 2
    text = said(capsys).err
    assert "\x1b" not in text
    assert text.count("\n") == 1
    assert r"\x1b[2J\nfake" in text


def test_every_printed_line_is_escaped():
    """Nothing in the commands prints by itself, but for lines of JSON."""
    import re
    from pathlib import Path

    from napari_beerlanet import cli

    for path in Path(cli.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r"\bprint\(", line):
                assert "json.dumps" in line or "printable(" in line, f"{path.name}: {line}"
