"""The package from outside: what importing it loads, which way its imports point, its manifest."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import napari_beerlanet as nb

PACKAGE = "napari_beerlanet"
CORE = f"{PACKAGE}.core"
SOURCE = Path(nb.__file__).parent
CORE_FILES = sorted((SOURCE / "core").glob("*.py"))

VIEWER = {"qtpy", "napari", "magicgui", "superqt", "PyQt5", "PyQt6", "PySide2", "PySide6"}
HEAVY = {"torch", "numba"}

# Data walks in at the top and out at the bottom: a module imports only from those before it.
ORDER = [
    "progress",
    "wording",
    "sorting",
    "growing",
    "device",
    "threads",
    "kernels",
    "steps",
    "sweeps",
    "images",
    "lazy",
    "overviews",
    "tissue",
    "tiff",
    "files",
    "slides",
    "inputs",
    "stamps",
    "drawing",
    "geometry",
    "heatmap",
    "spatial",
    "liveindex",
    "nms",
    "matching",
    "boxes",
    "regions",
    "annotations",
    "history",
    "comparing",
    "averages",
    "verdict",
    "quality",
    "suspects",
    "assessment",
    "split",
    "locks",
    "journal",
    "sources",
    "projectfiles",
    "projectfolder",
    "annotationfiles",
    "projectstate",
    "projectopen",
    "palette",
    "stacks",
    "counting",
    "colourcount",
    "mosaic",
    "spectra",
    "columns",
    "beerlanet",
    "adjoint",
    "autograd",
    "layer",
    "descent",
    "converge",
    "auto",
    "solve",
    "decomposition",
    "decompose",
    "lookup",
    "slidecolours",
    "stream",
    "results",
    "preview",
    "batch",
    "colours",
    "architecture",
    "shapes",
    "pickled",
    "header",
    "yolo",
    "augment",
    "network",
    "classstain",
    "reviewing",
    "reviewfiles",
    "stainfit",
    "lazypixels",
    "familiar",
    "tiling",
    "sizes",
    "cropsize",
    "crops",
    "adding",
    "project",
    "measure",
    "runner",
    "tilefile",
    "tilelog",
    "tilequeue",
    "finding",
    "detector",
    "slidedetect",
    "parts",
    "weights",
    "checkpoint",
    "formats",
    "overlay",
    "report_html",
    "report_charts",
    "report_pictures",
    "report_subject",
    "report_found",
    "report_measured",
    "report",
    "manifest",
    "studysettings",
    "studyresults",
    "studyimage",
    "processes",
    "cluster",
    "studytables",
    "studywatch",
    "study",
    "studycommand",
    "detectfiles",
    "labels",
    "dataset",
    "foreign",
    "importing",
    "evaluate",
    "loader",
    "repeatable",
    "anchored",
    "trainer",
    "runfiles",
    "runs",
    "plan",
    "recipe",
    "projectruns",
    "pace",
    "watching",
    "preparing",
    "outlook",
    "training",
    "several",
    "train",
]


def loaded_after(code: str) -> set[str]:
    """The names of all modules that a fresh Python has loaded after running ``code``."""
    end = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def imported_modules(file: Path) -> Iterator[str]:
    """Every module that ``file``, one of core's, imports anywhere, as an absolute dotted name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = CORE.split(".")[: 3 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module in (PACKAGE, CORE):  # `from . import palette` names the module last
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


# --- importing the package -----------------------------------------------------------------------


def test_import_is_light():
    heavy = loaded_after(f"import {PACKAGE}; dir({PACKAGE})") & (VIEWER | HEAVY)
    assert not heavy, f"import {PACKAGE} loads {sorted(heavy)}"


@pytest.mark.parametrize("name", [n for n in nb.__all__ if not n.startswith("_")])
def test_public_name_loads(name):
    assert name in dir(nb)
    assert callable(getattr(nb, name))


def test_dir_lists_the_public_names():
    assert dir(nb) == sorted(nb.__all__)


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        nb.no_such_name  # noqa: B018


def test_decompose_stays_a_function_after_its_module_is_imported():
    importlib.import_module(f"{CORE}.decompose")
    assert callable(nb.decompose)
    assert nb.decompose is importlib.import_module(f"{CORE}.decompose").decompose


# --- the direction of imports --------------------------------------------------------------------


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: file.stem)
def test_core_never_names_the_viewer(file):
    viewer = {name for name in imported_modules(file) if name.split(".")[0] in VIEWER}
    assert not viewer, f"core/{file.name} imports {sorted(viewer)}"


def test_core_never_loads_the_viewer():
    code = "import importlib\n" + "\n".join(
        f"importlib.import_module({CORE + '.' + file.stem!r})"
        for file in CORE_FILES
        if file.stem != "__init__"
    )
    viewer = loaded_after(code) & VIEWER
    assert not viewer, f"importing all of core loads {sorted(viewer)}"


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: file.stem)
def test_core_imports_only_from_the_lines_above(file):
    above = ORDER[: ORDER.index(file.stem)] if file.stem != "__init__" else []
    allowed = {f"{CORE}.{name}" for name in above} | {f"{PACKAGE}.__version__"}
    ours = {name for name in imported_modules(file) if name.split(".")[0] == PACKAGE}
    assert ours <= allowed, f"core/{file.name} may not import {sorted(ours - allowed)}"


def test_every_core_module_has_its_place_in_the_order():
    placeless = {file.stem for file in CORE_FILES} - {"__init__", *ORDER}
    assert not placeless, f"give {sorted(placeless)} a place in ORDER, see DESIGN.md"


# --- what is shipped -----------------------------------------------------------------------------


def test_version_comes_from_one_place():
    assert version("napari-beerlanet") == nb.__version__


def test_manifest_is_valid_and_its_commands_exist():
    from npe2 import PluginManifest

    manifest = PluginManifest.from_file(SOURCE / "napari.yaml")
    assert manifest.name == "napari-beerlanet"
    samples = {sample.key for sample in manifest.contributions.sample_data}
    assert {"blood_smear", "he_field"} <= samples
    manifest.validate_imports()


def test_napari_finds_the_manifest():
    found = {entry.name: entry.value for entry in entry_points(group="napari.manifest")}
    assert found["napari-beerlanet"] == "napari_beerlanet:napari.yaml"


def test_top_level_manifest_is_the_packaged_one(root):
    link = root / "napari.yaml"
    if os.name == "nt" and not link.is_symlink():
        pytest.skip("git made no symbolic links in this checkout")
    assert link.is_symlink()
    assert link.resolve() == (root / "src" / PACKAGE / "napari.yaml").resolve()


def test_package_is_typed():
    assert (SOURCE / "py.typed").is_file()


def test_no_conflict_markers(root):
    listing = ["git", "ls-files", "-coz", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    marker = re.compile(rb"^(<{7}|>{7}|\|{7})( |\r?$)", re.MULTILINE)
    files = [root / name for name in done.stdout.split("\0") if name]
    marked = [file for file in files if file.is_file() and marker.search(file.read_bytes())]
    assert not marked, f"conflict markers in {[str(file.relative_to(root)) for file in marked]}"
