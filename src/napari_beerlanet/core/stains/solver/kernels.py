"""Kernels for colours: counting, encoding and look-up in one pass, no temporaries, GIL released.

Each has a plain counterpart in NumPy or torch that the tests compare it with. Colours of 8 bits
are numbered along the Morton curve (bits of R, G, B interleaved): similar colours lie near each
other in a table of 2**24 entries, so a photograph touches few pages and cache lines of it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from napari_beerlanet.core.common.threads import njit

CODE_COUNT = 1 << 24
"""Number of 8-bit RGB colours, and so of Morton codes."""

_GROUP_SIZE = 64
_CACHE_BLOCK = 512
_FASTMATH = {"reassoc", "contract", "nsz"}  # lets sums vectorise; NaN and inf keep their meaning


def _spread_bits() -> np.ndarray:
    value = np.arange(256, dtype=np.uint32)
    spread = np.zeros(256, np.uint32)
    for bit in range(8):
        spread |= ((value >> bit) & 1) << (3 * bit)
    return spread


SPREAD_BITS = _spread_bits()
"""(256,) uint32: bit k of the index moved to bit 3k."""


@njit(cache=True, nogil=True)
def count_pixels(pixels, skip_transparent, counts, touched):
    """Add (n, 3 or 4) uint8 pixels to `counts` (2**24,) uint32; mark groups in `touched`."""
    if skip_transparent:
        for i in range(pixels.shape[0]):
            if pixels[i, 3] != 0:
                code = (
                    (SPREAD_BITS[pixels[i, 0]] << 2)
                    | (SPREAD_BITS[pixels[i, 1]] << 1)
                    | SPREAD_BITS[pixels[i, 2]]
                )
                counts[code] += 1
                touched[code >> 6] = 1
    else:
        for i in range(pixels.shape[0]):
            code = (
                (SPREAD_BITS[pixels[i, 0]] << 2)
                | (SPREAD_BITS[pixels[i, 1]] << 1)
                | SPREAD_BITS[pixels[i, 2]]
            )
            counts[code] += 1
            touched[code >> 6] = 1


@njit(cache=True, nogil=True)
def drain_counts(counts, touched):
    """Codes with a count, ascending, and their counts: (u,) uint32, (u,) int64.

    Leaves both tables zero, ready for the next image.
    """
    eights = touched.view(np.uint64)  # most groups of most images are empty
    total = 0
    for eight in range(eights.shape[0]):
        if eights[eight]:
            for group in range(8 * eight, 8 * eight + 8):
                if touched[group]:
                    for code in range(group * _GROUP_SIZE, (group + 1) * _GROUP_SIZE):
                        total += counts[code] > 0
    codes = np.empty(total + 1, np.uint32)  # one more: what has no count is written over
    numbers = np.empty(total + 1, np.int64)
    k = 0
    for eight in range(eights.shape[0]):
        if eights[eight]:
            for group in range(8 * eight, 8 * eight + 8):
                if touched[group]:
                    for code in range(group * _GROUP_SIZE, (group + 1) * _GROUP_SIZE):
                        codes[k] = code
                        numbers[k] = counts[code]
                        k += counts[code] > 0
                        counts[code] = 0
            eights[eight] = 0
    return codes[:total], numbers[:total]


@njit(cache=True, nogil=True)
def count_rgb_words(words, counts):
    """Add RGB pixels, four in each three uint32 `words`, to `counts` at R + 256 G + 65536 B.

    As bytes stand in memory this needs only shifts, which is twice as fast as Morton codes.
    """
    one, colour = np.uint32(1), np.uint32(0xFFFFFF)
    for k in range(words.shape[0] // 3):
        at = np.uint64(3 * k)  # unsigned: no index is looked at for being negative
        a, b, c = words[at], words[at + np.uint64(1)], words[at + np.uint64(2)]
        counts[a & colour] += one
        counts[((a >> np.uint32(24)) | (b << np.uint32(8))) & colour] += one
        counts[((b >> np.uint32(16)) | (c << np.uint32(16))) & colour] += one
        counts[c >> np.uint32(8)] += one


@njit(cache=True, nogil=True)
def count_rgba_words(words, counts):
    """Add RGBA pixels, one in each of the uint32 `words`, unless they are transparent."""
    for word in words:
        if word >> np.uint32(24):
            counts[word & np.uint32(0xFFFFFF)] += np.uint32(1)


@njit(cache=True, nogil=True)
def drain_colours(table, colours, counts):
    """Move what such a table holds into `colours` (n, 3) and `counts` (n,); returns how many.

    Leaves the table zero.
    """
    number = 0
    for place in range(table.shape[0]):
        if table[place]:
            colours[number, 0] = place & 255
            colours[number, 1] = place >> 8 & 255
            colours[number, 2] = place >> 16
            counts[number] = table[place]
            table[place] = 0
            number += 1
    return number


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
        codes[i] = (
            (SPREAD_BITS[pixels[i, 0]] << 2)
            | (SPREAD_BITS[pixels[i, 1]] << 1)
            | SPREAD_BITS[pixels[i, 2]]
        )


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

    `tolerance` is how far from a whole grey level a value may lie, in grey levels. No branches, no
    table: so it vectorises.
    """
    whole = True
    for i in range(codes.shape[0]):
        code = np.uint32(0)
        for k in range(3):
            grey = planes[k, i] * np.float32(255.0)
            inside = grey if grey > np.float32(0.0) else np.float32(0.0)  # also NaN
            inside = inside if inside < np.float32(255.0) else np.float32(255.0)
            level = np.int32(inside + np.float32(0.5))
            whole &= abs(np.float32(level) - grey) <= tolerance
            bits = np.uint32(level)
            bits = (bits | (bits << np.uint32(8))) & np.uint32(0x00F00F)
            bits = (bits | (bits << np.uint32(4))) & np.uint32(0x0C30C3)
            bits = (bits | (bits << np.uint32(2))) & np.uint32(0x249249)
            code |= bits << np.uint32(2 - k)
        codes[i] = code
    return whole


