"""Are known stains found again? Ours against Macenko and Vahadane on fields with known truth.

    python benchmarks/recovery.py [--seeds 3] [--shift 0 0.5 1]

Synthetic smears and H&E fields (two dyes) and H&E with DAB (three) with noise, blur, vignetting
and JPEG. Ours is `decompose(image, iterations="converge")`: it is told neither the number of stains
nor their colours. Macenko (as torchstain has it) and Vahadane (ours, λ = 0.1) always find two
stains, which is right for the first two kinds of fields, and see the image against its true
background light. Cosine: between true and found spectrum. Correlation: between true and found
density over pixels; for Macenko and Vahadane the densities are the nonnegative least-squares ones
under their spectra. Means and worst cases over stains, seeds and shifts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

import napari_beerlanet as nb
from napari_beerlanet.core.normalization.classical import StainVectors, find_stain_vectors
from napari_beerlanet.core.normalization.normalizer import ColourStatistics
from napari_beerlanet.core.normalization.vahadane import SparseStains, find_sparse_stains
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.solver.converged_kernels import solve_columns
from napari_beerlanet.samples import SampleField, blood_smear, he_field

FIELDS: dict[str, Callable[[int, float], SampleField]] = {
    "smear, 2 stains": lambda seed, shift: blood_smear((480, 640), seed=seed, shift=shift),
    "H&E, 2 stains": lambda seed, shift: he_field((512, 512), seed=seed, shift=shift),
    "H&E + DAB, 3 stains": lambda seed, shift: he_field(
        (512, 512), seed=seed, shift=shift, stains=3
    ),
}
Found = tuple[np.ndarray, np.ndarray]  # spectra (3, n), densities (n, pixels)


def ours(truth: SampleField) -> Found:
    found = nb.decompose(truth.image, iterations="converge")
    keep = found.active
    return found.spectra[:, keep], found.densities[keep].reshape(int(keep.sum()), -1)


def macenko(image: np.ndarray) -> np.ndarray:
    colours = ColourStatistics.of(palette_of(image.reshape(-1, 3)))
    return stains_of(find_stain_vectors(colours, light=255.0))


def vahadane(image: np.ndarray) -> np.ndarray:
    return stains_of(find_sparse_stains(palette_of(image.reshape(-1, 3))))


def stains_of(found: StainVectors | SparseStains | str) -> np.ndarray:
    if isinstance(found, str):
        raise ValueError(found)
    return found.stains


def with_known_light(stains: Callable[[np.ndarray], np.ndarray]) -> Callable[[SampleField], Found]:
    def run(truth: SampleField) -> Found:
        # Seen against its own light, as these methods assume white.
        light = 255 * np.exp(truth.background)
        flat = (truth.image / light).clip(1 / 255, 1)
        spectra = np.abs(stains(np.rint(255 * flat).astype(np.uint8)))
        spectra = np.ascontiguousarray(spectra / np.linalg.norm(spectra, axis=0))
        X = np.ascontiguousarray(np.log(flat.reshape(-1, 3)).T)
        D = np.empty((spectra.shape[1], X.shape[1]))
        none = np.zeros(spectra.shape[1])
        solve_columns(X, np.zeros(3), spectra, none, none, D)
        return spectra, D

    return run


METHODS: dict[str, Callable[[SampleField], Found]] = {
    "ours": ours,
    "Macenko": with_known_light(macenko),
    "Vahadane": with_known_light(vahadane),
}


@dataclass
class Scores:
    """What one method reached on one kind of field."""

    cosines: list[float] = field(default_factory=list)
    correlations: list[float] = field(default_factory=list)
    right_number: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, truth: SampleField, found: Found, seconds: float) -> None:
        spectra, densities = found
        cosine = truth.spectra.T @ spectra
        true, mine = linear_sum_assignment(cosine, maximize=True)
        planes = truth.densities.reshape(len(truth.stains), -1)
        missing = [0.0] * (len(truth.stains) - len(true))
        self.cosines += [*cosine[true, mine], *missing]
        pairs = zip(true, mine, strict=True)
        self.correlations += [float(np.corrcoef(planes[i], densities[j])[0, 1]) for i, j in pairs]
        self.correlations += missing
        self.right_number.append(spectra.shape[1] == len(truth.stains))
        self.seconds.append(seconds)

    def row(self) -> str:
        c, d = np.array(self.cosines), np.array(self.correlations)
        number = f"{sum(self.right_number)}/{len(self.right_number)}"
        return (
            f"{c.mean():.4f} | {c.min():.4f} | {d.mean():.4f} | {d.min():.4f} | {number} "
            f"| {np.median(self.seconds):.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shift", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    options = parser.parse_args()
    for run in METHODS.values():
        run(blood_smear((64, 64)))  # compiles
    print("| field | method | cosine, mean | worst | correlation, mean | worst | number | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in FIELDS.items():
        truths = [make(seed, shift) for seed in range(options.seeds) for shift in options.shift]
        for method, run in METHODS.items():
            if method != "ours" and len(truths[0].stains) > 2:
                continue
            scores = Scores()
            for truth in truths:
                start = time.perf_counter()
                found = run(truth)
                scores.add(truth, found, time.perf_counter() - start)
            print(f"| {name} | {method} | {scores.row()} |", flush=True)


if __name__ == "__main__":
    main()
