"""Settings of a classifier: what its network sees of a crop. A checkpoint records them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from napari_beerlanet.core.common.settings import Settings
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.stains.settings import (
    DEFAULT_COMPONENTS,
    DEFAULT_ITERATIONS,
    FrontEnd,
)
from napari_beerlanet.core.stains.solver import MAX_COMPONENTS

StainSource = Literal["crop", "image"]


class ClassifierSettings(Settings):
    """How crops are cut, and what stands in front of the backbone."""

    front_end: FrontEnd = Field(
        "beerlanet",
        description="What the backbone sees: mixed stain densities, the image itself, grey, or the "
        "image as LStainNorm learns to normalise it.",
    )
    input_size: Annotated[int, Field(ge=16, le=1024)] = Field(
        128, description="Side of a crop in pixels, as the backbone sees it."
    )
    fill: Annotated[float, Field(ge=0.05, le=1)] = Field(
        0.7, description="Part of a crop's side that the longer side of a cell's box takes."
    )
    fit: StainSource = Field(
        "crop",
        description="Where stains are fitted: in each crop alone, or in the whole image, once for "
        "all its crops.",
    )
    normalize: bool = Field(
        False,
        description="Divide each density by its 98th percentile in the crop.",
    )
    beside_rgb: bool = Field(
        False, description="Mix densities with the colours instead of mixing densities alone."
    )
    denoise: bool = Field(
        False, description="Median filter (11 pixels) and Gaussian blur (σ = 1) before all else."
    )
    views: Annotated[int, Field(ge=1, le=8)] = Field(
        1,
        description="Turned and mirrored views of a crop whose probabilities are averaged; each "
        "takes as much time as the first.",
    )
    standardize: bool = Field(
        True, description="Scale the backbone's input to ImageNet's mean and deviation."
    )
    light: bool = Field(True, description="Show the backbone the exponential of the mix.")
    attention_pool: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="Pixels along the side of a block that LStainNorm's attention sees as one."
    )
    components: Annotated[int, Field(ge=1, le=MAX_COMPONENTS)] = Field(
        DEFAULT_COMPONENTS, description="Stain components that the front end has."
    )
    iterations: Annotated[int, Field(ge=1, le=1000)] = Field(
        DEFAULT_ITERATIONS, description="Iterations of the front end."
    )
    domain: Domain = Field("log", description="Beer–Lambert (log), or intensities as they are.")
    unit_spectra: bool = Field(True, description="Give every stain spectrum unit length.")

    def record(self) -> dict[str, Any]:
        """The settings as a checkpoint has them; what came later is there only where it counts."""
        kept = ClassifierSettings.model_fields.keys() - (
            set() if self.front_end == "lstainnorm" else {"attention_pool"}
        )
        return {name: value for name, value in self.model_dump().items() if name in kept}


class PatchSettings(Settings):
    """How a slide is cut into patches, and what counts as positive."""

    patch: Annotated[int, Field(ge=8, le=8192)] | Literal["auto"] = Field(
        "auto",
        description="Side of a patch in image pixels; auto is that of the crops of training.",
    )
    step: Annotated[int, Field(ge=1, le=8192)] | Literal["auto"] = Field(
        "auto",
        description="Distance between patches in image pixels; auto sets them side by side, less "
        "lets them overlap for a finer map.",
    )
    min_tissue: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="Part of a patch that must be tissue for it to be classified."
    )
    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="Probability from which on a patch counts as one of the class."
    )
