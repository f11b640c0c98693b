"""Build napari's list of rectangles from a template, a hundred times faster than one by one.

napari builds a rectangle in 0.1 ms: a second for 10 000, and the window stands still meanwhile.
All our boxes are the same rectangle at other places, so one that napari has built serves as the
template of all, and only numbers are filled in. This leans on napari's internals: on the first use
the result is compared with napari's own, and where they differ in anything (another version),
`fast_shapes_supported` is false.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

BoxCorners = npt.NDArray[np.float32]
"""(n, 4, D): corners of boxes as napari orders them, first rows and columns ascending."""

Slicing = tuple[tuple[int, ...], list[float]]
"""The order of the axes, and where those that are not displayed are sliced."""

_CHECK_LOCK = threading.Lock()
_replaced: list[tuple[Any, str, Any]] = []  # objects, names, and what they had by them


def fast_shapes_supported() -> bool:
    """Whether lists built here are the same as napari's. The first call compiles, for seconds."""
    with _CHECK_LOCK:
        return _matches_napari()


def warm_up_shapes() -> None:
    """Compile what drawing shapes needs in a thread, before it is needed."""
    threading.Thread(
        target=fast_shapes_supported, name="napari-beerlanet: shapes", daemon=True
    ).start()


def triangulate_in_python() -> None:
    """Until `triangulate_compiled`, napari triangulates shapes without numba.

    For as long as another process compiles: napari would do that on the GUI thread, for seconds.
    """
    with suppress(ImportError, AttributeError):  # another version of napari
        from napari.layers.shapes import _accelerated_triangulate_dispatch as dispatch
        from napari.layers.shapes import _accelerated_triangulate_python as python

        if _replaced:
            return
        for name in ("CACHE_WARMUP", "UNIVERSAL_CACHE_WARMUP"):
            _replace(dispatch, name, True)
        names = (*dispatch.ALWAYS_NUMBA, *dispatch.SWAPPABLE_NUMBA)
        plain = {name: getattr(python, f"{name}_py") for name in names}
        for path, module in list(sys.modules.items()):
            users = path.startswith("napari.layers.shapes.") and not path.endswith("_numba")
            for name in names if users else ():
                if hasattr(getattr(module, name, None), "py_func"):  # a function of numba's
                    _replace(module, name, plain[name])


def triangulate_compiled() -> None:
    """Undo `triangulate_in_python`."""
    while _replaced:
        setattr(*_replaced.pop())
        _template_rectangle.cache_clear()


def _replace(thing: Any, name: str, value: Any) -> None:
    _replaced.append((thing, name, getattr(thing, name)))
    setattr(thing, name, value)


@lru_cache(maxsize=1)
def _matches_napari() -> bool:
    import pandas  # noqa: F401  # a layer's table needs it, and loading it takes a second

    try:
        from napari.layers.shapes._accelerated_triangulate_dispatch import warmup_numba_cache

        warmup_numba_cache()
        return all(_matches_napari_for(order) for order in ((0, 1), (0, 1, 2)))
    except Exception:  # whatever another version has instead
        return False


def _matches_napari_for(order: tuple[int, ...]) -> bool:
    """Whether three boxes are built as napari builds them."""
    from napari.layers.shapes._shape_list import ShapeList
    from napari.layers.shapes._shapes_models import Rectangle

    corner = np.array([[0, 0], [0, 7], [5, 7], [5, 0]], np.float32)
    planar = np.stack([corner + shift for shift in (0, 2.25, 40)])
    leading = np.full((3, 4, len(order) - 2), 4, np.float32)
    corners = np.concatenate([leading, planar], axis=2).astype(np.float32)
    colours = np.array([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0.5]], np.float32)
    theirs = ShapeList(ndisplay=2)
    theirs.slice_key = [4.0] * (len(order) - 2)
    options: dict[str, Any] = {"edge_width": 1.5, "z_index": 0, "dims_order": order}
    shapes = [Rectangle(box, **options, ndisplay=2) for box in corners]
    theirs.add(shapes, face_color=np.zeros((3, 4)), edge_color=colours, z_refresh=False)
    theirs._update_z_order()
    ours = build_shape_list(corners, colours, 1.5, (order, [4.0] * (len(order) - 2)))
    built = _equal(ours, theirs)
    theirs.edge_color = colours[::-1].copy()
    return built and recolour_shape_list(ours, colours[::-1]) and _equal(ours, theirs)


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two objects of napari's are deeply equal."""
    if isinstance(ours, np.ndarray) or isinstance(theirs, np.ndarray):
        return bool(np.shape(ours) == np.shape(theirs) and np.allclose(ours, theirs))
    if isinstance(ours, (list, tuple)) and len(ours) == len(theirs):
        return all(map(_equal, ours, theirs))
    if hasattr(ours, "__dict__") and type(ours) is type(theirs):
        mine, others = vars(ours), vars(theirs)
        return mine.keys() == others.keys() and all(_equal(mine[k], others[k]) for k in mine)
    return bool(ours == theirs)


