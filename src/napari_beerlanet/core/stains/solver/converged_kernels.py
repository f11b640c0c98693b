"""Kernels of the converged solution: exact block solves, one component after the other.

With all else fixed, the objective is an isotropic quadratic in dᵢ and in sᵢ plus the paper's
penalty, so one prox step with the block's own curvature solves it exactly; x₀ is closed form.
Fixed points are those of Algorithm 1, whose steps share one curvature among all components.

No light is brighter than white: x₀ ≤ `white`, which Algorithm 1 does not ask for. Without it
nothing holds x₀ where penalties are weak and stains reach all colours, as more light and more stain
look alike. In x₀ the objective is W/2 Σₖ (x₀ₖ − mₖ)² and a constant, W the total weight and m the
mean of X + S D, so its minimum below the bound is min(m, white), channel by channel.
"""

from __future__ import annotations

import numpy as np

from napari_beerlanet.core.common.threads import njit

MAX_SWEEPS = 2000
CONVERGENCE_WINDOW = 10
_MAX_MOMENTUM = 0.98
# numba does not see when what is imported here changes, and would go on with what it has kept.
_CACHE_BLOCK = 512
_FASTMATH = {"reassoc", "contract", "nsz"}  # lets sums vectorise; NaN and inf keep their meaning


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def residual(X, D, S, x0, R):
    """R (c, u) = x₀1ᵀ − X − S D, with D (r, u)."""
    u = X.shape[1]
    for start in range(0, u, _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, u)
        for k in range(X.shape[0]):
            row = R[k, start:stop]
            x = X[k, start:stop]
            for t in range(row.shape[0]):
                row[t] = x0[k] - x[t]
            for i in range(D.shape[0]):
                s = S[k, i]
                if s != 0.0:
                    d = D[i, start:stop]
                    for t in range(row.shape[0]):
                        row[t] -= s * d[t]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def extrapolate(here, before, momentum, out):
    """out = max(0, here + momentum (here − before)) for (r, u) arrays."""
    for i in range(here.shape[0]):
        a = here[i]
        b = before[i]
        z = out[i]
        for t in range(z.shape[0]):
            z[t] = max(a[t] + momentum * (a[t] - b[t]), 0.0)


@njit(cache=True, nogil=True)
def copy_point(D, S, x0, source, target):
    """One of the points D (p, r, u), S (p, c, r), x0 (p, c) to the place of another.

    In loops: what numba compiles for an assignment of arrays takes seconds, for its messages.
    """
    for i in range(D.shape[1]):
        for t in range(D.shape[2]):
            D[target, i, t] = D[source, i, t]
    for k in range(S.shape[1]):
        for i in range(S.shape[2]):
            S[target, k, i] = S[source, k, i]
        x0[target, k] = x0[source, k]


