"""The few loops where NumPy is not enough: one pass, no temporaries, GIL released.

Each has a plain counterpart in NumPy or torch that the tests compare it with. Colours of 8 bits
are numbered along the Morton curve (bits of R, G, B interleaved): similar colours lie near each
other in a table of 2**24 entries, so a photograph touches few pages and cache lines of it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

CODES = 1 << 24
"""Number of 8-bit RGB colours, and so of Morton codes."""

_GROUP = 64
BLOCK = 512
REORDER = {"reassoc", "contract", "nsz"}  # lets sums vectorise; NaN and inf keep their meaning


def _spread_bits() -> np.ndarray:
    value = np.arange(256, dtype=np.uint32)
    spread = np.zeros(256, np.uint32)
    for bit in range(8):
        spread |= ((value >> bit) & 1) << (3 * bit)
    return spread


SPREAD = _spread_bits()
"""(256,) uint32: bit k of the index moved to bit 3k."""


@njit(cache=True, nogil=True)
def count_pixels(pixels, skip_transparent, counts, touched):
    """Add (n, 3 or 4) uint8 pixels to `counts` (2**24,) uint32; mark groups in `touched`."""
    if skip_transparent:
        for i in range(pixels.shape[0]):
            if pixels[i, 3] != 0:
                code = (
                    (SPREAD[pixels[i, 0]] << 2) | (SPREAD[pixels[i, 1]] << 1) | SPREAD[pixels[i, 2]]
                )
                counts[code] += 1
                touched[code >> 6] = 1
    else:
        for i in range(pixels.shape[0]):
            code = (SPREAD[pixels[i, 0]] << 2) | (SPREAD[pixels[i, 1]] << 1) | SPREAD[pixels[i, 2]]
            counts[code] += 1
            touched[code >> 6] = 1


@njit(cache=True, nogil=True)
def count_codes(codes, counts, touched):
    """Add (n,) uint32 codes to `counts` (2**24,) uint32; mark groups in `touched` (2**18,)."""
    for i in range(codes.shape[0]):
        counts[codes[i]] += 1
        touched[codes[i] >> 6] = 1


@njit(cache=True, nogil=True)
def distinct(counts, touched, number):
    """Codes with a count, ascending, and their counts: (u,) uint32, (u,) int64.

    Leaves both tables zero, ready for the next image; or, to `number` them, `counts` with the row
    of each code.
    """
    total = 0
    for group in range(touched.shape[0]):
        if touched[group]:
            for code in range(group * _GROUP, (group + 1) * _GROUP):
                total += counts[code] > 0
    codes = np.empty(total, np.uint32)
    found = np.empty(total, np.int64)
    k = 0
    for group in range(touched.shape[0]):
        if touched[group]:
            for code in range(group * _GROUP, (group + 1) * _GROUP):
                if counts[code] > 0:
                    codes[k] = code
                    found[k] = counts[code]
                    counts[code] = k if number else 0
                    k += 1
            touched[group] = 0
    return codes, found


@njit(cache=True, nogil=True)
def merge_counts(codes_a, counts_a, codes_b, counts_b):
    """Union of two ascending code lists; counts of equal codes add up."""
    n = codes_a.shape[0] + codes_b.shape[0]
    codes = np.empty(n, codes_a.dtype)
    counts = np.empty(n, counts_a.dtype)
    i = j = k = 0
    while i < codes_a.shape[0] or j < codes_b.shape[0]:
        take_a = j >= codes_b.shape[0] or (i < codes_a.shape[0] and codes_a[i] <= codes_b[j])
        take_b = i >= codes_a.shape[0] or (j < codes_b.shape[0] and codes_b[j] <= codes_a[i])
        counts[k] = 0
        if take_a:
            codes[k] = codes_a[i]
            counts[k] += counts_a[i]
            i += 1
        if take_b:
            codes[k] = codes_b[j]
            counts[k] += counts_b[j]
            j += 1
        k += 1
    return codes[:k].copy(), counts[:k].copy()


@njit(cache=True, nogil=True)
def encode_pixels(pixels, codes):
    """Morton codes (n,) uint32 of (n, 3 or 4) uint8 pixels."""
    for i in range(pixels.shape[0]):
        codes[i] = (SPREAD[pixels[i, 0]] << 2) | (SPREAD[pixels[i, 1]] << 1) | SPREAD[pixels[i, 2]]


@njit(cache=True, nogil=True)
def decode_pixels(codes, colours):
    """Colours (n, 3) uint8 of (n,) uint32 Morton codes: the inverse of `encode_pixels`."""
    for i in range(codes.shape[0]):
        code = codes[i]
        red = green = blue = 0
        for bit in range(8):
            blue |= ((code >> (3 * bit)) & 1) << bit
            green |= ((code >> (3 * bit + 1)) & 1) << bit
            red |= ((code >> (3 * bit + 2)) & 1) << bit
        colours[i, 0] = red
        colours[i, 1] = green
        colours[i, 2] = blue


@njit(cache=True, nogil=True)
def encode_planes(planes, tolerance, codes):
    """Morton codes of (3, n) float32 planes in [0, 1]; False where one is no k/255.

    `tolerance` is how far from a whole grey level a value may lie, in grey levels.
    """
    for i in range(codes.shape[0]):
        code = np.uint32(0)
        for k in range(3):
            grey = planes[k, i] * np.float32(255.0)
            if not (-0.5 < grey < 255.5):  # also NaN
                return False
            level = np.uint32(grey + np.float32(0.5))
            if abs(np.float32(level) - grey) > tolerance:
                return False
            code |= SPREAD[level] << np.uint32(2 - k)
        codes[i] = code
    return True


@njit(cache=True, nogil=True)
def look_up_pixels(pixels, codes, index, table, planes):
    """planes[j, i] = table[row, j] with codes[row] the code of pixel i; False if there is none.

    `index` (2**24,) int32 has the row of each of the ascending `codes`, and anything elsewhere.
    """
    rows = np.empty(BLOCK, np.int64)
    for start in range(0, pixels.shape[0], BLOCK):
        stop = min(start + BLOCK, pixels.shape[0])
        for i in range(start, stop):
            code = (SPREAD[pixels[i, 0]] << 2) | (SPREAD[pixels[i, 1]] << 1) | SPREAD[pixels[i, 2]]
            row = index[code]
            if row < 0 or row >= codes.shape[0] or codes[row] != code:
                return False
            rows[i - start] = row
        look_up_rows(rows[: stop - start], table, planes[:, start:stop])
    return True


@njit(cache=True, nogil=True)
def look_up_rows(rows, table, planes):
    """planes[j, i] = table[rows[i], j]. Plane by plane in short runs: few open write streams."""
    n = rows.shape[0]
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for j in range(table.shape[1]):
            for i in range(start, stop):
                planes[j, i] = table[rows[i], j]


@njit(cache=True, nogil=True)
def scatter_add(rows, planes, table):
    """table[rows[i], j] += planes[j, i]: the transpose of `look_up_rows`."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(table.shape[1]):
            table[row, j] += planes[j, i]


