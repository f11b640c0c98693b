"""Kernels compiled in a process of their own: all that are needed, once, ended with its parent."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from discs import disc_detector, draw, scattered
from napari_beerlanet import decompose
from napari_beerlanet.core.common.threads import kernels_being_compiled
from napari_beerlanet.core.detection import compile_kernels
from napari_beerlanet.core.detection.compile_kernels import (
    NOTHING_KEPT,
    compile_for_decomposition,
    compile_for_detection,
    is_compiled,
    start_compiling,
    stop_compiling,
)
from pictures import smear

TIMEOUT_S = 600
SOURCES = Path(compile_kernels.__file__).parents[2]
KERNEL_FILES = [path for path in SOURCES.rglob("*.py") if "@njit(" in path.read_text("utf-8")]


@pytest.fixture
def never_compiled(tmp_path, monkeypatch):
    """A machine on which nothing has been compiled, and where that may be done."""
    monkeypatch.setenv("NAPARI_BEERLANET_COMPILE", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    yield tmp_path
    stop_compiling()


@pytest.fixture
def compiles_nothing(never_compiled, monkeypatch):
    """The process's own function, called here, with nothing to do."""
    kept = never_compiled / "kernel.nbi"
    kept.write_text("")
    monkeypatch.setattr(os, "nice", lambda _: 0, raising=False)
    monkeypatch.setattr(compile_kernels, "kernel_files", lambda: [str(kept)])
    for name in ("compile_for_decomposition", "compile_for_detection", "compile_the_rest"):
        monkeypatch.setattr(compile_kernels, name, lambda: None)
    return kept


def dispatchers():
    """All functions of our package that numba compiles."""
    for name, module in list(sys.modules.items()):
        if name.startswith("napari_beerlanet."):
            yield from (f for f in vars(module).values() if hasattr(f, "py_func"))


def names_in(*nodes):
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_kernels_use_nothing_of_our_other_files(path):
    """numba compiles again when a kernel's own file was edited, and looks at no other: kernels that
    use those of another file would stay as they were in a checkout that is updated."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("napari_beerlanet")]
    imported = {alias.asname or alias.name for node in ours for alias in node.names} - {"njit"}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if "njit" in names_in(*f.decorator_list)]
    assert kernels
    assert {f.name: used for f in kernels if (used := names_in(f) & imported)} == {}


def test_a_first_decomposition_and_detection_find_all_compiled():
    image = draw((200, 260), scattered((200, 260), 40, seed=5, spread=0.1))
    detector = disc_detector()
    for function in dispatchers():
        function._reset_overloads()
    compile_for_decomposition()
    compile_for_detection()
    compiled = {function: list(function.signatures) for function in dispatchers()}
    decompose(smear(60, 80).copy(), iterations="converge")  # one that can be written to
    assert len(detector.detect(image)) > 5
    missed = {
        function.__name__: function.signatures
        for function in dispatchers()
        if function.signatures != compiled[function]
    }
    assert not missed, "compiled only when it was needed"


def test_the_process_ends_when_it_is_told_to(never_compiled):
    assert not kernels_being_compiled()
    assert start_compiling()
    process = compile_kernels._process
    assert kernels_being_compiled()
    assert start_compiling(), "the one that is running"
    assert compile_kernels._process is process
    stop_compiling()
    assert process.poll() is not None
    assert not kernels_being_compiled()


def test_none_is_started_where_that_is_switched_off(never_compiled, monkeypatch):
    monkeypatch.setenv("NAPARI_BEERLANET_COMPILE", "0")
    assert not start_compiling()
    assert compile_kernels._process is None


def test_the_process_ends_with_a_parent_that_is_killed(never_compiled):
    code = (
        "import time\n"
        "from napari_beerlanet.core.detection import compile_kernels as c\n"
        "assert c.start_compiling()\n"
        "print(c._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(never_compiled)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    psutil.wait_procs([child], timeout=TIMEOUT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_once_compiled_no_process_is_started(compiles_nothing, monkeypatch):
    assert not is_compiled("os:getpid")
    assert compile_kernels.main("os:getpid") == 0
    assert is_compiled("os:getpid")
    assert not start_compiling("os:getpid")
    assert compile_kernels._process is None
    assert not is_compiled("os:getppid"), "something else was asked for"
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CPU_NAME", "generic")
        assert not is_compiled("os:getpid"), "for another processor"
    compiles_nothing.unlink()
    assert not is_compiled("os:getpid"), "numba's files were removed"


def test_it_is_again_compiled_when_a_source_has_changed(compiles_nothing, monkeypatch):
    assert compile_kernels.main() == 0
    assert is_compiled()
    monkeypatch.setattr(compile_kernels, "_KERNEL_MODULES", ("core/boxes/geometry.py",))
    assert not is_compiled()


def test_numba_lists_what_it_keeps_in_files():
    found = compile_kernels.kernel_files()
    assert len(found) == 4
    assert {Path(path).suffix for path in found} == {".nbi"}


def test_nothing_is_compiled_where_nothing_can_be_kept(compiles_nothing, monkeypatch):
    monkeypatch.setattr(compile_kernels, "kernel_files", list)
    monkeypatch.setattr(compile_kernels, "compile_for_decomposition", pytest.fail)
    assert compile_kernels.main() == NOTHING_KEPT
    assert not is_compiled()


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(compiles_nothing, monkeypatch):
    """Nor is one that is a file: the next start compiles, or loads, again."""
    occupied = compiles_nothing.parent / "occupied"
    occupied.write_text("")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: occupied)
    assert compile_kernels.main() == 0
    assert not is_compiled()


def test_all_sources_of_kernels_are_watched():
    """Those whose functions are compiled here; a change in another has nothing to do with it."""
    root = Path(compile_kernels.__file__).parents[2]
    used = {
        Path(function.py_func.__code__.co_filename).relative_to(root).as_posix()
        for function in dispatchers()
        if function.signatures
    }
    watched = set(compile_kernels._KERNEL_MODULES)
    assert {name for name in used if "normalization" not in name and "crops" not in name} <= watched