@njit(cache=True, nogil=True)
def unique_codes(codes):
    """Distinct codes (u,) uint32, ascending, counts (u,) int64, and each code's row (n,) int32.

    `codes` (n,) uint32 below 2**24. Counted in groups of 64 neighbours, only of those that occur:
    a photograph's fit the cache.
    """
    group = np.zeros(CODE_COUNT >> 6, np.int32)
    touched = np.zeros(CODE_COUNT >> 12, np.uint8)  # saves a small image from looking at all groups
    for i in range(codes.shape[0]):
        group[codes[i] >> 6] = 1
        touched[codes[i] >> 12] = 1
    groups = 0
    for part in range(touched.shape[0]):
        if touched[part]:
            for k in range(part * _GROUP_SIZE, (part + 1) * _GROUP_SIZE):
                if group[k]:
                    group[k] = groups
                    groups += 1
    table = np.zeros(groups * _GROUP_SIZE, np.int32)
    for i in range(codes.shape[0]):
        table[group[codes[i] >> 6] * _GROUP_SIZE + (codes[i] & 63)] += 1
    u = 0
    for k in range(table.shape[0]):
        u += table[k] > 0
    distinct = np.empty(u, np.uint32)
    counts = np.empty(u, np.int64)
    rows = np.empty(codes.shape[0], np.int32)
    u = 0
    for k in range(table.shape[0]):
        if table[k] > 0:
            counts[u] = table[k]
            table[k] = u
            u += 1
    for i in range(codes.shape[0]):
        row = table[group[codes[i] >> 6] * _GROUP_SIZE + (codes[i] & 63)]
        rows[i] = row
        distinct[row] = codes[i]
    return distinct, counts, rows