@njit(cache=True, nogil=True, fastmath=REORDER)
def density_step(X, w, D, M, N, b, out, G, P, m, first, last):
    """out = max(0, Mᵀ D + Nᵀ X + b) and its weighted sums, for columns first … last − 1.

    X (c, u), w (u,), D (q, u) with q = r, or q = 0 while D is zero; M (q, r), N (c, r), b (r,).
    Adds to G (r, r), lower triangle, = out W outᵀ; P (c, r) = X W outᵀ; m (r,) = out w.
    """
    c = X.shape[0]
    r = M.shape[1]
    wd = np.empty(BLOCK)
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        n = stop - start
        for i in range(r):
            z = out[i, start:stop]
            z[:] = b[i]
            _add_rows(z, X, N, i, start)
            _add_rows(z, D, M, i, start)
            for t in range(n):
                z[t] = max(z[t], 0.0)
        for i in range(r):
            _weigh(wd[:n], w[start:stop], out[i, start:stop])
            m[i] += _total(wd[:n])
            for k in range(c):
                P[k, i] += _dot(wd[:n], X[k, start:stop])
            for j in range(i + 1):
                G[i, j] += _dot(wd[:n], out[j, start:stop])


@njit(cache=True, nogil=True, fastmath=REORDER)
def density_step_backward(X, w, D, M, out, g_out, gG, gP, gm, g_D, gM, gN, gb, first, last):
    """Gradients of `density_step` for its columns: fills g_D (q, u), adds to gM, gN, gb.

    g_out (r, u) is the gradient of `out`; gG (r, r) must be gradient plus its transpose.
    """
    c = X.shape[0]
    q, r = M.shape
    Mt = M.T.copy()
    g = np.empty((r, BLOCK))
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        n = stop - start
        for i in range(r):
            z = g[i, :n]
            z[:] = gm[i]
            _add_rows(z, X, gP, i, start)
            _add_rows(z, out, gG, i, start)
            _mask(z, w[start:stop], g_out[i, start:stop], out[i, start:stop])
            gb[i] += _total(z)
            for k in range(c):
                gN[k, i] += _dot(z, X[k, start:stop])
            for j in range(q):
                gM[j, i] += _dot(z, D[j, start:stop])
        for j in range(q):
            z = g_D[j, start:stop]
            z[:] = 0.0
            _add_rows(z, g, Mt, j, 0)


@njit(cache=True, nogil=True, fastmath=REORDER)
def _add_rows(z, A, E, i, start):
    """z += Σ_j E[j, i] A[j, start : start + n], four rows at a time to save loads and stores."""
    n = z.shape[0]
    stop = start + n
    rows = A.shape[0]
    j = 0
    while j + 4 <= rows:
        a0 = A[j, start:stop]
        a1 = A[j + 1, start:stop]
        a2 = A[j + 2, start:stop]
        a3 = A[j + 3, start:stop]
        e0, e1, e2, e3 = E[j, i], E[j + 1, i], E[j + 2, i], E[j + 3, i]
        for t in range(n):
            z[t] += e0 * a0[t] + e1 * a1[t] + e2 * a2[t] + e3 * a3[t]
        j += 4
    while j < rows:
        a0 = A[j, start:stop]
        e0 = E[j, i]
        for t in range(n):
            z[t] += e0 * a0[t]
        j += 1


@njit(cache=True, nogil=True, fastmath=REORDER)
def _weigh(wd, w, d):
    for t in range(wd.shape[0]):
        wd[t] = w[t] * d[t]


@njit(cache=True, nogil=True, fastmath=REORDER)
def _mask(z, w, g, d):
    """z = w z + g where d is positive, else 0."""
    for t in range(z.shape[0]):
        z[t] = (z[t] * w[t] + g[t]) if d[t] > 0.0 else 0.0


@njit(cache=True, nogil=True, fastmath=REORDER)
def _dot(a, b):
    total = 0.0
    for t in range(a.shape[0]):
        total += a[t] * b[t]
    return total


@njit(cache=True, nogil=True, fastmath=REORDER)
def _total(a):
    total = 0.0
    for t in range(a.shape[0]):
        total += a[t]
    return total
