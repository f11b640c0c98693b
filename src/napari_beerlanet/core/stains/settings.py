"""Settings of a stain decomposition, declared once for the API, the command line and the forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from napari_beerlanet.core.common.settings import Option, Settings
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.stains.solver import MAX_COMPONENTS

if TYPE_CHECKING:  # the command line needs no arrays to show its help
    import numpy as np
    import numpy.typing as npt

Method = Literal["auto", "palette", "dense"]
FrontEnd = Literal["beerlanet", "none", "grey", "lstainnorm"]
"""What stands in front of a detector's or classifier's network: see `StainMixing`."""
FRONT_ENDS: tuple[FrontEnd, ...] = get_args(FrontEnd)

DEFAULT_COMPONENTS = 8
"""r where nothing else is given; more than an image has stains, as the solver drops the rest."""

DEFAULT_ITERATIONS = 10
"""K of Algorithm 1 in the paper: for networks."""


def _spectra_rows(value: Any) -> Any:
    """Start spectra (3, r) as three tuples, so that settings can be compared and written."""
    from napari_beerlanet.core.stains.solver.spectra import check_spectra

    if value is None:
        return None
    return tuple(tuple(row) for row in check_spectra(value, 1).tolist())


_Penalty = Annotated[float, Field(ge=0)] | Literal["auto"]


class DecomposeSettings(Settings):
    """How an image is decomposed into stains."""

    option_group = "stains"

    components: Annotated[int, Field(ge=1, le=MAX_COMPONENTS)] | Literal["auto"] = Field(
        DEFAULT_COMPONENTS,
        description="Number of components; auto counts the stains of the image first.",
    )
    iterations: Annotated[int, Field(ge=1)] | Literal["converge"] = Field(
        "converge",
        description="Iterations of the solver, or converge for the minimum of the objective.",
    )
    lam: _Penalty = Field(
        "auto",
        description="Penalty λ on components: the larger, the fewer stains.",
    )
    gamma: _Penalty = Field(
        "auto",
        description="Penalty γ on densities: the larger, the sparser the stains.",
    )
    spectra: Annotated[
        tuple[tuple[float, ...], ...] | None,
        BeforeValidator(_spectra_rows),
        Option(in_files_only=True),
    ] = Field(
        None,
        description="Start spectra, one column per component; the default covers common dyes.",
    )
    fixed_spectra: bool = Field(
        False,
        description="Keep the given spectra as they are; solve for densities and background only.",
    )
    stain_names: Annotated[tuple[str, ...], Option(in_files_only=True)] = Field(
        (),
        description="Names of the given spectra, in their order.",
    )
    domain: Domain = Field(
        "log",
        description="Decompose optical densities (log, Beer–Lambert) or intensities.",
    )
    unit_spectra: bool = Field(
        True,
        description="Scale every spectrum to unit length after each iteration.",
    )
    reference_pixels: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Total weight that every image is scaled to, so that penalties act alike.",
    )
    method: Method = Field(
        "auto",
        description="Solve for distinct colours (palette) or pixel by pixel (dense).",
    )

    @model_validator(mode="after")
    def _check_spectra_are_given(self) -> DecomposeSettings:
        if self.fixed_spectra and self.spectra is None:
            raise ValueError("fixed_spectra needs spectra: give those that shall be kept.")
        count = 0 if self.spectra is None else len(self.spectra[0])
        if self.stain_names and len(self.stain_names) != count:
            raise ValueError(
                f"stain_names are for {count} given spectra, but there are {len(self.stain_names)}."
            )
        return self

    @property
    def start(self) -> npt.NDArray[np.float64]:
        """S_init (3, r): the given spectra, or the default start."""
        from napari_beerlanet.core.stains.solver.spectra import check_spectra

        components = DEFAULT_COMPONENTS if self.components == "auto" else self.components
        return check_spectra(self.spectra, components)

    @property
    def counts_stains(self) -> bool:
        """Whether the number of stains is chosen from the image: λ, γ and the start are free."""
        free = self.lam == self.gamma == "auto" and self.spectra is None
        return self.iterations == "converge" and free

    @property
    def refits(self) -> bool:
        """Whether stains are counted first, and then fitted again: by K steps, or given λ or γ."""
        return self.components == "auto" and self.spectra is None and not self.counts_stains
