"""Kernels of Algorithm 1: the step that touches every column, what surrounds it, adjoints of both.

Columns are taken in blocks that fit the cache. Inside a block all is done by two loops that fill
the processor's registers: `_add_rows`, a row as a combination of rows, and `_add_products`, the
products of rows with rows, sixteen at a time. `plan` and `update` are arithmetic on c × r numbers,
for which NumPy would take longer than the columns of a small image take.

A prefix g names a gradient: gS is ∂loss/∂S. Where a step takes 0 for 0/0, and at a kink, the
gradient is 0.
"""

from __future__ import annotations

import numpy as np

from napari_beerlanet.core.common.threads import njit

_FASTMATH = {"reassoc", "contract", "nsz"}  # lets sums vectorise; NaN and inf keep their meaning
_CACHE_BLOCK = 256


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def density_map(X, D, M, N, b, out, first, last):
    """out = max(0, Mᵀ D + Nᵀ X + b) for columns first … last − 1.

    X (c, u), D (q, u) with q = r, or q = 0 while D is zero; M (q, r), N (c, r), b (r,).
    """
    for start in range(first, last, _CACHE_BLOCK):
        _map_block(X, D, M, N, b, out, start, min(start + _CACHE_BLOCK, last))


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def density_step(X, w, D, M, N, b, out, G, P, m, first, last):
    """`density_map` and the result's sums weighted by w (u,), for columns first … last − 1.

    Adds to G (r, r) = out W outᵀ; P (c, r) = X W outᵀ; m (r,) = out w.
    """
    c = X.shape[0]
    r = M.shape[1]
    weighted = np.empty((r, _CACHE_BLOCK))
    X1 = np.ones((c + 1, _CACHE_BLOCK))  # X and a row of ones: P and m in one go
    square = np.zeros((r, r))
    P1 = np.zeros((r, c + 1))
    for start in range(first, last, _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, last)
        n = stop - start
        _copy_block(X, start, stop, X1)
        _map_block(X, D, M, N, b, out, start, stop)
        for i in range(r):
            _weigh(weighted[i, :n], w[start:stop], out[i, start:stop])
        _add_products(weighted, out, start, n, True, square)
        _add_products(weighted, X1, 0, n, False, P1)
    for i in range(r):
        for j in range(i):
            G[i, j] += square[i, j]
            G[j, i] += square[i, j]
        G[i, i] += square[i, i]
        for k in range(c):
            P[k, i] += P1[i, k]
        m[i] += P1[i, c]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def density_step_backward(X, w, D, M, out, g_out, gG, gP, gm, g_D, gM, gN, gb, first, last):
    """Gradients of `density_step` for its columns: fills g_D (q, u), adds to gM, gN, gb.

    g_out (r, u) is the gradient of `out`; gG (r, r) must be gradient plus its transpose. g_D may
    be g_out itself.
    """
    c = X.shape[0]
    q, r = M.shape
    Mt = M.T.copy()
    g = np.empty((r, _CACHE_BLOCK))
    X1 = np.ones((c + 1, _CACHE_BLOCK))
    gMt = np.zeros((r, q))
    gN1 = np.zeros((r, c + 1))
    for start in range(first, last, _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, last)
        n = stop - start
        _copy_block(X, start, stop, X1)
        for i in range(r):
            z = g[i, :n]
            z[:] = gm[i]
            _add_rows(z, X, gP, i, start)
            _add_rows(z, out, gG, i, start)
            _mask(z, w[start:stop], g_out[i, start:stop], out[i, start:stop])
        _add_products(g, X1, 0, n, False, gN1)
        _add_products(g, D, start, n, False, gMt)
        for j in range(q):
            z = g_D[j, start:stop]
            z[:] = 0.0
            _add_rows(z, g, Mt, j, 0)
    for i in range(r):
        for j in range(q):
            gM[j, i] += gMt[i, j]
        for k in range(c):
            gN[k, i] += gN1[i, k]
        gb[i] += gN1[i, c]


