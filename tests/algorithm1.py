"""Algorithm 1 of the paper in plain float64 NumPy, to compare the engine with.

Written from the paper's listing, line by line, and from METHOD.md where the paper leaves a choice
open. It knows nothing of the package and nothing of speed: X (c, p), S (c, r) and D (p, r) have
the paper's shapes. Sums over pixels carry weights w (p,); with w = 1 they are the paper's.
"""

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    x0: np.ndarray  # (c,)
    S: np.ndarray  # (c, r)
    D: np.ndarray  # (p, r)
    objective: np.ndarray  # (K,)


def columns_of(image, domain="log"):
    """(H, W, 3 or 4) to X (3, p) and w (p,): ln of the intensity, floored at one grey level."""
    flat = image.reshape(-1, image.shape[-1])
    white = {"uint8": 255.0, "uint16": 65535.0}.get(flat.dtype.name, 1.0)
    floor = 1 / white if white > 1 else 1 / 255
    intensity = flat[:, :3].astype(np.float64) / white
    X = np.log(np.where(intensity < floor, floor, intensity)) if domain == "log" else intensity
    w = np.ones(len(flat)) if flat.shape[1] == 3 else (flat[:, 3] > 0).astype(np.float64)
    return X.T, w


def algorithm1(
    X,
    S_init,
    lam,
    gamma,
    K,
    *,
    w=None,
    reference_pixels=None,
    unit_spectra=False,
    D=None,
):
    """K iterations from S_init and D (zero unless given)."""
    p, r = X.shape[1], S_init.shape[1]
    w = np.ones(p) if w is None else np.asarray(w, np.float64)
    if reference_pixels is not None:
        w = w * (reference_pixels / w.sum())
    S = np.array(S_init, np.float64)
    D = np.zeros((p, r)) if D is None else np.array(D, np.float64)
    values = []
    for _ in range(K):
        # x₀ = (1/p) (X + S Dᵀ) 1
        x0 = (X + S @ D.T) @ w / w.sum()
        # τ = 1 / ‖S‖²_F; where S is zero there is no step to take
        if (S != 0).any():
            tau = 1 / np.sum(S**2)
            # D = D − τ [D Sᵀ S + Xᵀ S − 1 x₀ᵀ S]
            D = D - tau * (D @ S.T @ S + X.T @ S - np.outer(np.ones(p), x0 @ S))
            for i in range(r):
                s_norm = np.sqrt(np.sum(S[:, i] ** 2))
                # dᵢ = (dᵢ − λ γ τ ‖sᵢ‖)₊
                D[:, i] = np.maximum(D[:, i] - lam * gamma * tau * s_norm, 0)
                # dᵢ = dᵢ (1 − min{‖dᵢ‖, λ τ ‖sᵢ‖} / ‖dᵢ‖)
                d_norm = np.sqrt(np.sum(w * D[:, i] ** 2))
                if d_norm > 0:
                    D[:, i] *= 1 - min(d_norm, lam * tau * s_norm) / d_norm
                else:
                    D[:, i] = 0
        # τ = 1 / ‖D‖²_F; where D is zero, S stays
        square = np.sum(w[:, None] * D**2)
        if square > 0:
            tau = 1 / square
            # S = S − τ [S Dᵀ D + X D − x₀ 1ᵀ D]
            WD = w[:, None] * D
            S = S - tau * (S @ (D.T @ WD) + X @ WD - np.outer(x0, WD.sum(0)))
            for i in range(r):
                # sᵢ = (sᵢ)₊ (1 − min{‖(sᵢ)₊‖, λ τ (γ ‖dᵢ‖₁ + ‖dᵢ‖₂)} / ‖(sᵢ)₊‖)
                S[:, i] = np.maximum(S[:, i], 0)
                s_norm = np.sqrt(np.sum(S[:, i] ** 2))
                d_norms = gamma * np.sum(WD[:, i]) + np.sqrt(np.sum(WD[:, i] * D[:, i]))
                if s_norm > 0:
                    S[:, i] *= 1 - min(s_norm, lam * tau * d_norms) / s_norm
        if unit_spectra:
            for i in range(r):
                s_norm = np.sqrt(np.sum(S[:, i] ** 2))
                S[:, i] = S[:, i] / s_norm if s_norm > 0 else 0
                D[:, i] = D[:, i] * s_norm
        values.append(objective(X, x0, S, D, lam, gamma, w))
    return Result(x0, S, D, np.array(values))


def objective(X, x0, S, D, lam, gamma, w=None):
    """½‖x₀1ᵀ − X − SDᵀ‖² + λ Σᵢ ‖sᵢ‖₂ (γ‖dᵢ‖₁ + ‖dᵢ‖₂), sums over pixels weighted by w."""
    w = np.ones(X.shape[1]) if w is None else w
    total = 0.5 * np.sum(w * (x0[:, None] - X - S @ D.T) ** 2)
    for s, d in zip(S.T, D.T, strict=True):
        norms = gamma * np.sum(w * np.abs(d)) + np.sqrt(np.sum(w * d**2))
        total += lam * np.sqrt(np.sum(s**2)) * norms
    return total