@njit(cache=True, nogil=True)
def advance(
    X, w, R, D, S, x0, turn, values, count, momentum, moving, lam, gam, hold, white, tolerance
):
    """Sweep until it converges, or until a multiple of ten sweeps, when components may be merged.

    D (3, r, u), S (3, c, r), x0 (3, c) are the points `turn` (3,): current, previous, next.
    `values` has `count` objectives; all new ones are added but the last, which is returned:
    (count, value, momentum, converged).
    """
    while True:
        current, previous, after = turn
        if moving:
            extrapolate(D[current], D[previous], momentum, D[after])
            extrapolate(S[current], S[previous], momentum, S[after])
            for k in range(x0.shape[1]):
                x0[after, k] = x0[current, k] + momentum * (x0[current, k] - x0[previous, k])
        else:
            copy_point(D, S, x0, current, after)
        residual(X, D[after], S[after], x0[after], R)
        value = sweep(w, D[after], R, S[after], x0[after], lam, gam, hold, white)
        if value > values[count - 1] and moving:
            copy_point(D, S, x0, current, after)
            residual(X, D[after], S[after], x0[after], R)
            value = sweep(w, D[after], R, S[after], x0[after], lam, gam, hold, white)
            momentum /= 2
        else:
            momentum = min(1.1 * momentum, _MAX_MOMENTUM)
        turn[0], turn[1], turn[2] = after, current, previous
        moving = True
        gained = (
            values[count - CONVERGENCE_WINDOW] - value if count >= CONVERGENCE_WINDOW else np.inf
        )
        converged = gained <= tolerance * value
        if converged or count % CONVERGENCE_WINDOW == 0 or count == MAX_SWEEPS:
            return count, value, momentum, converged
        values[count] = min(value, values[count - 1])
        count += 1


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def sweep(w, D, R, S, x0, lam, gam, hold, white):
    """Solve for x₀ ≤ white, then for each dᵢ and sᵢ in turn, in place; returns the objective.

    `hold` 1 leaves S as it is, 2 leaves x₀.

    w (u,), D (r, u), R (c, u) the residual, kept up to date, S (c, r) and x0 (c,). Live sᵢ end
    with unit norm. Columns are taken in blocks that fit the cache, twice per component: dᵢ needs
    its norm before it can be shrunk. What a solved sᵢ changes is applied on the next visit.
    """
    c, u = R.shape
    v = np.empty(u)
    change, norm, last = np.zeros(c), 1.0, -1
    if hold != 2:
        change = _solve_background(w, R, x0, white)
    penalty = 0.0
    for i in range(D.shape[0]):
        square = 0.0
        for k in range(c):
            square += S[k, i] * S[k, i]
        if square == 0.0:
            continue
        size = np.sqrt(square)
        d2 = 0.0
        for start in range(0, u, _CACHE_BLOCK):
            stop = min(start + _CACHE_BLOCK, u)
            _apply_pending(D, R, last, change, norm, start, stop)
            d2 += _propose(w, D, R, S, i, square, lam * gam / size, v, start, stop)
        factor = max(0.0, 1.0 - lam / size / np.sqrt(d2)) if d2 > 0.0 else 0.0
        d2 *= factor * factor
        d1 = 0.0
        along = np.zeros(c)
        for start in range(0, u, _CACHE_BLOCK):
            d1 += _accept(w, D[i], R, S, i, factor, v, along, start, min(start + _CACHE_BLOCK, u))
        change, norm, last = np.zeros(c), 1.0, i
        if d2 > 0.0:
            if hold == 1:
                penalty += lam * size * (gam * d1 + np.sqrt(d2))
            else:
                norm = _solve_spectrum(S, i, along, d1, d2, lam, gam, change)
                penalty += lam * norm * (gam * d1 + np.sqrt(d2))
    fit = 0.0
    for start in range(0, u, _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, u)
        _apply_pending(D, R, last, change, norm, start, stop)
        fit += _weighted_square(w, R, start, stop)
    return 0.5 * fit + penalty


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _solve_background(w, R, x0, white):
    """x₀ given all else: moves x0, and returns by how much R has to fall, (c,)."""
    total = 0.0
    for t in range(w.shape[0]):
        total += w[t]
    change = np.empty(R.shape[0])
    for k in range(R.shape[0]):
        row = R[k]
        mean = 0.0
        for t in range(R.shape[1]):
            mean += w[t] * row[t]
        best = min(x0[k] - mean / total, white) if total > 0.0 else x0[k]
        change[k] = x0[k] - best
        x0[k] = best
    return change


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _apply_pending(D, R, last, change, norm, start, stop):
    """What the last solve left to do on a block: R −= change dᵢ (or change alone), dᵢ *= norm."""
    for k in range(R.shape[0]):
        if change[k] != 0.0:
            row = R[k, start:stop]
            step = change[k]
            if last < 0:
                for t in range(row.shape[0]):
                    row[t] -= step
            else:
                d = D[last, start:stop]
                for t in range(row.shape[0]):
                    row[t] -= step * d[t]
    if last >= 0 and norm != 1.0:
        d = D[last, start:stop]
        for t in range(d.shape[0]):
            d[t] *= norm


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _propose(w, D, R, S, i, square, low, v, start, stop):
    """v = the ℓ₁ prox of dᵢ's exact step on a block; returns its Σ w v²."""
    d = D[i, start:stop]
    z = v[start:stop]
    weight = w[start:stop]
    for t in range(z.shape[0]):
        z[t] = d[t] - low
    for k in range(R.shape[0]):
        row = R[k, start:stop]
        s = S[k, i] / square
        for t in range(z.shape[0]):
            z[t] += s * row[t]
    total = 0.0
    for t in range(z.shape[0]):
        z[t] = max(z[t], 0.0)
        total += weight[t] * z[t] * z[t]
    return total


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _accept(w, d, R, S, i, factor, v, along, start, stop):
    """dᵢ = factor v on a block; R follows; adds R W dᵢ to `along` (c,); returns Σ w dᵢ."""
    old = d[start:stop]
    z = v[start:stop]
    weight = w[start:stop]
    total = 0.0
    for t in range(z.shape[0]):
        new = factor * z[t]
        z[t] = new - old[t]
        old[t] = new
        total += weight[t] * new
    for k in range(R.shape[0]):
        row = R[k, start:stop]
        s = S[k, i]
        dot = 0.0
        for t in range(z.shape[0]):
            row[t] -= s * z[t]
            dot += weight[t] * old[t] * row[t]
        along[k] += dot
    return total


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _solve_spectrum(S, i, along, d1, d2, lam, gam, change):
    """sᵢ given all else, stored with unit norm; returns the norm and fills its `change` (c,)."""
    c = S.shape[0]
    square = 0.0
    for k in range(c):
        change[k] = max(S[k, i] + along[k] / d2, 0.0)
        square += change[k] * change[k]
    norm = np.sqrt(square)
    factor = max(0.0, 1.0 - lam * (gam * d1 + np.sqrt(d2)) / d2 / norm) if norm > 0.0 else 0.0
    norm *= factor
    for k in range(c):
        new = factor * change[k]
        change[k] = new - S[k, i]
        S[k, i] = new / norm if norm > 0.0 else 0.0
    return norm


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _weighted_square(w, R, start, stop):
    weight = w[start:stop]
    total = 0.0
    for k in range(R.shape[0]):
        row = R[k, start:stop]
        for t in range(row.shape[0]):
            total += weight[t] * row[t] * row[t]
    return total


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def objective(w, D, R, S, lam, gam):
    """½‖R‖² + λ Σᵢ ‖sᵢ‖ (γ‖dᵢ‖₁ + ‖dᵢ‖₂), sums over columns weighted by w."""
    c, u = R.shape
    fit = 0.0
    for k in range(c):
        row = R[k]
        for t in range(u):
            fit += w[t] * row[t] * row[t]
    penalty = 0.0
    for i in range(D.shape[0]):
        d = D[i]
        d1 = 0.0
        d2 = 0.0
        square = 0.0
        for k in range(c):
            square += S[k, i] * S[k, i]
        for t in range(u):
            d1 += w[t] * d[t]
            d2 += w[t] * d[t] * d[t]
        penalty += np.sqrt(square) * (gam * d1 + np.sqrt(d2))
    return 0.5 * fit + lam * penalty