@njit(cache=True, nogil=True)
def plan(S, a, m, mean, weight, lam, gamma, x0, M, N, b, threshold):
    """x₀, and the gradient step on D with its ℓ₁ prox as a map of the unscaled D.

    From S (c, r), the scales a (r,) of D and the sums m (r,) of the scaled D. Fills x0 (c,); M
    (r, r), or (0, r) while D is zero; N (c, r), b (r,); and the ℓ₂ prox's threshold (r,).
    """
    c, r = S.shape
    square = 0.0
    for i in range(c):
        x0[i] = mean[i]
        for j in range(r):
            square += S[i, j] * S[i, j]
            if weight > 0.0:
                x0[i] += S[i, j] * m[j] / weight
    tau = 1.0 / square if square > 0.0 else 0.0
    for j in range(r):
        along = length = 0.0
        for i in range(c):
            along += x0[i] * S[i, j]
            length += S[i, j] * S[i, j]
            N[i, j] = -tau * S[i, j]
        threshold[j] = lam * tau * np.sqrt(length)
        b[j] = tau * along - gamma * threshold[j]
    for j in range(M.shape[0]):
        for n in range(r):
            product = 0.0
            for i in range(c):
                product += S[i, j] * S[i, n]
            M[j, n] = a[j] * ((1.0 if j == n else 0.0) - tau * product)


@njit(cache=True, nogil=True)
def update(S, x0, threshold, raw_G, raw_P, raw_m, weight, mean, spread, lam, gamma, unit, S1, a, m):
    """The ℓ₂ prox of D, which only scales its rows, then the step on S and its prox.

    From the sums of the unscaled D, as `density_step` has them. Fills the new spectra S1 (c, r),
    D's scales a (r,) and the sums m (r,) of the scaled D, and returns the objective. With `unit`,
    live sᵢ end with unit norm, and D takes up the factor.
    """
    c, r = S.shape
    G, P = np.empty((r, r)), np.empty((c, r))
    square = _scale_sums(threshold, raw_G, raw_P, raw_m, a, G, P, m)
    tau = 1.0 / square if square > 0.0 else 0.0
    for j in range(r):
        length = 0.0
        for i in range(c):
            slope = P[i, j] - x0[i] * m[j]
            for n in range(r):
                slope += S[i, n] * G[n, j]
            S1[i, j] = max(S[i, j] - tau * slope, 0.0)
            length += S1[i, j] * S1[i, j]
        length = np.sqrt(length)
        factor = _shrink(length, lam * tau * (gamma * m[j] + np.sqrt(G[j, j])))
        for i in range(c):
            S1[i, j] *= factor
    fit, penalty = spread, 0.0
    for i in range(c):
        fit += weight * (x0[i] - mean[i]) ** 2
    for j in range(r):
        length = 0.0
        for i in range(c):
            explained = 0.0
            for n in range(r):
                explained += S1[i, n] * G[n, j]
            fit += S1[i, j] * (explained - 2.0 * (x0[i] * m[j] - P[i, j]))
            length += S1[i, j] * S1[i, j]
        penalty += np.sqrt(length) * (gamma * m[j] + np.sqrt(G[j, j]))
    for j in range(r):
        length = 0.0
        for i in range(c):
            length += S1[i, j] * S1[i, j]
        length = np.sqrt(length)
        if unit:
            a[j] *= length
            m[j] *= length
            for i in range(c):
                S1[i, j] = S1[i, j] / length if length > 0.0 else 0.0
    return 0.5 * max(fit, 0.0) + lam * penalty


