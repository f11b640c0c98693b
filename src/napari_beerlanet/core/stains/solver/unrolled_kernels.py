"""Kernels of the unrolled solution: the one step of an iteration that touches every column.

Columns are taken in blocks that fit the cache. Inside a block all is done by two loops that fill
the processor's registers: `_add_rows`, a row as a combination of rows, and `_add_products`, the
products of rows with rows, sixteen at a time.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from napari_beerlanet.core.common.threads import njit

_FASTMATH = {"reassoc", "contract", "nsz"}  # lets sums vectorise; NaN and inf keep their meaning
_CACHE_BLOCK = 256
_MAX_LOOKS = 20_000  # some tens of microseconds for which another thread is waited for awake

CHUNK_COLUMNS = 8 * _CACHE_BLOCK
"""Columns that a thread takes at a time."""


@intrinsic
def _fetch_and_add(typing_context, address):
    """The int64 at an address (uintp), to which one is added, whatever other threads do."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(64)
        place = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(number, 1), "acq_rel")

    return types.int64(types.uintp), generate


@intrinsic
def _fetch(typing_context, address):
    """The int64 at an address (uintp), and with it all that was written before it was."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.uintp), generate


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def density_map(X, D, M, N, b, out, first, last):
    """out = max(0, Mᵀ D + Nᵀ X + b) for columns first … last − 1.

    X (c, u), D (q, u) with q = r, or q = 0 while D is zero; M (q, r), N (c, r), b (r,).
    """
    for start in range(first, last, _CACHE_BLOCK):
        _map_block(X, D, M, N, b, out, start, min(start + _CACHE_BLOCK, last))


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def density_step(X, w, D, M, N, b, a, A, out, G, P, m, first, last):
    """`density_map` and the result's sums weighted by w (u,), for columns first … last − 1.

    Adds to G (r, r) = out W outᵀ; P (c, r) = X W outᵀ; m (r,) = out w. Where M = diag(a) + A N,
    with a (r,) and A (r, c), giving them spares half of the map's products; a is (0,) elsewhere.
    """
    c = X.shape[0]
    r = M.shape[1]
    weighted = np.empty((r, _CACHE_BLOCK))
    X1 = np.ones((c + 1, _CACHE_BLOCK))  # X and a row of ones: P and m in one go
    square = np.zeros((r, r))
    P1 = np.zeros((r, c + 1))
    factored = a.shape[0] > 0
    rest, A4, N3 = _pad_factors(A, N)
    for start in range(first, last, _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, last)
        n = stop - start
        _copy_block(X, start, stop, X1)
        if factored:
            _map_rest_block(X1, w, D, a, A4, N3, b, out, weighted, rest, start, stop)
        else:
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
def unroll_columns(
    X, w, weight, mean, S0, lam, gamma, unit, Ds, rooms, no_D, no_M, no_a,
    claimed, finished, part_G, part_P, part_m, first,
    Ms, Ns, bs, Ss, x0s, As, raw_G, raw_P, raw_m, Gs, Ps, ms,
):  # fmt: skip
    """All iterations of `unroll.unroll` on columns X (c, u) of weight w from S0 (c, r).

    Iteration k writes D to Ds[rooms[k]], (r, u), its map to Ms[k], Ns[k], bs[k], what it leaves to
    Ss[k], x0s[k], As[k] and Gs[k], Ps[k], ms[k], and the sums of the unscaled D to raw_G[k],
    raw_P[k], raw_m[k]. no_D (0, u), no_M (0, r) and no_a (0,) stand for D = 0.

    Any number of threads may call this at once, each with arrays of its own from Ms on, and all end
    with the same in them. They share the columns: claimed[k] counts the chunks of `CHUNK_COLUMNS`
    that were begun in iteration k, finished[k] those that are done, each of which leaves its sums
    in part_G[k], part_P[k] and part_m[k]. All four start at zero. A thread that is late finds
    nothing left to do. Starts with iteration `first` and returns how many are done: not all if
    another thread does not finish what it has taken soon. Call it again from there.
    """
    c, r = S0.shape
    A = np.zeros((r, c))
    chunks = part_m.shape[1]
    for k in range(first, rooms.shape[0]):
        S = S0 if k == 0 else Ss[k - 1]
        x0, M, N, b, out = x0s[k], Ms[k], Ns[k], bs[k], Ds[rooms[k]]
        for i in range(c):
            x0[i] = mean[i]
            if k > 0 and weight > 0.0:
                moved = 0.0
                for j in range(r):
                    moved += S[i, j] * ms[k - 1, j]
                x0[i] += moved / weight
        square = 0.0
        for i in range(c):
            for j in range(r):
                square += S[i, j] * S[i, j]
        tau = 1.0 / square if square > 0.0 else 0.0
        a = As[k]  # until it is known, the ℓ₂ prox's threshold
        for j in range(r):
            along = length = 0.0
            for i in range(c):
                along += x0[i] * S[i, j]
                length += S[i, j] * S[i, j]
                N[i, j] = -tau * S[i, j]
            a[j] = lam * tau * np.sqrt(length)
            b[j] = tau * along - gamma * a[j]
        if k == 0:
            D, M_k, a_before = no_D, no_M, no_a
        else:
            D, M_k, a_before = Ds[rooms[k - 1]], M, As[k - 1]
            for j in range(r):
                for i in range(c):
                    A[j, i] = a_before[j] * S[i, j]
                for n in range(r):
                    product = 0.0
                    for i in range(c):
                        product += S[i, j] * S[i, n]
                    M[j, n] = a_before[j] * ((1.0 if j == n else 0.0) - tau * product)
        while True:
            chunk = _fetch_and_add(claimed.ctypes.data + 8 * k)
            if chunk >= chunks:
                break
            sums = part_G[k, chunk], part_P[k, chunk], part_m[k, chunk]
            start = chunk * CHUNK_COLUMNS
            stop = min(start + CHUNK_COLUMNS, w.size)
            density_step(X, w, D, M_k, N, b, a_before, A, out, *sums, start, stop)
            _fetch_and_add(finished.ctypes.data + 8 * k)
        looks = 0
        while _fetch(finished.ctypes.data + 8 * k) < chunks:
            looks += 1
            if looks > _MAX_LOOKS:
                return k
        raw_G[k], raw_P[k], raw_m[k] = 0.0, 0.0, 0.0
        for chunk in range(chunks):  # in this order, so that threads do not change the sums
            for j in range(r):
                for n in range(r):
                    raw_G[k, j, n] += part_G[k, chunk, j, n]
                for i in range(c):
                    raw_P[k, i, j] += part_P[k, chunk, i, j]
                raw_m[k, j] += part_m[k, chunk, j]
        for j in range(r):
            a[j] = _shrink(np.sqrt(raw_G[k, j, j]), a[j])
        G, P, m, S1 = Gs[k], Ps[k], ms[k], Ss[k]
        for j in range(r):
            for n in range(r):
                G[j, n] = a[j] * raw_G[k, j, n] * a[n]
            for i in range(c):
                P[i, j] = raw_P[k, i, j] * a[j]
            m[j] = raw_m[k, j] * a[j]
        square = 0.0
        for j in range(r):
            square += G[j, j]
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
        if unit:
            _rescale_to_unit(S1, a, G, P, m)
    return rooms.shape[0]


@njit(cache=True, nogil=True)
def iteration_backward(
    X, w, weight, S, x0, a_before, m_before, M, raw_G, raw_P, raw_m, lam, gamma, unit,
    D, out, g_D, g_D_before, gS, ga, gx0, gm, total,
):  # fmt: skip
    """One iteration of `unroll_backward.Tape.backward`, the names of which it has.

    S, a_before, m_before and D are of before the iteration; a_before (0,), M (0, r) and D (0, u) of
    the first. Gradients gS (c, r), ga (r,), gx0 (c,), gm (r,), and `total` of λ and γ, are updated
    in place; that of D goes to g_D_before, which may be g_D.
    """
    c, r = S.shape
    square = 0.0
    size1, threshold = np.empty(r), np.empty(r)
    for j in range(r):
        length = 0.0
        for i in range(c):
            length += S[i, j] * S[i, j]
        square += length
        size1[j] = np.sqrt(length)
    tau1 = 1.0 / square if square > 0.0 else 0.0

    # The iteration once more, without its columns.
    size, a, m = np.empty(r), np.empty(r), np.empty(r)
    G, P = np.empty((r, r)), np.empty((c, r))
    for j in range(r):
        threshold[j] = lam * tau1 * size1[j]
        size[j] = np.sqrt(raw_G[j, j])
        a[j] = _shrink(size[j], threshold[j])
        m[j] = raw_m[j] * a[j]
        for i in range(c):
            P[i, j] = raw_P[i, j] * a[j]
    square = 0.0
    for j in range(r):
        for n in range(r):
            G[j, n] = a[j] * raw_G[j, n] * a[n]
        square += G[j, j]
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
    gsG, gsP = np.empty((r, r)), np.empty((c, r))
    for i in range(c):
        for j in range(r):
            gsP[i, j] = -tau2 * gT[i, j]
    for j in range(r):
        root = np.sqrt(G[j, j])
        for n in range(r):
            gsG[j, n] = 0.0
            for i in range(c):
                gsG[j, n] += S[i, j] * gsP[i, n]
        gsG[j, j] += (g_penalty[j] / (2.0 * root) if root > 0.0 else 0.0) - tau2 * tau2 * g_tau2
        gm[j] += gamma * g_penalty[j]
        for i in range(c):
            gm[j] -= x0[i] * gsP[i, j]
    for i in range(c):
        for j in range(r):
            gS[i, j] = gT[i, j]
            for n in range(r):
                gS[i, j] += gsP[i, n] * G[n, j]
            gx0[i] -= gsP[i, j] * m[j]

    # Back through the scales of D.
    g_size, g_threshold = np.empty(r), np.empty(r)
    for j in range(r):
        onto = ga[j] + gm[j] * raw_m[j]
        for n in range(r):
            onto += a[n] * (gsG[n, j] * raw_G[n, j] + gsG[j, n] * raw_G[j, n])
        for i in range(c):
            onto += gsP[i, j] * raw_P[i, j]
        alive = onto / size[j] if size[j] > threshold[j] else 0.0
        g_size[j] = alive - (onto * a[j] / size[j] if size[j] > 0.0 else 0.0)
        g_threshold[j] = -alive
    both = np.empty((r, r))
    for j in range(r):
        for n in range(r):
            both[j, n] = a[j] * a[n] * (gsG[j, n] + gsG[n, j])
        both[j, j] += g_size[j] / size[j] if size[j] > 0.0 else 0.0
    for j in range(r):
        gm[j] *= a[j]
        for i in range(c):
            gsP[i, j] *= a[j]

    # Back through the columns, then through the map.
    q = M.shape[0]
    gM, gN, gb = np.zeros((q, r)), np.zeros((c, r)), np.zeros(r)
    density_step_backward(X, w, D, M, out, g_D, both, gsP, gm, g_D_before, gM, gN, gb, 0, w.size)
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
            g_tau1 -= a_before[j] * gM[j, n] * product
            for i in range(c):
                more[i, n] -= S[i, j] * a_before[j] * gM[j, n]
                more[i, j] -= S[i, n] * a_before[j] * gM[j, n]
    for i in range(c):
        for j in range(r):
            gS[i, j] += tau1 * more[i, j] - 2.0 * tau1 * tau1 * g_tau1 * S[i, j]
            gx0[i] += tau1 * S[i, j] * gb[j]
    gm[:] = 0.0
    if q > 0 and weight > 0.0:  # x₀ = mean + S m / weight
        for i in range(c):
            for j in range(r):
                gS[i, j] += gx0[i] / weight * m_before[j]
                gm[j] += gx0[i] / weight * S[i, j]
    gx0[:] = 0.0


@njit(cache=True, nogil=True)
def _rescale_to_unit(S, a, G, P, m):
    """Columns of S to unit length, a and the sums of a ⊙ D to match, in place."""
    c, r = S.shape
    for j in range(r):
        length = 0.0
        for i in range(c):
            length += S[i, j] * S[i, j]
        length = np.sqrt(length)
        for i in range(c):
            S[i, j] = S[i, j] / length if length > 0.0 else 0.0
            P[i, j] *= length
        a[j] *= length
        m[j] *= length
        for other in range(r):
            G[j, other] *= length
            G[other, j] *= length


@njit(cache=True, nogil=True)
def _shrink(norm, threshold):
    """The factor of the ℓ₂ prox, as `unroll.prox_l2`."""
    return max(norm - threshold, 0.0) / norm if norm > 0.0 else 0.0


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


@njit(cache=True, nogil=True)
def _pad_factors(A, N):
    """Room for the rest of a block, and A (r, c), N (c, r) with zeros up to whole fours and threes.

    So `_map_rest_block` has no remainders to look after.
    """
    c, r = N.shape
    threes = (c + 2) // 3 * 3
    A4, N3 = np.zeros(((r + 3) // 4 * 4, threes)), np.zeros((threes, r))
    for k in range(c):
        for j in range(r):
            N3[k, j] = N[k, j]
            if A.shape[0] > 0:
                A4[j, k] = A[j, k]
    return np.zeros((threes, _CACHE_BLOCK)), A4, N3


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _map_rest_block(X1, w, D, a, A4, N3, b, out, weighted, rest, start, stop):
    """`_map_block` and `_weigh` by way of `rest` = X + Aᵀ D, which the densities do not explain.

    X1 holds the block's columns of X; A4, N3 and `rest` are as `_pad_factors` has them.
    """
    n, c, r = stop - start, X1.shape[0] - 1, a.shape[0]
    threes = N3.shape[0]
    for k in range(c):
        for t in range(n):
            rest[k, t] = X1[k, t]
    for k in range(0, threes, 3):
        r0, r1, r2 = rest[k, :n], rest[k + 1, :n], rest[k + 2, :n]
        for j in range(0, r, 4):
            d0, d1 = D[j, start:stop], D[min(j + 1, r - 1), start:stop]
            d2, d3 = D[min(j + 2, r - 1), start:stop], D[min(j + 3, r - 1), start:stop]
            a00, a01, a02 = A4[j, k], A4[j, k + 1], A4[j, k + 2]
            a10, a11, a12 = A4[j + 1, k], A4[j + 1, k + 1], A4[j + 1, k + 2]
            a20, a21, a22 = A4[j + 2, k], A4[j + 2, k + 1], A4[j + 2, k + 2]
            a30, a31, a32 = A4[j + 3, k], A4[j + 3, k + 1], A4[j + 3, k + 2]
            for t in range(n):
                x0, x1, x2, x3 = d0[t], d1[t], d2[t], d3[t]
                r0[t] += a00 * x0 + a10 * x1 + a20 * x2 + a30 * x3
                r1[t] += a01 * x0 + a11 * x1 + a21 * x2 + a31 * x3
                r2[t] += a02 * x0 + a12 * x1 + a22 * x2 + a32 * x3
    weights = w[start:stop]
    for i in range(r):
        z, d, wz = out[i, start:stop], D[i, start:stop], weighted[i, :n]
        for t in range(n):
            wz[t] = d[t]
        scale, shift = a[i], b[i]
        for k in range(0, threes, 3):
            r0, r1, r2 = rest[k, :n], rest[k + 1, :n], rest[k + 2, :n]
            n0, n1, n2 = N3[k, i], N3[k + 1, i], N3[k + 2, i]
            for t in range(n):
                wz[t] = shift + scale * wz[t] + n0 * r0[t] + n1 * r1[t] + n2 * r2[t]
            scale, shift = 1.0, 0.0
        for t in range(n):
            value = max(wz[t], 0.0)
            z[t] = value
            wz[t] = weights[t] * value


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
