"""Files of a slide's tiles as the version before SQLite wrote them."""

import io
import json
import sqlite3
import struct
import zlib
from contextlib import closing

import numpy as np


def write_version_1(path):
    """Write a file of tiles again in its first format: a line of JSON, then records."""
    with closing(sqlite3.connect(path)) as connection:
        header, arrays = connection.execute("SELECT header, arrays FROM run").fetchone()
        tiles = connection.execute("SELECT number, boxes FROM tile ORDER BY number").fetchall()
    np.load(io.BytesIO(arrays), allow_pickle=False).close()
    first = {"kind": "napari-beerlanet tiles", "version": 1, **json.loads(header)}
    records = [(b"FITS", 0, arrays), *((b"TILE", number, boxes) for number, boxes in tiles)]
    frames = [
        struct.pack("<4sIQI", kind, number, len(data), zlib.crc32(data)) + data
        for kind, number, data in records
    ]
    path.write_bytes(json.dumps(first).encode() + b"\n" + b"".join(frames))
