"""NumPy in the place of kernels that are being compiled: the same result, for a whole run."""

import numpy as np
import pytest

from discs import disc_detector, draw, scattered
from napari_beerlanet import decompose
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.common import threads
from napari_beerlanet.core.common.threads import numpy_until_compiled, set_being_compiled
from napari_beerlanet.core.stains.solver import converged_kernels, numpy_sweeps
from pictures import section, smear

TOLERANCE = 1e-4  # of densities in OD: where the descent stops may differ by a sweep


@pytest.fixture
def compiling():
    """Another process compiles the kernels until the value is set to False."""
    state = [True]
    set_being_compiled(lambda: state[0])
    yield state
    set_being_compiled(None)


def in_numpy(work):
    """What a function returns, and that it has called no kernel."""
    with numpy_until_compiled(), pytest.MonkeyPatch.context() as patch:
        for name in vars(converged_kernels):
            if hasattr(getattr(converged_kernels, name), "py_func"):
                patch.setattr(converged_kernels, name, None)
        return work()


@pytest.mark.parametrize("picture", [smear(60, 80), section(60, 80), section(60, 80, 1, 3)])
@pytest.mark.parametrize("alpha", [False, True])
def test_a_decomposition_is_that_of_the_kernels(compiling, picture, alpha):
    if alpha:
        opaque = np.full(picture.shape[:2], 255, np.uint8)
        opaque[:9] = 0
        picture = np.dstack([picture, opaque])
    compiled = decompose(picture, iterations="converge")
    plain = in_numpy(lambda: decompose(picture, iterations="converge"))
    assert plain.active.tolist() == compiled.active.tolist()
    np.testing.assert_allclose(plain.densities, compiled.densities, atol=TOLERANCE)
    np.testing.assert_allclose(plain.spectra, compiled.spectra, atol=TOLERANCE)
    np.testing.assert_allclose(plain.background, compiled.background, atol=TOLERANCE)
    assert plain.objective[-1] == pytest.approx(compiled.objective[-1], rel=1e-6)


@pytest.mark.parametrize("iterations", [10, "converge"])
def test_so_it_is_with_given_penalties(compiling, iterations):
    settings = {"iterations": iterations, "lam": 1.0, "gamma": 0.05}
    compiled = decompose(smear(60, 80), 4, **settings)
    plain = in_numpy(lambda: decompose(smear(60, 80), 4, **settings))
    np.testing.assert_allclose(plain.densities, compiled.densities, atol=TOLERANCE)
    np.testing.assert_allclose(plain.objective[-1], compiled.objective[-1], rtol=1e-6)


@pytest.mark.parametrize("white", [0.0, 0.3])
@pytest.mark.parametrize("hold", [0, 1, 2])
def test_a_sweep_is_that_of_the_kernel(hold, white):
    rng = np.random.default_rng(hold)
    X, w = -rng.random((3, 700)), rng.integers(0, 5, 700).astype(float)
    states = []
    for which in (converged_kernels, numpy_sweeps):
        D, S, x0, R = np.ones((3, 700)), np.eye(3) + 0.1, np.zeros(3), np.empty_like(X)
        S[:, 1] = 0.0
        which.residual(X, D, S, x0, R)
        before = which.objective(w, D, R, S, 0.4, 0.1)
        value = [which.sweep(w, D, R, S, x0, 0.4, 0.1, hold, white) for _ in range(3)]
        states.append([before, *value, D, S, x0, R])
    for kernel, plain in zip(*states, strict=True):
        np.testing.assert_allclose(plain, kernel, rtol=1e-10, atol=1e-12)


def test_boxes_and_their_stains_are_those_of_the_kernels(compiling):
    image = draw((200, 260), scattered((200, 260), 40, seed=5, spread=0.1))
    detector = disc_detector()
    compiled = detector.detect(image)
    with numpy_until_compiled():
        plain = detector.detect(image)
    assert len(compiled) > 5
    assert plain.labels.tolist() == compiled.labels.tolist()
    np.testing.assert_allclose(plain.xyxy, compiled.xyxy, atol=1e-2)
    np.testing.assert_allclose(plain.scores, compiled.scores, atol=1e-4)
    assert compiled.columns
    for name, values in compiled.columns.items():
        np.testing.assert_allclose(plain.columns[name], values, rtol=1e-3, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [0.0, 0.45, 1.0])
def test_the_same_boxes_are_suppressed(compiling, limit):
    rng = np.random.default_rng(3)
    corner, labels = rng.integers(0, 60, (300, 2)), rng.integers(0, 3, 300)
    boxes = np.hstack([corner, corner + rng.integers(0, 30, (300, 2))]).astype(np.float32)
    scores, first = rng.integers(0, 9, 300) / 10, rng.random(300) < 0.1  # many alike
    given = (boxes, scores, labels, limit, first)
    compiled = non_max_suppression(*given)
    with numpy_until_compiled():
        assert non_max_suppression(*given).tolist() == compiled.tolist()


def test_a_run_keeps_what_it_began_with(compiling, monkeypatch):
    """Also in threads, and in a run within the run."""
    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    tasks = [threads.in_numpy] * 3
    assert threads.run_parallel(tasks) == [False] * 3, "only where it is asked for"
    with numpy_until_compiled():
        compiling[0] = False
        assert threads.run_parallel(tasks) == [True] * 3
        assert list(threads.map_threads(lambda _: threads.in_numpy(), range(3))) == [True] * 3
    with numpy_until_compiled():
        compiling[0] = True
        assert not threads.in_numpy()
    assert not threads.in_numpy()