@njit(cache=True, nogil=True)
def solve_columns(X, x0, S, low, curvature, D):
    """Densities D (r, u) of columns X (c, u), each by itself, for fixed x₀, S of unit columns.

    Minimises ½‖x₀ − x − S d‖² + Σᵢ lowᵢ dᵢ + ½ Σᵢ curvatureᵢ dᵢ² over d ≥ 0, exactly. Components
    with sᵢ = 0 get 0.
    """
    c, r = S.shape
    G = np.zeros((r, r))
    for i in range(r):
        for j in range(r):
            for k in range(c):
                G[i, j] += S[k, i] * S[k, j]
        if G[i, i] > 0.0:
            G[i, i] += curvature[i]
    b, d = np.empty(r), np.empty(r)
    M, active = np.empty((r, r)), np.empty(r, np.int64)
    for t in range(X.shape[1]):
        for i in range(r):
            b[i] = -low[i]
            for k in range(c):
                b[i] += S[k, i] * (x0[k] - X[k, t])
        solve_nonnegative(G, b, d, M, active)
        for i in range(r):
            D[i, t] = d[i]


@njit(cache=True, nogil=True)
def solve_nonnegative(G, b, d, M, active):
    """Minimise ½ dᵀG d − bᵀd over d ≥ 0 exactly (Lawson and Hanson); returns how many are active.

    Fills d (r,), `active` with the indices of its positive entries, which are linearly
    independent, and M with the inverse of G among them.
    """
    r = len(b)
    size = 0
    solved, v = np.empty(r), np.empty(r)
    refused = 0  # one bit for each that would be negative as soon as it is active: rounding
    d[:] = 0.0
    for _ in range(10 * r):
        best, steepest = -1, 1e-13
        for i in range(r):
            if d[i] == 0.0 and not refused >> i & 1:
                slope = b[i]
                for p in range(size):
                    slope -= G[i, active[p]] * d[active[p]]
                if slope > steepest:
                    best, steepest = i, slope
        if best < 0:
            break
        extended = _extend(G, M, active, size, best, v)
        if extended == size:
            extended = _exchange(G, d, M, active, size, best, v)
        size = extended
        while size > 0:
            step, first = 1.0, -1
            for p in range(size):
                i = active[p]
                solved[p] = 0.0
                for q in range(size):
                    solved[p] += M[p, q] * b[active[q]]
                if solved[p] < 0.0:
                    share = d[i] / (d[i] - solved[p])
                    if share < step:
                        step, first = share, p
            for p in range(size):
                d[active[p]] += step * (solved[p] - d[active[p]])
            if first < 0:
                break
            d[active[first]] = 0.0  # not only nearly: it is what ends the step
            kept = 0
            for p in range(size):
                i = active[p]
                if d[i] > 0.0:
                    active[kept] = i
                    kept += 1
                else:
                    d[i] = 0.0
            size = _invert(G, M, active, kept, v)
            if size < kept:  # by rounding
                for i in range(r):
                    d[i] = d[i] if i in active[:size] else 0.0
        refused = 0 if d[best] > 0.0 else refused | 1 << best
    for p in range(size):
        if M[p, p] > 1e2:  # inexact, as spectra are nearly parallel
            _refine(G, b, d, M, active, size, solved)
            break
    return size


