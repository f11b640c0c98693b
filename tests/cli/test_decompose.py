"""The command line on real files: results, skipping, name clashes, damage, Ctrl-C, exit status."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tifffile
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet import samples
from napari_beerlanet.cli.main import main
from napari_beerlanet.core.batch import outputs
from napari_beerlanet.core.batch.inputs import find_images, name_jobs
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.stains.presets import NamedSpectrum, write_preset

FAST = ["--iterations", "2", "--lam", "0.01", "--gamma", "0.1", "--no-preview"]
FIELD = samples.he_field((96, 96), seed=1).image
ENDINGS = (".densities.ome.tiff", ".preview.png", ".spectra.json")


def save(path: Path, number: int = 0, size: int = 24) -> Path:
    """A small image of its own for every number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = (7 * number) % 71, (13 * number) % 67
    Image.fromarray(FIELD[y : y + size, x : x + size]).save(path)
    return path


def run(*arguments: object) -> int:
    """The exit status of the command, run in this process."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)


def script(*arguments: object, **options) -> subprocess.Popen:
    """The installed command as a process of its own."""
    command = Path(sys.executable).with_name(
        "napari-beerlanet" + (".exe" if os.name == "nt" else "")
    )
    return subprocess.Popen(
        [str(command), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **options,
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def record(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


# --- the command itself --------------------------------------------------------------------------


def test_script_from_start_to_end_without_the_viewer(tmp_path, out):
    source = save(tmp_path / "mein Bild ü.png", size=64)
    listing = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # every import, on standard error
    process = script("decompose", source, "--out", out, env=listing)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr[-2000:]
    assert stdout == "1 done, 0 skipped, 0 failed\n"
    assert "[1/1]" in stderr
    imported = {line.split("|")[-1].strip() for line in stderr.splitlines() if "|" in line}
    assert "numba" in imported  # the listing works
    assert "torch" not in imported  # takes seconds to import, and nothing is learned here
    assert not imported & {"qtpy", "napari", "magicgui", "superqt", "PyQt6", "PySide6"}

    assert names_in(out) == {f"mein Bild ü{ending}" for ending in ENDINGS}
    densities = tifffile.imread(out / "mein Bild ü.densities.ome.tiff")
    expected = nb.decompose(read_image(source).pixels, iterations="converge")
    np.testing.assert_allclose(densities, expected.densities, atol=1e-5)
    content = record(out / "mein Bild ü.spectra.json")
    assert sum(c["active"] for c in content["components"]) == expected.active.sum()
    assert read_image(out / "mein Bild ü.preview.png").pixels.shape[1] > 500


def test_help_and_version_load_nothing_heavy():
    for arguments in (["--help"], ["--version"], ["decompose", "--help"], ["demo", "--help"]):
        code = (
            "import sys; from napari_beerlanet.cli.main import main\n"
            f"try: main({arguments!r})\nexcept SystemExit as end: status = end.code\n"
            "heavy = {'torch', 'numpy', 'PIL', 'tifffile', 'qtpy', 'napari'} & set(sys.modules)\n"
            "sys.exit(str(heavy) if heavy or status else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "napari-beerlanet" in done.stdout


def test_demo(out, capsys):
    assert run("demo", "--out", out, "--no-window") == 0
    for name in ("blood-smear-bccd", "he-section"):
        assert {name + ending for ending in ENDINGS} <= names_in(out)
    assert {"blood-smear-bccd.jpg", "blood-smear-bccd.overlay.png", "he-section.png"} <= names_in(
        out
    )
    printed = capsys.readouterr().out
    assert "Blood smear (BCCD)" in printed
    assert str(out / "blood-smear-bccd.preview.png") in printed
    assert "Stain 1" in printed
    assert "OD " not in printed
    # 16 red cells, 1 white cell and 2 platelets are annotated.
    found = re.search(r"detected (\d+) RBC, (\d+) WBC, (\d+) Platelets", printed)
    red, white, platelets = map(int, found.groups())
    assert 16 <= red <= 24
    assert white == 1
    assert platelets >= 2


# --- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice"),
        (["decompose", "a.png"], "--out"),
        (["decompose", "--out", "o"], "IMAGE"),
        (["decompose", "a.png", "--out", "o", "--components", "0"], "from 1 to 64"),
        (["decompose", "a.png", "--out", "o", "--iterations", "many"], "at least 1"),
        (["decompose", "a.png", "--out", "o", "--lam=-1"], "at least 0 or auto"),
        (["decompose", "a.png", "--out", "o", "--gamma", "nan"], "at least 0 or auto"),
        (["decompose", "a.png", "--out", "o", "--domain", "sqrt"], "invalid choice"),
        (["decompose", "a.png", "--out", "o", "--device", "abacus"], "no device name"),
        (["decompose", "a.png", "--out", "o", "--spectra", "none.json"], "no such file"),
        (["decompose", "a.png", "--out", __file__], "not a folder"),
    ],
)
def test_usage_errors(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("napari-beerlanet: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert not names_in(tmp_path)


# --- what is written -----------------------------------------------------------------------------


def test_pixel_size_is_kept_in_both_formats(tmp_path, out):
    path = tmp_path / "scan.ome.tif"
    metadata = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeY": 0.5}
    tifffile.imwrite(path, FIELD, photometric="rgb", ome=True, metadata=metadata)
    assert run("decompose", path, "--out", out, *FAST) == 0
    assert run("decompose", path, "--out", out, *FAST, "--format", "zarr") == 0
    assert names_in(out) == {
        "scan.densities.ome.tiff",
        "scan.densities.zarr",
        "scan.spectra.json",
    }
    with tifffile.TiffFile(out / "scan.densities.ome.tiff") as file:
        assert 'PhysicalSizeX="0.25"' in file.ome_metadata
        assert 'PhysicalSizeY="0.5"' in file.ome_metadata
    import zarr

    group = zarr.open_group(str(out / "scan.densities.zarr"), mode="r")
    transform = group.attrs["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert transform == [{"type": "scale", "scale": [1.0, 0.5, 0.25]}]
    assert record(out / "scan.spectra.json")["pixel_size_um"] == [0.5, 0.25]


def test_start_from_the_spectra_of_a_result(tmp_path, out):
    first, second = save(tmp_path / "a.png", 1, 60), save(tmp_path / "b.png", 2, 60)
    assert run("decompose", first, "--out", out, *FAST, "--components", 3) == 0
    spectra = out / "a.spectra.json"
    assert run("decompose", second, "--out", out, *FAST, "--spectra", spectra) == 0
    written = record(out / "b.spectra.json")
    assert len(written["components"]) == written["settings"]["components"] == 3
    start = np.array([c["spectrum"] for c in record(spectra)["components"]]).T
    expected = nb.decompose(
        read_image(second).pixels, iterations=2, lam=0.01, gamma=0.1, spectra=start
    )
    spectra_found = np.array([c["spectrum"] for c in written["components"]]).T
    np.testing.assert_allclose(spectra_found, expected.spectra, atol=1e-12)


# --- what is skipped, and what is done again -----------------------------------------------------


def summary(capsys) -> str:
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_second_run_skips_and_changes_are_redone(tmp_path, out, capsys):
    source = save(tmp_path / "a.png")
    args = ["decompose", source, "--out", out, *FAST]
    redone, skipped = "1 done, 0 skipped, 0 failed", "0 done, 1 skipped, 0 failed"

    def again(*more: object) -> str:
        assert run(*args, *more) == 0
        return summary(capsys)

    assert again() == redone
    before = (out / "a.densities.ome.tiff").stat().st_mtime_ns
    assert again() == skipped
    assert (out / "a.densities.ome.tiff").stat().st_mtime_ns == before
    assert again("--overwrite") == redone
    assert again("--components", 3) == redone, "other settings"
    assert tifffile.imread(out / "a.densities.ome.tiff").shape[0] == 3
    assert again("--components", 3) == skipped
    assert again() == redone
    save(source, number=5)
    assert again() == redone, "another image in the same file"
    (out / "a.densities.ome.tiff").unlink()
    assert again() == redone, "a result is missing"
    (out / "a.spectra.json").write_text('{"half')
    assert again() == redone, "the record is damaged"
    assert again() == skipped


def test_skipping_loads_no_engine(tmp_path, out):
    save(tmp_path / "a.png")
    args = ["decompose", str(tmp_path / "a.png"), "--out", str(out), *FAST]
    assert run(*args) == 0
    code = (
        f"import sys; from napari_beerlanet.cli.main import main; status = main({args!r})\n"
        "sys.exit('torch is loaded' if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0 done, 1 skipped, 0 failed"


def test_results_of_other_settings_do_not_stay_beside_new_ones(tmp_path, out):
    source = save(tmp_path / "a.png")
    with_preview = ["decompose", source, "--out", out, *FAST[:-1]]
    assert run(*with_preview) == 0
    assert names_in(out) == {f"a{ending}" for ending in ENDINGS}
    assert run(*with_preview, "--no-preview", "--components", 3) == 0
    assert names_in(out) == {"a.densities.ome.tiff", "a.spectra.json"}


def test_moved_with_its_results_it_is_still_done(tmp_path, out, capsys):
    source = save(tmp_path / "here" / "a.png")
    assert run("decompose", source, "--out", out, *FAST) == 0
    (tmp_path / "here").rename(tmp_path / "there")
    assert run("decompose", tmp_path / "there" / "a.png", "--out", out, *FAST) == 0
    assert summary(capsys) == "0 done, 1 skipped, 0 failed"


# --- names ---------------------------------------------------------------------------------------


def test_same_name_in_one_run(tmp_path):
    sources = [
        save(tmp_path / path, number)
        for number, path in enumerate(
            ["A1/x.png", "A2/x.png", "A2/x.bmp", "y.png", "y.bmp", "z.png"]
        )
    ]
    jobs = name_jobs(sources)
    expected = ["A1_x.png", "A2_x.png", "A2_x.bmp", "y.png", "y.bmp", "z"]
    assert [job.name for job in jobs] == expected
    assert [job.name for job in name_jobs(sources[:2])] == ["A1_x", "A2_x"]
    backwards = name_jobs(sources[::-1])
    assert {j.source: j.name for j in backwards} == {j.source: j.name for j in jobs}


@pytest.mark.parametrize(
    "paths",
    [["a/x.png", "A/x.png"], ["x.png", "X.png"], ["a/b_x.png", "a/b/x.png", "a/c/x.png"]],
)
def test_names_differ_even_where_case_does_not_count(paths):
    names = [job.name.casefold() for job in name_jobs([Path(path) for path in paths])]
    assert len(set(names)) == len(paths)


def test_same_name_in_a_later_run_overwrites_nothing(tmp_path, out):
    first, second = save(tmp_path / "A1" / "x.png", 1), save(tmp_path / "A2" / "x.png", 2)
    assert run("decompose", first, "--out", out, *FAST) == 0
    kept = {path: path.read_bytes() for path in out.iterdir()}
    for _ in range(2):
        assert run("decompose", second, "--out", out, *FAST) == 0
        assert {path: path.read_bytes() for path in kept} == kept
        assert len(names_in(out)) == 4
    other = next(path for path in out.glob("*.json") if path not in kept)
    assert record(other)["source"]["path"] == str(second)


def test_folders_patterns_and_repetitions(tmp_path, out):
    for name in ("b.png", "a.JPG", "sub/c.tif", ".hidden.png", "._b.png", "img[1].png"):
        save(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.txt").touch()
    folder = tmp_path / "in"

    def found(*given: object, recursive: bool = False) -> list[str]:
        paths = find_images([str(text) for text in given], out, recursive)
        return [str(path.relative_to(folder)) for path in paths]

    assert found(folder) == ["a.JPG", "b.png", "img[1].png"]
    deep = str(Path("sub") / "c.tif")
    assert found(folder, recursive=True) == ["a.JPG", "b.png", "img[1].png", deep]
    assert found(folder / "*.png") == ["b.png", "img[1].png"]
    assert found(folder / "**" / "*.tif") == [deep]
    assert found(folder / "img[1].png") == ["img[1].png"], "a name, though it looks like a pattern"
    assert found(folder / "b.png", folder, folder / "b.png") == ["b.png", "a.JPG", "img[1].png"]


def test_results_among_the_images_are_not_decomposed(tmp_path, capsys):
    save(tmp_path / "a.png")
    args = ["decompose", tmp_path, "--out", tmp_path, *FAST[:-1], "--recursive"]
    assert run(*args) == 0
    assert run(*args, "--format", "zarr") == 0
    assert run(*args) == 0
    assert summary(capsys) == "0 done, 1 skipped, 0 failed"
    expanded_by_the_shell = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert len(expanded_by_the_shell) == 2
    assert run("decompose", *expanded_by_the_shell, "--out", tmp_path, *FAST[:-1]) == 0
    assert summary(capsys) == "0 done, 1 skipped, 0 failed"


# --- damage --------------------------------------------------------------------------------------


def test_damaged_files_do_not_stop_the_rest(tmp_path, out, capsys):
    folder = tmp_path / "in"
    save(folder / "a.png")
    cut = save(folder / "b.png")
    cut.write_bytes(cut.read_bytes()[:200])
    (folder / "c.jpg").write_text("no image")
    Image.new("L", (9, 9)).save(folder / "d.png")
    save(folder / "e.png", 3)
    (tmp_path / "empty").mkdir()
    missing = tmp_path / "none*.png"
    assert run("decompose", folder, missing, tmp_path / "empty", "--out", out, *FAST) == 1
    captured = capsys.readouterr()
    assert captured.out == "2 done, 0 skipped, 5 failed\n"
    said = [line for line in captured.err.splitlines() if line.startswith("napari-beerlanet: ")]
    assert len(said) == 5
    for name, line in zip(("b.png", "c.jpg", "d.png", "none*", "empty"), said, strict=True):
        assert name in line
    assert "Traceback" not in captured.err
    assert {name.split(".")[0] for name in names_in(out)} == {"a", "e"}
    assert run("decompose", folder, "--out", out, *FAST) == 1
    assert summary(capsys) == "0 done, 2 skipped, 3 failed"


@pytest.mark.parametrize("command", ["decompose", "batch"])
def test_a_name_too_long_for_results_does_not_stop_the_rest(tmp_path, out, capsys, command):
    sources = [save(tmp_path / f"{name}.png", k) for k, name in enumerate(("a", "m" * 244, "z"))]
    assert run(command, *sources, "--out", out, *FAST[:-1], *FAST[-1:] * (command != "batch")) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("2 done, 0 skipped, 1 failed")
    assert captured.err.count("file name too long") == 1


def test_quiet_and_debug(tmp_path, out, capsys):
    (tmp_path / "a.png").write_text("no image")
    save(tmp_path / "b.png")
    args = ["decompose", tmp_path / "a.png", tmp_path / "b.png", "--out", out, *FAST]
    assert run(*args, "--quiet") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run(*args, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_full_disk_ends_the_run_with_one_sentence(tmp_path, out, capsys, monkeypatch):
    sources = [save(tmp_path / f"{number}.png", number) for number in range(3)]
    assert run("decompose", sources[0], "--out", out, *FAST) == 0
    capsys.readouterr()
    finished = names_in(out)

    def fill(path, *_):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(outputs, "write_densities", fill)
    assert run("decompose", *sources, "--out", out, *FAST) == 1
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if line.startswith("napari-beerlanet: ")]
    assert len(said) == 1
    assert f"no space left on device in {out}; stopped with 1 more to do." in said[0]
    assert captured.out == "0 done, 1 skipped, 1 failed\n"
    assert names_in(out) == finished


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_may_not_be_written(tmp_path, capsys):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert run("decompose", save(tmp_path / "a.png"), "--out", locked) == 1
    assert "no results can be written into this folder" in capsys.readouterr().err


def test_folder_below_a_file_cannot_be_made(tmp_path, capsys):
    save(tmp_path / "a.png")
    assert run("decompose", tmp_path / "a.png", "--out", tmp_path / "a.png" / "out") == 1
    said = capsys.readouterr().err
    assert "no results can be written into this folder" in said
    assert said.count("\n") == 1


# --- many, and stopped in the middle -------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(
    ("form", "total", "sent", "word"),
    [
        ("ome-tiff", 300, signal.SIGINT, "interrupted"),
        ("zarr", 40, signal.SIGTERM, "terminated"),
    ],
)
def test_stopped_in_the_middle_of_many(tmp_path, out, capsys, form, total, sent, word):
    for number in range(total):
        save(tmp_path / "in" / f"{number:03}.png", number)
    args = ["decompose", tmp_path / "in", "--out", out, *FAST, "--format", form]
    process = script(*args)
    until = time.monotonic() + 120
    while len(list(out.glob("[!.]*.json"))) < 5 and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 128 + sent, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == f"napari-beerlanet: {word}; finished results are saved."

    assert not [name for name in names_in(out) if name.startswith(".")]
    finished = [name.split(".")[0] for name in names_in(out) if name.endswith(".json")]
    assert 5 <= len(finished) < total
    if form == "ome-tiff":
        for name in finished:
            assert tifffile.imread(out / f"{name}.densities.ome.tiff").shape == (8, 24, 24)
    assert run(*args) == 0
    rest = total - len(finished)
    assert summary(capsys) == f"{rest} done, {len(finished)} skipped, 0 failed"
    assert len(names_in(out)) == 2 * total


@pytest.mark.parametrize("module", ["napari_beerlanet", "napari_beerlanet.cli.main"])
def test_as_a_module(module):
    words = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == f"napari-beerlanet {nb.__version__}\n"


# --- given spectra -------------------------------------------------------------------------------


@pytest.fixture
def picture(tmp_path) -> Path:
    return save(tmp_path / "section.png", size=64)


def test_a_preset_is_kept_and_names_the_stains(tmp_path, picture):
    out = tmp_path / "out"
    assert run("decompose", picture, "--out", out, "--preset", "h-dab") == 0
    content = record(out / f"{picture.stem}.spectra.json")
    expected = nb.decompose(
        np.asarray(Image.open(picture)), spectra=nb.load_preset("H-DAB"), fixed_spectra=True
    )
    assert content["fixed_spectra"] is True
    assert [c["stain"] for c in content["components"]] == ["haematoxylin", "DAB"]
    np.testing.assert_allclose([c["spectrum"] for c in content["components"]], expected.spectra.T)
    np.testing.assert_allclose(content["background"]["x0"], expected.background)
    with tifffile.TiffFile(out / f"{picture.stem}.densities.ome.tiff") as file:
        assert 'Name="haematoxylin' in file.ome_metadata
        np.testing.assert_array_equal(file.asarray(), expected.densities)


def test_spectra_of_a_result_or_a_preset_file_can_be_kept(tmp_path, picture):
    mine = nb.StainPreset("mine", (NamedSpectrum("red", (0.1, 0.9, 0.4)),))
    write_preset(tmp_path / "mine.json", mine)
    for options, fixed in ((["--fixed-spectra"], True), ([], False)):
        out = tmp_path / f"out {fixed}"
        given = ["--spectra", tmp_path / "mine.json", *options]
        assert run("decompose", picture, "--out", out, *given) == 0
        content = record(out / f"{picture.stem}.spectra.json")
        assert content["fixed_spectra"] is fixed
        (component,) = content["components"]
        assert np.allclose(component["spectrum"], mine.spectra[:, 0]) == fixed
    again = ["--spectra", tmp_path / "out True" / f"{picture.stem}.spectra.json"]
    assert run("decompose", picture, "--out", tmp_path / "b", *again, "--fixed-spectra") == 0
    (component,) = record(tmp_path / "b" / f"{picture.stem}.spectra.json")["components"]
    assert component["stain"] == "red"
    np.testing.assert_allclose(component["spectrum"], mine.spectra[:, 0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--preset", "Wright"], "no such preset"),
        (["--preset", "gone.json"], "gone.json"),
        (["--fixed-spectra"], "fixed_spectra needs spectra"),
        (["--preset", "H&E", "--spectra", "a.json"], "not allowed with"),
    ],
)
def test_wrong_presets_are_one_line(tmp_path, picture, options, reason, capsys):
    assert run("decompose", picture, "--out", tmp_path / "out", *options) == 2
    assert reason in capsys.readouterr().err


def test_a_study_file_names_a_preset(tmp_path, picture):
    (tmp_path / "study.yaml").write_text(f"images: {picture}\nout: out\npreset: H&E\n")
    assert run("batch", tmp_path / "study.yaml", "--quiet") == 0
    (row,) = pd.read_csv(tmp_path / "out" / "summary.csv").to_dict("records")
    assert row["haematoxylin share"] + row["eosin share"] == pytest.approx(1)
    assert "Stain 1 share" not in row
    write_preset(tmp_path / "b.json", nb.StainPreset("b", (NamedSpectrum("1", (0.6, 0.7, 0.3)),)))
    assert run("batch", tmp_path / "study.yaml", "--preset", tmp_path / "b.json", "--quiet") == 0
    (row,) = pd.read_csv(tmp_path / "out" / "summary.csv").to_dict("records")
    assert row["1 share"] == pytest.approx(1)
    assert run("batch", tmp_path / "study.yaml", "--out", tmp_path / "c", "--quiet") == 0


def test_a_study_numbers_stains_by_share_and_says_what_they_resemble(tmp_path, picture):
    assert run("batch", picture, "--out", tmp_path / "out", "--quiet") == 0
    (row,) = pd.read_csv(tmp_path / "out" / "summary.csv").to_dict("records")
    d = nb.decompose(np.asarray(Image.open(picture)), iterations="converge")
    for k, i in enumerate(d.order):
        assert row[f"Stain {k + 1} share"] == pytest.approx(d.share[i])
        if i in d.suggestions():
            name, angle, _ = d.suggestions()[i]
            assert row[f"Stain {k + 1} resembles"] == f"{name} ({angle:.0f}°)"
    assert f"Stain {len(d.order) + 1} share" not in row
