"""The package from outside: what importing it loads, its rooms and names, its manifest."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import napari_beerlanet as nb
from napari_beerlanet.cli import main

PACKAGE = "napari_beerlanet"
SOURCE = Path(nb.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

VIEWER = {"qtpy", "napari", "magicgui", "superqt", "PyQt5", "PyQt6", "PySide2", "PySide6"}
HEAVY = {"torch", "numba"}

# 215 until classification came. It has 11: its room has four, core/stains/domain_shift.py is shared
# with detection; its data, its metrics, three of its training, and its command. Four are the panel
# Classify cells: widget, targets, job, and the counts of types that it shares with Find cells. Two
# are for patches of slides: core/classification/slide_classifier.py, ui/classify/patches.py.
# Normalization has seven: what all normalizers share, torchstain's, Vahadane, BeerLaNet, slides,
# the list of methods with its files, and the command.
# Five are the panel Compare normalizations (widget, form, job, layers, table).
# Four make normalizers a part of networks: LStainNorm, StainGAN's networks and its training, batch
# statistics of other images.
MAX_MODULES, MAX_IN_A_FOLDER = 269, 13


def loaded_after(code: str) -> set[str]:
    """The names of all modules that a fresh Python has loaded after running ``code``."""
    end = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def module_name(file: Path) -> str:
    """The dotted name of one of our files."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join([PACKAGE, *parts]).removesuffix(".__init__")


def public_classes(file: Path) -> Iterator[str]:
    """Names of the classes that a file defines at its top level, without private ones."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


# --- importing the package -----------------------------------------------------------------------


def test_import_is_light():
    heavy = loaded_after(f"import {PACKAGE}; dir({PACKAGE})") & (VIEWER | HEAVY)
    assert not heavy, f"import {PACKAGE} loads {sorted(heavy)}"


def test_panels_load_no_torch_before_a_model():
    code = f"from {PACKAGE}.ui.workspace.workspace import TABS\n[tab.load() for tab in TABS]"
    assert "torch" not in loaded_after(code)


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
    module = importlib.import_module(f"{PACKAGE}.core.stains.decompose")
    assert callable(nb.decompose)
    assert nb.decompose is module.decompose


@pytest.mark.parametrize("panel", ["detect", "classify", "annotate"])
def test_a_panel_opens_without_loading_kernels(panel):
    """numba takes longer to load what it needs for one than the panel itself does."""
    loaded = loaded_after(f"import {PACKAGE}.ui.{panel}.widget")
    assert f"{PACKAGE}.core.boxes.detections" in loaded
    assert not loaded & {"numba.np.arraymath", "numba.np.linalg", "torch"}


# --- the house: see docs/architecture.md; import-linter checks the layers, in `make lint` --------


def test_core_never_loads_the_viewer():
    files = [*(SOURCE / "core").rglob("*.py"), *(SOURCE / "samples").rglob("*.py")]
    code = "import importlib\n" + "\n".join(
        f"importlib.import_module({module_name(file)!r})" for file in sorted(files)
    )
    viewer = loaded_after(code) & VIEWER
    assert not viewer, f"importing all of core loads {sorted(viewer)}"


def test_no_public_class_name_is_used_twice():
    homes: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for name in public_classes(file):
            homes[name].append(module_name(file))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice, f"name each class after what only it is: {twice}"


def test_the_package_stays_small_enough_to_know():
    modules = [file for file in FILES if len(ast.parse(file.read_text(encoding="utf-8")).body) > 1]
    assert len(modules) < MAX_MODULES, "merge a module with the one that imports it"


def test_no_folder_is_crowded():
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    counts[SOURCE / "cli"] -= len(main._COMMANDS)  # which has a module for each
    crowded = {str(k.relative_to(SOURCE)): n for k, n in counts.items() if n > MAX_IN_A_FOLDER}
    assert not crowded, f"more than {MAX_IN_A_FOLDER} modules in {crowded}"


def test_every_room_says_what_it_is():
    for folder in {file.parent for file in FILES}:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{folder}/__init__.py has no docstring"


def test_the_architecture_page_names_every_room(root):
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {str(f.parent.relative_to(SOURCE)) for f in FILES if f.parent != SOURCE}
    missing = {room for room in rooms if f"`{room}/`" not in page}
    assert not missing, f"docs/architecture.md does not mention {sorted(missing)}"


def test_the_architecture_page_names_what_is_there(root):
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:core|ui|cli|samples)/[\w/]+\.py)\b", page))
    assert len(named) > 50
    gone = {name for name in named if not (SOURCE / name).is_file()}
    assert not gone, f"docs/architecture.md names {sorted(gone)}"
    walks = "".join(re.findall(r"```.*?```", page, re.DOTALL))
    words = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b[a-z]+(?:_[a-z]+)+\b(?!\.py)", walks))
    source = "\n".join(file.read_text(encoding="utf-8") for file in FILES)
    unknown = {word for word in words if not re.search(rf"(def|class) {word}\b", source)}
    files = {file.stem for file in FILES} | {file.parent.name for file in FILES}
    assert not unknown - files, f"docs/architecture.md names {sorted(unknown - files)}"


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