@njit(cache=True, nogil=True)
def _refine(G, b, d, M, active, size, rest):
    """One correction of d by what it leaves of b."""
    for p in range(size):
        rest[p] = b[active[p]]
        for q in range(size):
            rest[p] -= G[active[p], active[q]] * d[active[q]]
    for p in range(size):
        change = 0.0
        for q in range(size):
            change += M[p, q] * rest[q]
        if d[active[p]] + change > 0.0:
            d[active[p]] += change


@njit(cache=True, nogil=True)
def _exchange(G, d, M, active, size, new, v):
    """An entry that depends on active ones takes over from the one that it drives to 0 first."""
    out, step = -1, np.inf
    for p in range(size):
        v[p] = 0.0
        for q in range(size):
            v[p] += M[p, q] * G[active[q], new]
        if v[p] > 0.0 and d[active[p]] / v[p] < step:
            out, step = p, d[active[p]] / v[p]
    if out < 0:
        return size
    for p in range(size):
        d[active[p]] = max(d[active[p]] - step * v[p], 0.0)
    d[active[out]] = 0.0
    d[new] = step
    active[out] = new
    return _invert(G, M, active, size, v)


@njit(cache=True, nogil=True)
def _invert(G, M, active, size, v):
    """M = (G among the active entries)⁻¹; those that depend on others are dropped. v is scratch."""
    kept = 0
    for p in range(size):
        kept = _extend(G, M, active, kept, active[p], v)
    return kept


@njit(cache=True, nogil=True)
def _extend(G, M, active, size, new, v):
    """One more active entry, unless it depends on those that there are; returns the size."""
    rest = G[new, new]
    for a in range(size):
        v[a] = 0.0
        for e in range(size):
            v[a] += M[a, e] * G[active[e], new]
        rest -= G[new, active[a]] * v[a]
    if rest <= 1e-10 * G[new, new]:
        return size
    for a in range(size):
        for e in range(size):
            M[a, e] += v[a] * v[e] / rest
        M[a, size] = M[size, a] = -v[a] / rest
    M[size, size] = 1.0 / rest
    active[size] = new
    return size + 1