@njit(cache=True, nogil=True)
def update_backward(
    S, x0, threshold, raw_G, raw_P, raw_m, lam, gamma, unit,
    gS, ga, gx0, gm, total, both, gP, g_threshold,
):  # fmt: skip
    """Gradients of what `update` was given from those of S1, a and m, in gS, ga and gm.

    gS becomes that of S, gm that of raw_m; gx0 (c,) and `total`, of λ and γ, are added to. Fills
    `both` (r, r), the gradient of raw_G plus its transpose, gP (c, r) of raw_P, and g_threshold.
    """
    c, r = S.shape
    # The update once more.
    size, a, m = np.empty(r), np.empty(r), np.empty(r)
    G, P = np.empty((r, r)), np.empty((c, r))
    for j in range(r):
        size[j] = np.sqrt(raw_G[j, j])
    square = _scale_sums(threshold, raw_G, raw_P, raw_m, a, G, P, m)
    tau2 = 1.0 / square if square > 0.0 else 0.0
    slope, T = np.empty((c, r)), np.empty((c, r))
    for i in range(c):
        for j in range(r):
            slope[i, j] = P[i, j] - x0[i] * m[j]
            for n in range(r):
                slope[i, j] += S[i, n] * G[n, j]
            T[i, j] = max(S[i, j] - tau2 * slope[i, j], 0.0)

    # Back through the rescaling to unit spectra, the prox and the data step on S.
    gT, g_penalty = np.empty((c, r)), np.empty(r)
    along2 = g_tau2 = 0.0
    for j in range(r):
        norm = 0.0
        for i in range(c):
            norm += T[i, j] * T[i, j]
        norm = np.sqrt(norm)
        penalty = gamma * m[j] + np.sqrt(G[j, j])
        shrink = _shrink(norm, lam * tau2 * penalty)
        if unit:
            length = norm * shrink
            g_norm = ga[j] * a[j] + gm[j] * m[j]
            if length > 0.0:
                for i in range(c):
                    g_norm -= gS[i, j] * T[i, j] * shrink / length / length
            for i in range(c):
                ahead = gS[i, j] / length if length > 0.0 else 0.0
                turned = T[i, j] * shrink / length * g_norm if length > 0.0 else 0.0
                gS[i, j] = ahead + turned
            ga[j] *= length
            gm[j] *= length
        onto = 0.0
        for i in range(c):
            onto += gS[i, j] * T[i, j]
        alive = onto / norm if norm > lam * tau2 * penalty else 0.0
        g_norm = alive - (onto * shrink / norm if norm > 0.0 else 0.0)
        for i in range(c):
            turned = T[i, j] / norm * g_norm if norm > 0.0 else 0.0
            gT[i, j] = gS[i, j] * shrink + turned if T[i, j] > 0.0 else 0.0
            g_tau2 -= gT[i, j] * slope[i, j]
        along2 -= alive * penalty
        g_penalty[j] = -lam * tau2 * alive
        total[1] += g_penalty[j] * m[j]
    g_tau2 += lam * along2
    total[0] += tau2 * along2
    gG = np.empty((r, r))
    for i in range(c):
        for j in range(r):
            gP[i, j] = -tau2 * gT[i, j]
    for j in range(r):
        root = np.sqrt(G[j, j])
        for n in range(r):
            gG[j, n] = 0.0
            for i in range(c):
                gG[j, n] += S[i, j] * gP[i, n]
        gG[j, j] += (g_penalty[j] / (2.0 * root) if root > 0.0 else 0.0) - tau2 * tau2 * g_tau2
        gm[j] += gamma * g_penalty[j]
        for i in range(c):
            gm[j] -= x0[i] * gP[i, j]
    for i in range(c):
        for j in range(r):
            gS[i, j] = gT[i, j]
            for n in range(r):
                gS[i, j] += gP[i, n] * G[n, j]
            gx0[i] -= gP[i, j] * m[j]

    # Back through the scales of D.
    g_size = np.empty(r)
    for j in range(r):
        onto = ga[j] + gm[j] * raw_m[j]
        for n in range(r):
            onto += a[n] * (gG[n, j] * raw_G[n, j] + gG[j, n] * raw_G[j, n])
        for i in range(c):
            onto += gP[i, j] * raw_P[i, j]
        alive = onto / size[j] if size[j] > threshold[j] else 0.0
        g_size[j] = alive - (onto * a[j] / size[j] if size[j] > 0.0 else 0.0)
        g_threshold[j] = -alive
    for j in range(r):
        for n in range(r):
            both[j, n] = a[j] * a[n] * (gG[j, n] + gG[n, j])
        both[j, j] += g_size[j] / size[j] if size[j] > 0.0 else 0.0
    for j in range(r):
        gm[j] *= a[j]
        for i in range(c):
            gP[i, j] *= a[j]


