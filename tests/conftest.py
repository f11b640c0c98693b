"""What every test shares: one thread per worker, long files first, a Qt that needs no display."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

# Workers share the cores among themselves: threads of torch would only wait for each other, and
# those of OpenMP do that busily. Processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
TORCH_THREADS = int(os.environ["OMP_NUM_THREADS"])

# Converting the networks of hundreds of tests takes longer than they run: torch runs them, but for
# tests of OpenVINO itself, which ask for it.
os.environ.setdefault("NAPARI_BEERLANET_OPENVINO", "off")

# They run `at_start/sitecustomize.py` first, which has them look for garbage less often.
AT_START = ROOT / "tests" / "at_start"
if str(AT_START) not in (_paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(AT_START), *filter(None, _paths)])

sys.path.append(str(AT_START))
import keep_none  # noqa: E402, F401

# Settings of napari are neither read nor written, which it does with every dock: those of the one
# who runs the tests shall not matter, and shall stay.
os.environ.setdefault("NAPARI_CONFIG", "")

# Kernels are compiled before tests start, or where a test needs them, and always used.
os.environ.setdefault("NAPARI_BEERLANET_COMPILE", "0")

# Importing makes millions of objects and no garbage; see also `pytest_runtest_setup`.
gc.disable()

# The first example may compile a kernel, and the machine may be busy: time proves nothing here.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those with windows, and of others those with many tests.

    So workers end together: what is left for the end is short.

    `--no-loadscope-reorder` keeps this order among workers.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def share(mark: str, path: Path) -> float:
        marked = sum(item.get_closest_marker(mark) is not None for item in files[path])
        return marked / len(files[path])

    rank = {
        path: (-share("slow", path), -share("window", path), -len(files[path]), number)
        for number, path in enumerate(files)
    }
    # Viewers that tests share are closed when a test makes one of its own: in each file, later.
    items.sort(key=lambda item: (rank[item.path], "make_napari_viewer" in item.fixturenames))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, as many tests wait for processes, threads or timers."""
    return min((os.cpu_count() or 1) + 1, 4)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is imported. Collect less often than Python does: a viewer has 100,000 objects."""
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


_modules_frozen = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep what imports have made out of garbage collections.

    napari collects several times per viewer and Ultralytics after every epoch, each time through
    all of torch. What a test makes is collected as ever.
    """
    global _modules_frozen
    if len(sys.modules) > _modules_frozen + 20:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


def pytest_sessionfinish() -> None:
    """At its end Python frees what libraries have made, and some complain if it cannot."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Ultralytics sets torch's threads to those of the machine when it picks a device.

    Those of three workers on two cores would wait for each other, busily: four times as slow.
    """
    yield
    torch = sys.modules.get("torch")
    loaded = hasattr(torch, "set_num_threads")
    if loaded and torch.get_num_threads() != TORCH_THREADS:
        torch.set_num_threads(TORCH_THREADS)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images beside the project; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(
            "real images not found: these tests look for them in ../shared beside the project"
        )
    return folder