@intrinsic
def _transpose_eight(typing_context, source, places, target, distance):
    """Eight rows of eight float32 to eight planes: LLVM's shuffles, as loops become gathers.

    All are uintp: addresses of a table, of eight uint64 places of rows in it, and of an entry of
    the first plane; and the number of entries from one plane to the next.
    """

    def generate(context, builder, signature, arguments):
        number, four, short = ir.IntType(64), ir.FloatType(), ir.IntType(32)
        eight = ir.VectorType(four, 8)
        table, places, plane, distance = arguments
        table, plane = (builder.inttoptr(a, four.as_pointer()) for a in (table, plane))
        places = builder.inttoptr(places, number.as_pointer())

        def shuffled(a, b, order):
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(short, 8), order))

        rows = []
        for k in range(8):
            place = builder.load(builder.gep(places, [ir.Constant(number, k)]))
            address = builder.gep(table, [place])
            rows.append(builder.load(builder.bitcast(address, eight.as_pointer()), align=4))
        for apart, *orders in _EXCHANGES:
            after = list(rows)
            for k in (k for k in range(8) if not k & apart):
                for at, order in zip((k, k + apart), orders, strict=True):
                    after[at] = shuffled(rows[k], rows[k + apart], order)
            rows = after
        for k, row in enumerate(rows):
            address = builder.gep(plane, [builder.mul(distance, ir.Constant(number, k))])
            builder.store(row, builder.bitcast(address, eight.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 4), generate


# Blocks on either side of the diagonal change places: of 4 × 4, of 2 × 2, of single entries. Each
# is how far apart two rows are, and what each of the two takes of both (8 … 15 are the second's).
_EXCHANGES = (
    (4, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    (2, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    (1, [0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]),
)


@njit(cache=True, nogil=True)
def _copy_entries(place, n, table, which, planes, first):
    """planes[j, first + i] = entry j of the row that starts at place[i], for i < n, j of `which`.

    Plane by plane in short runs, so that few write streams are open; eight planes side by side at
    a time.
    """
    flat = table.reshape(-1)
    k = 0
    while k < which.shape[0]:
        j = which[k]
        done = 0
        if k + 8 <= which.shape[0] and which[k + 7] == j + 7 and table.itemsize == 4:
            done = n // 8 * 8
            source = table.ctypes.data + 4 * j
            target = planes.ctypes.data + 4 * (j * planes.shape[1] + first)
            for i in range(0, done, 8):
                places = place.ctypes.data + 8 * i
                _transpose_eight(source, places, target + 4 * i, planes.shape[1])
            last = k + 8
        else:
            last = k + 1
        while k < last:
            plane = planes[which[k], first : first + n]
            at = np.uint64(which[k])  # unsigned: no index is looked at for being negative
            for i in range(done, n):
                plane[i] = flat[place[i] + at]
            k += 1


@njit(cache=True, nogil=True)
def look_up_pixels(pixels, codes, index, table, which, planes, first):
    """planes[j, first + i] = table[row, j], codes[row] the code of pixel i; False if there is none.

    `index` (2**24,) int32 has the row of each of the ascending `codes`, and anything elsewhere.
    Only the planes j of `which` (k,) int64, ascending, are written. `table` and `planes` are
    float32 in C order.
    """
    r = np.uint64(table.shape[1])
    place = np.empty(_CACHE_BLOCK, np.uint64)
    for start in range(0, pixels.shape[0], _CACHE_BLOCK):
        stop = min(start + _CACHE_BLOCK, pixels.shape[0])
        for i in range(start, stop):
            code = (
                (SPREAD_BITS[pixels[i, 0]] << 2)
                | (SPREAD_BITS[pixels[i, 1]] << 1)
                | SPREAD_BITS[pixels[i, 2]]
            )
            row = index[code]
            if row < 0 or row >= codes.shape[0] or codes[row] != code:
                return False
            place[i - start] = np.uint64(row) * r
        _copy_entries(place, stop - start, table, which, planes, first + start)
    return True


@njit(cache=True, nogil=True)
def replace_pixels(pixels, codes, index, table, out):
    """out[i, :3] = table[row] with codes[row] the code of pixel i; False if there is none.

    `pixels` and `out` (n, 3 or 4), `table` (u, 3) uint8; `index` as for `look_up_pixels`.
    """
    for i in range(pixels.shape[0]):
        code = (
            (SPREAD_BITS[pixels[i, 0]] << 2)
            | (SPREAD_BITS[pixels[i, 1]] << 1)
            | SPREAD_BITS[pixels[i, 2]]
        )
        row = index[code]
        if row < 0 or row >= codes.shape[0] or codes[row] != code:
            return False
        place = np.uint64(row)
        out[i, 0] = table[place, 0]
        out[i, 1] = table[place, 1]
        out[i, 2] = table[place, 2]
    return True


@njit(cache=True, nogil=True)
def look_up_colours(pixels, table, out):
    """out[i, :3] = the colour in `table` (2**24,) uint32 at the code of pixel i; False if it is 0.

    A colour is R + 256 G + 65536 B + 2**24: what is 0 was never set. `pixels`, `out` (n, 3 or 4).
    """
    for i in range(pixels.shape[0]):
        colour = table[
            (SPREAD_BITS[pixels[i, 0]] << 2)
            | (SPREAD_BITS[pixels[i, 1]] << 1)
            | SPREAD_BITS[pixels[i, 2]]
        ]
        if colour == 0:
            return False
        out[i, 0] = colour & np.uint32(255)
        out[i, 1] = (colour >> np.uint32(8)) & np.uint32(255)
        out[i, 2] = (colour >> np.uint32(16)) & np.uint32(255)
    return True


@njit(cache=True, nogil=True)
def look_up_rows(rows, table, which, planes, first):
    """planes[j, first + i] = table[rows[i], j], for j of `which`: see `look_up_pixels`."""
    r = np.uint64(table.shape[1])
    place = np.empty(_CACHE_BLOCK, np.uint64)
    for start in range(0, rows.shape[0], _CACHE_BLOCK):
        n = min(_CACHE_BLOCK, rows.shape[0] - start)
        for i in range(n):
            place[i] = np.uint64(rows[start + i]) * r
        _copy_entries(place, n, table, which, planes, first + start)


@njit(cache=True, nogil=True)
def scatter_add(rows, planes, table):
    """table[rows[i], j] += planes[j, i]: the transpose of `look_up_rows`."""
    for i in range(rows.shape[0]):
        row = np.uint64(rows[i])
        for j in range(table.shape[1]):
            table[row, j] += planes[j, i]


@njit(cache=True, nogil=True)
def scale_to_rows(table, scale, entries):
    """entries[i, j] = scale[j] table[j, i]: a table (r, u) as rows to look up, (u, r)."""
    r, u = table.shape
    for start in range(0, u, _GROUP_SIZE):
        for j in range(r):
            for i in range(start, min(start + _GROUP_SIZE, u)):
                entries[i, j] = table[j, i] * scale[j]


@njit(cache=True, nogil=True)
def scale_to_rows_backward(g_entries, table, scale, g_table, g_scale):
    """Gradients of `scale_to_rows`: fills g_table (r, u) and g_scale (r,).

    g_entries (parts, u, r) is summed over its parts on the way.
    """
    parts, u, r = g_entries.shape
    g_scale[:] = 0.0
    for start in range(0, u, _GROUP_SIZE):
        stop = min(start + _GROUP_SIZE, u)
        for j in range(r):
            for i in range(start, stop):
                g = g_entries[0, i, j]
                for k in range(1, parts):
                    g += g_entries[k, i, j]
                g_table[j, i] = g * scale[j]
                g_scale[j] += g * table[j, i]


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def mix_to_rows(X, D, scale, weight, bias, light, grey, padding, entries, slopes):
    """entries[i, j] = f(weight[j] · (scale ⊙ D[:, i]) + bias[j]), (u, m) float32, to look up.

    f(z) = exp(min(z, 1)) if `light`, else z; slopes (m, u) are its derivatives. Columns X (c, u)
    within 0.001 of `grey` in all channels are padding: their entries are `padding`, their slopes 0.
    """
    (r, u), m = D.shape, weight.shape[0]
    z, counted = np.empty(_GROUP_SIZE), np.empty(_GROUP_SIZE)
    for start in range(0, u, _GROUP_SIZE):
        n = min(start + _GROUP_SIZE, u) - start
        counted[:] = 0.0
        for c in range(X.shape[0]):
            for t in range(n):
                counted[t] += 1.0 if abs(X[c, start + t] - grey) >= 1e-3 else 0.0
        for j in range(m):
            z[:] = bias[j]
            for k in range(r):
                factor = weight[j, k] * scale[k]
                for t in range(n):
                    z[t] += factor * D[k, start + t]
            for t in range(n):
                value = np.exp(min(z[t], 1.0)) if light else z[t]
                slope = (value if z[t] <= 1.0 else 0.0) if light else 1.0
                entries[start + t, j] = value if counted[t] > 0.0 else padding
                slopes[j, start + t] = slope if counted[t] > 0.0 else 0.0


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def mix_to_rows_backward(g_entries, slopes, D, scale, weight, g_D, products, g_bias):
    """Gradients of `mix_to_rows`: fills g_D (r, u), products (m, r) and g_bias (m,).

    g_entries (parts, u, m) is summed over its parts on the way. The gradients of `weight` and
    `scale` are products ⊙ scale, and the sums over m of products ⊙ weight.
    """
    parts, u, m = g_entries.shape
    r = D.shape[0]
    g = np.empty((m, _GROUP_SIZE))
    products[:] = 0.0
    g_bias[:] = 0.0
    for start in range(0, u, _GROUP_SIZE):
        n = min(start + _GROUP_SIZE, u) - start
        for j in range(m):
            total = 0.0
            for t in range(n):
                value = g_entries[0, start + t, j]
                for k in range(1, parts):
                    value += g_entries[k, start + t, j]
                g[j, t] = value * slopes[j, start + t]
                total += g[j, t]
            g_bias[j] += total
        for k in range(r):
            row, out = D[k, start : start + n], g_D[k, start : start + n]
            out[:] = 0.0
            for j in range(m):
                factor, total = weight[j, k] * scale[k], 0.0
                for t in range(n):
                    out[t] += factor * g[j, t]
                    total += g[j, t] * row[t]
                products[j, k] += total