@njit(cache=True, nogil=True)
def plan_backward(
    S, a, m, weight, lam, gamma, x0, threshold, gM, gN, gb, g_threshold, gS, ga, gx0, gm, total
):
    """Gradients of what `plan` was given: gS (c, r) and `total`, of λ and γ, are added to.

    Fills ga and gm (r,). gx0 (c,) is that of what else x₀ went into, and ends as zeros.
    """
    c, r = S.shape
    q = gM.shape[0]
    square = 0.0
    size1 = np.empty(r)
    for j in range(r):
        length = 0.0
        for i in range(c):
            length += S[i, j] * S[i, j]
        square += length
        size1[j] = np.sqrt(length)
    tau1 = 1.0 / square if square > 0.0 else 0.0
    along1 = g_tau1 = 0.0
    more = np.empty((c, r))
    for j in range(r):
        g = g_threshold[j] - gamma * gb[j]
        along1 += g * size1[j]
        total[1] -= gb[j] * threshold[j]
        for i in range(c):
            g_tau1 += gb[j] * x0[i] * S[i, j] - gN[i, j] * S[i, j]
            more[i, j] = x0[i] * gb[j] - gN[i, j]
            if size1[j] > 0.0:
                more[i, j] += S[i, j] / size1[j] * lam * g
    g_tau1 += lam * along1
    total[0] += tau1 * along1
    for j in range(q):
        ga[j] = gM[j, j]
        for n in range(r):
            product = 0.0
            for i in range(c):
                product += S[i, j] * S[i, n]
            ga[j] -= tau1 * gM[j, n] * product
            g_tau1 -= a[j] * gM[j, n] * product
            for i in range(c):
                more[i, n] -= S[i, j] * a[j] * gM[j, n]
                more[i, j] -= S[i, n] * a[j] * gM[j, n]
    for i in range(c):
        for j in range(r):
            gS[i, j] += tau1 * more[i, j] - 2.0 * tau1 * tau1 * g_tau1 * S[i, j]
            gx0[i] += tau1 * S[i, j] * gb[j]
    gm[:] = 0.0
    if q > 0 and weight > 0.0:  # x₀ = mean + S m / weight
        for i in range(c):
            for j in range(r):
                gS[i, j] += gx0[i] / weight * m[j]
                gm[j] += gx0[i] / weight * S[i, j]
    gx0[:] = 0.0


@njit(cache=True, nogil=True)
def _scale_sums(threshold, raw_G, raw_P, raw_m, a, G, P, m):
    """The ℓ₂ prox's factors a (r,) and the sums of a ⊙ D from those of D; returns ‖a ⊙ D‖²."""
    r = len(a)
    square = 0.0
    for j in range(r):
        a[j] = _shrink(np.sqrt(raw_G[j, j]), threshold[j])
    for j in range(r):
        for n in range(r):
            G[j, n] = a[j] * raw_G[j, n] * a[n]
        for i in range(raw_P.shape[0]):
            P[i, j] = raw_P[i, j] * a[j]
        m[j] = raw_m[j] * a[j]
        square += G[j, j]
    return square


@njit(cache=True, nogil=True)
def _shrink(norm, threshold):
    """The factor of the ℓ₂ prox, 1 − min(norm, threshold) / norm, and 0 where the norm is 0."""
    return max(norm - threshold, 0.0) / norm if norm > 0.0 else 0.0


