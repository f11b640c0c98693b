"""A checkpoint's spectra, without its network."""

import numpy as np
import pytest

import napari_beerlanet as nb
from napari_beerlanet.core.checkpoints.checkpoint import CheckpointError, learned_spectra


def test_of_the_packaged_model():
    model = nb.load_checkpoint("blood-cells", device="cpu")
    expected = model.network.stain.spectra.detach().numpy()
    np.testing.assert_array_equal(learned_spectra("blood-cells"), expected)


@pytest.mark.parametrize("content", [b"", b"no checkpoint at all, but long enough to be read"])
def test_of_a_file_that_is_none(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        learned_spectra(path)


def test_of_a_file_that_is_gone(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        learned_spectra(tmp_path / "gone.safetensors")
