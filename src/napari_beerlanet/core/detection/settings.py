"""Settings of detection, declared once for the API, the command line and the forms."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.settings import Option, Settings

MIN_TILE = 128
"""Working pixels of the smallest tile's side."""

PLAUSIBLE_OBJECT_SIZES = (3.0, 20_000.0)
"""Image pixels of the smallest and largest objects that can be detected at all."""


def _whole_float(value: Any) -> Any:
    """640.0 counts as 640."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_pixel_size(value: Any) -> Any:
    """Micrometres, or (y, x); sequences and arrays become tuples."""
    if value is None:
        return None
    plain = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    sides = list(plain) if isinstance(plain, (list, tuple)) else [plain]
    numbers = [float(v) for v in sides if isinstance(v, (int, float)) and v is not True]
    expected = 2 if isinstance(plain, (list, tuple)) else 1
    if (
        len(numbers) != len(sides)
        or len(sides) != expected
        or not all(0 < v < math.inf for v in numbers)
    ):
        raise ValueError(f"pixel_size must be micrometres above 0, or (y, x), not {quoted(value)}.")
    return numbers[0] if expected == 1 else tuple(numbers)


OpenVinoMode = Literal["auto", "float32", "bfloat16", "off"]
"""How OpenVINO runs a network on the CPU, if at all."""

_Fraction = Annotated[float, Field(ge=0, le=1)]


class DetectSettings(Settings):
    """How objects are detected in an image."""

    option_group = "detection"

    confidence: _Fraction = Field(0.25, description="Minimum score of a detection.")
    iou: _Fraction = Field(
        0.7,
        description="Boxes of one class whose intersection over union exceeds this are duplicates.",
    )
    object_size: Annotated[
        Annotated[float, Field(ge=1)] | Literal["auto"], Option(value="PIXELS")
    ] = Field(
        "auto",
        description="Typical object size in image pixels (√ of a box's area); auto finds it.",
    )
    tile: Annotated[
        Annotated[int, Field(ge=MIN_TILE)] | Literal["auto"],
        BeforeValidator(_whole_float),
        Option(value="PIXELS"),
    ] = Field("auto", description="Side of the tiles in pixels at the working resolution.")
    pixel_size: Annotated[
        float | tuple[float, float] | None,
        BeforeValidator(_check_pixel_size),
        Option(value="UM"),
    ] = Field(None, description="Micrometres per pixel, or y,x, where the image does not say.")
    densities: Annotated[bool, Option("--no-measures")] = Field(
        True, description="Measure the stain densities in every box."
    )
    skip_glass: Annotated[bool, Option("--all-tiles")] = Field(
        True, description="Skip tiles of a slide that show background and no tissue."
    )
    batch: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_whole_float)
    ] = Field("auto", description="Tiles per batch; halved where memory does not suffice.")

    openvino: OpenVinoMode = Field(
        "auto",
        description="On the CPU, run the network in OpenVINO: auto where it is installed (many "
        "tiles in bfloat16 if that finds the same boxes), float32, bfloat16, or off.",
    )

    @property
    def pixel_size_yx(self) -> tuple[float, float] | None:
        """Micrometres per pixel along y and x."""
        size = self.pixel_size
        return (size, size) if isinstance(size, float) else size