@njit(cache=True, nogil=True)
def _copy_block(X, start, stop, block):
    """Columns start … stop − 1 of X. A loop: numba takes seconds to compile such an assignment."""
    for k in range(X.shape[0]):
        for t in range(stop - start):
            block[k, t] = X[k, start + t]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _map_block(X, D, M, N, b, out, start, stop):
    for i in range(M.shape[1]):
        z = out[i, start:stop]
        z[:] = b[i]
        _add_rows(z, X, N, i, start)
        _add_rows(z, D, M, i, start)
        for t in range(z.shape[0]):
            z[t] = max(z[t], 0.0)


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _add_rows(z, A, E, i, start):
    """z += Σ_j E[j, i] A[j, start : start + n], eight or three rows at a time to save loads."""
    n = z.shape[0]
    stop = start + n
    rows = A.shape[0]
    j = 0
    while j + 8 <= rows:
        a0 = A[j, start:stop]
        a1 = A[j + 1, start:stop]
        a2 = A[j + 2, start:stop]
        a3 = A[j + 3, start:stop]
        a4 = A[j + 4, start:stop]
        a5 = A[j + 5, start:stop]
        a6 = A[j + 6, start:stop]
        a7 = A[j + 7, start:stop]
        e0, e1, e2, e3 = E[j, i], E[j + 1, i], E[j + 2, i], E[j + 3, i]
        e4, e5, e6, e7 = E[j + 4, i], E[j + 5, i], E[j + 6, i], E[j + 7, i]
        for t in range(n):
            z[t] += (e0 * a0[t] + e1 * a1[t] + e2 * a2[t] + e3 * a3[t]) + (
                e4 * a4[t] + e5 * a5[t] + e6 * a6[t] + e7 * a7[t]
            )
        j += 8
    while j + 3 <= rows:
        a0 = A[j, start:stop]
        a1 = A[j + 1, start:stop]
        a2 = A[j + 2, start:stop]
        e0, e1, e2 = E[j, i], E[j + 1, i], E[j + 2, i]
        for t in range(n):
            z[t] += e0 * a0[t] + e1 * a1[t] + e2 * a2[t]
        j += 3
    while j < rows:
        a0 = A[j, start:stop]
        e0 = E[j, i]
        for t in range(n):
            z[t] += e0 * a0[t]
        j += 1


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _add_products(A, B, start, n, lower, C):
    """C += A Bᵀ over the first n columns of A (p, …) and n of B (q, …) from start, 4 × 4 at a time.

    `lower`: no more than the lower triangle is needed. Rows past the last repeat it; what comes
    of them is dropped.
    """
    p, q = A.shape[0], B.shape[0]
    stop = start + n
    s = np.empty((4, 4))
    for i in range(0, p, 4):
        a0, a1 = A[i, :n], A[min(i + 1, p - 1), :n]
        a2, a3 = A[min(i + 2, p - 1), :n], A[min(i + 3, p - 1), :n]
        for j in range(0, min(i + 4, q) if lower else q, 4):
            b0, b1 = B[j, start:stop], B[min(j + 1, q - 1), start:stop]
            b2, b3 = B[min(j + 2, q - 1), start:stop], B[min(j + 3, q - 1), start:stop]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = 0.0
            s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = 0.0
            for t in range(n):
                x0, x1, x2, x3 = a0[t], a1[t], a2[t], a3[t]
                y0, y1, y2, y3 = b0[t], b1[t], b2[t], b3[t]
                s00, s01, s02, s03 = s00 + x0 * y0, s01 + x0 * y1, s02 + x0 * y2, s03 + x0 * y3
                s10, s11, s12, s13 = s10 + x1 * y0, s11 + x1 * y1, s12 + x1 * y2, s13 + x1 * y3
                s20, s21, s22, s23 = s20 + x2 * y0, s21 + x2 * y1, s22 + x2 * y2, s23 + x2 * y3
                s30, s31, s32, s33 = s30 + x3 * y0, s31 + x3 * y1, s32 + x3 * y2, s33 + x3 * y3
            s[0, 0], s[0, 1], s[0, 2], s[0, 3] = s00, s01, s02, s03
            s[1, 0], s[1, 1], s[1, 2], s[1, 3] = s10, s11, s12, s13
            s[2, 0], s[2, 1], s[2, 2], s[2, 3] = s20, s21, s22, s23
            s[3, 0], s[3, 1], s[3, 2], s[3, 3] = s30, s31, s32, s33
            for k in range(min(4, p - i)):
                for m in range(min(4, q - j)):
                    C[i + k, j + m] += s[k, m]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _weigh(wd, w, d):
    for t in range(wd.shape[0]):
        wd[t] = w[t] * d[t]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _mask(z, w, g, d):
    """z = w z + g where d is positive, else 0."""
    for t in range(z.shape[0]):
        z[t] = (z[t] * w[t] + g[t]) if d[t] > 0.0 else 0.0