def build_shape_list(
    corners: BoxCorners, colours: npt.NDArray[Any], width: float, slicing: Slicing
) -> Any:
    """napari's list of rectangles, with edges in the colours (n, 4) and transparent faces."""
    from napari.layers.shapes._shape_list import ShapeList

    order, slice_key = slicing
    template = _template_rectangle(tuple(order))
    arrays = _rectangle_arrays(template, np.ascontiguousarray(corners, np.float32))
    shape_list: Any = ShapeList(ndisplay=2)  # its internals are typed for napari's own calls
    shape_list._slice_key = slice_key
    colours = np.asarray(colours, np.float32)
    transparent = np.zeros((len(corners), 4), np.float32)
    shape_list._extend_meshes(transparent, colours, _mesh_arrays(template, arrays, colours, width))
    shape_list.shapes = _rectangles(template, arrays, width)
    with shape_list.batched_updates():
        shape_list._update_z_order()
    shape_list._clear_cache()
    return shape_list


def recolour_shape_list(shape_list: Any, colours: npt.NDArray[np.float32]) -> bool:
    """Give the edges of a list of `build_shape_list` the colours (n, 4).

    False, and nothing has changed, where it holds anything but such rectangles by now.
    """
    template, mesh = _template_rectangle((0, 1)), shape_list._mesh
    faces = len(template._face_triangles)
    each = faces + len(template._edge_triangles)
    displayed = mesh.displayed_triangles_to_shape_index
    same = len(shape_list.shapes) == len(colours) == len(mesh.triangles_index) - 1
    if not same or (np.diff(mesh.triangles_index) != each).any():
        return False
    if len(mesh.triangles_colors) != each * len(colours) or len(displayed) % each:
        return False
    owner = displayed.reshape(-1, each)
    if len(displayed) != len(mesh.displayed_triangles_colors) or (owner != owner[:, :1]).any():
        return False
    shape_list._edge_color[:] = colours
    mesh.triangles_colors.reshape(-1, each, 4)[:, faces:] = colours[:, None]
    shown = mesh.displayed_triangles_colors.reshape(-1, each, 4)
    shown[:, faces:] = colours[owner[:, 0]][:, None]
    return True


@lru_cache(maxsize=8)
def _template_rectangle(order: tuple[int, ...]) -> Any:
    """A rectangle as napari builds it."""
    from napari.layers.shapes._shapes_models import Rectangle

    planar = np.array([[0, 0], [0, 30], [20, 30], [20, 0]], np.float32)
    corners = np.concatenate([np.zeros((4, len(order) - 2), np.float32), planar], axis=1)
    return Rectangle(corners, edge_width=1, z_index=0, dims_order=order, ndisplay=2)


def _rectangle_arrays(template: Any, corners: BoxCorners) -> dict[str, npt.NDArray[Any]]:
    """What differs from rectangle to rectangle, each (n, …), by the attribute's name."""
    displayed = np.ascontiguousarray(corners[:, :, list(template.dims_displayed)])
    far = np.abs(template._edge_vertices[:, None] - template.data_displayed[None]).sum(axis=2)
    following = np.roll(displayed, -1, axis=1)
    box = np.empty((len(corners), 9, 2), np.float32)
    box[:, 0:8:2], box[:, 1:8:2] = displayed, (displayed + following) / 2
    box[:, 8] = displayed.mean(axis=1)
    bounds = np.stack([corners.min(axis=1), corners.max(axis=1)], axis=1)
    return {
        "_data": corners,
        "_bounding_box": bounds,
        "_face_vertices": displayed,
        "_edge_vertices": np.ascontiguousarray(displayed[:, far.argmin(axis=1)]),
        "_box": box,
        "slice_key": bounds[:, :, list(template.dims_not_displayed)].astype("int"),
        "data_displayed": displayed,
    }


def _rectangles(template: Any, arrays: dict[str, npt.NDArray[Any]], width: float) -> list[Any]:
    shared = template.__dict__ | {"_edge_width": width}
    kind, names, made = type(template), tuple(arrays), []
    for values in zip(*arrays.values(), strict=True):
        shape = object.__new__(kind)
        shape.__dict__.update(shared)
        shape.__dict__.update(zip(names, values, strict=True))
        made.append(shape)
    return made


def _mesh_arrays(
    template: Any, arrays: dict[str, Any], colours: Any, width: float
) -> dict[str, Any]:
    """The triangles of all rectangles, as napari lays them out: faces, then edges, of each."""
    faces, edges, offsets = (
        arrays["_face_vertices"],
        arrays["_edge_vertices"],
        template._edge_offsets,
    )
    n, nodes = len(faces), faces.shape[1] + edges.shape[1]
    still = np.zeros((faces.shape[1], 2), np.float32)
    moved = np.broadcast_to(np.concatenate([still, offsets]), (n, nodes, 2))
    centres = np.concatenate([faces, edges], axis=1)
    own = np.concatenate([template._face_triangles, template._edge_triangles + faces.shape[1]])
    triangles = (own[None] + (nodes * np.arange(n))[:, None, None]).astype(np.int32)
    paint = np.zeros((n, len(own), 4), np.float32)
    paint[:, len(template._face_triangles) :] = colours[:, None]
    ends = np.arange(1, n + 1, dtype=np.int32)
    return {
        "z_index": np.zeros(n, np.int32),
        "vertices": faces.reshape(-1, 2),
        "mesh_vertices": (centres + np.float32(width) * moved).reshape(-1, 2),
        "mesh_vertices_centers": centres.reshape(-1, 2),
        "mesh_vertices_offsets": moved.reshape(-1, 2),
        "mesh_triangles": triangles.reshape(-1, 3),
        "mesh_triangles_colors": paint.reshape(-1, 4),
        "vertices_index": faces.shape[1] * ends,
        "mesh_triangles_index": len(own) * ends,
        "mesh_vertices_index": nodes * ends,
    }
