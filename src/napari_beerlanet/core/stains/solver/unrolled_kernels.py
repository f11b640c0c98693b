"""Kernels of the unrolled solution: the one step of an iteration that touches every column.

Columns are taken in blocks that fit the cache. Inside a block all is done by two loops that fill
the processor's registers: `_add_rows`, a row as a combination of rows, and `_add_products`, the
products of rows with rows, sixteen at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from napari_beerlanet.core.stains.solver.kernels import FASTMATH

_CACHE_BLOCK = 256


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def density_map(X, D, M, N, b, out, first, last):
    """out = max(0, Mᵀ D + Nᵀ X + b) for columns first … last − 1.

    X (c, u), D (q, u) with q = r, or q = 0 while D is zero; M (q, r), N (c, r), b (r,).
    """
    for start in range(first, last, _CACHE_BLOCK):
        _map_block(X, D, M, N, b, out, start, min(start + _CACHE_BLOCK, last))


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def density_step(X, w, D, M, N, b, out, G, P, m, first, last):
    """`density_map` and the result's sums weighted by w (u,), for columns first … last − 1.

    Adds to G (r, r), lower triangle, = out W outᵀ; P (c, r) = X W outᵀ; m (r,) = out w.
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
        _map_block(X, D, M, N, b, out, start, stop)
        X1[:c, :n] = X[:, start:stop]
        for i in range(r):
            _weigh(weighted[i, :n], w[start:stop], out[i, start:stop])
        _add_products(weighted, out, start, n, True, square)
        _add_products(weighted, X1, 0, n, False, P1)
    for i in range(r):
        G[i, : i + 1] += square[i, : i + 1]
    P += P1[:, :c].T
    m += P1[:, c]


@njit(cache=True, nogil=True, fastmath=FASTMATH)
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
        X1[:c, :n] = X[:, start:stop]
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
    gM += gMt.T
    gN += gN1[:, :c].T
    gb += gN1[:, c]


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _map_block(X, D, M, N, b, out, start, stop):
    for i in range(M.shape[1]):
        z = out[i, start:stop]
        z[:] = b[i]
        _add_rows(z, X, N, i, start)
        _add_rows(z, D, M, i, start)
        for t in range(z.shape[0]):
            z[t] = max(z[t], 0.0)


@njit(cache=True, nogil=True, fastmath=FASTMATH)
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


@njit(cache=True, nogil=True, fastmath=FASTMATH)
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


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _weigh(wd, w, d):
    for t in range(wd.shape[0]):
        wd[t] = w[t] * d[t]


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _mask(z, w, g, d):
    """z = w z + g where d is positive, else 0."""
    for t in range(z.shape[0]):
        z[t] = (z[t] * w[t] + g[t]) if d[t] > 0.0 else 0.0
