"""`Classifier`: crops and boxes, batches, memory, progress, calibration, warnings."""

import numpy as np
import pytest
import torch

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.classification.classifier import Classification
from napari_beerlanet.core.classification.crops import (
    cut_crops,
    denoise_crop,
    read_crops,
    whole_crop,
)
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.stains.domain_shift import describe_stains
from napari_beerlanet.core.stains.front_end import fit_stain
from napari_beerlanet.core.stains.palette import palette_of
from tinyclasses import TYPES, cell, tiny_classifier


@pytest.fixture(scope="module")
def clf():
    return tiny_classifier()


@pytest.fixture(scope="module")
def crops():
    return [cell(kind, seed) for seed in range(4) for kind in TYPES]


@pytest.fixture(scope="module")
def field():
    """Six cells of known places in one image, and their boxes."""
    image = np.full((70, 100, 3), (228, 222, 232), np.uint8)
    boxes = []
    for k in range(6):
        y, x = 4 + 33 * (k // 3), 3 + 33 * (k % 3)
        image[y : y + 30, x : x + 30] = cell(TYPES[k % 2], k)
        boxes.append([x + 4.5, y + 4.5, x + 25.5, y + 25.5])
    return image, np.array(boxes)


def test_what_comes_out(clf, crops):
    result = clf.classify(crops)
    assert len(result) == 8
    assert (result.labels.dtype, result.scores.dtype) == (np.int64, np.float32)
    assert result.scores.shape == (8, 2)
    assert result.names == TYPES
    np.testing.assert_allclose(result.scores.sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(result.labels, result.scores.argmax(1))
    np.testing.assert_array_equal(result.confidence, result.scores.max(1))
    p = result.scores.astype(float)
    np.testing.assert_allclose(result.entropy, -(p * np.log(p)).sum(1), rtol=1e-5)
    assert sum(result.counts().values()) == 8
    assert list(result.table()) == ["type", "probability", "entropy", "P(dark)", "P(pale)"]
    assert result.to_frame()["type"].value_counts().sum() == 8
    assert result.report["crops"] == 8


def test_entropy_of_certainty_is_zero():
    sure = Classification(np.array([0]), np.array([[1, 0]], np.float32), TYPES)
    assert sure.entropy[0] == 0


@pytest.mark.parametrize("batch", [1, 3, 100, "auto"])
def test_batches_make_no_difference(clf, crops, batch):
    expected = clf.classify(crops, batch=8).scores
    np.testing.assert_allclose(clf.classify(crops, batch=batch).scores, expected, atol=1e-6)


def test_one_crop_a_stack_and_other_types(clf, crops):
    expected = clf.classify(crops).scores
    np.testing.assert_array_equal(clf.classify(np.stack(crops)).scores, expected)
    np.testing.assert_allclose(clf.classify(crops[0]).scores, expected[:1], atol=1e-6)
    floats = [crop / 255 for crop in crops]
    np.testing.assert_array_equal(clf.classify(floats).scores, expected)
    deep = [crop.astype(np.uint16) * 257 for crop in crops]
    np.testing.assert_array_equal(clf.classify(deep).scores, expected)
    assert clf.classify([]).scores.shape == (0, 2)


def test_boxes_of_an_image_are_their_crops(clf, field):
    image, boxes = field
    settings = clf.network.settings
    expected = clf.classify(list(cut_crops(image, boxes, settings.input_size, settings.fill)))
    found = clf.classify(image, boxes=boxes)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    none = clf.classify(image, boxes=np.empty((0, 4)))
    assert len(none) == 0


def test_boxes_may_be_detections_in_their_order(clf, field):
    image, boxes = field
    found = Detections(boxes, np.zeros(6, int), np.linspace(0.9, 0.4, 6), ["WBC"])
    np.testing.assert_array_equal(
        clf.classify(image, boxes=found).scores, clf.classify(image, boxes=found.xyxy).scores
    )


def test_stains_of_the_whole_image(field):
    """One fit for all crops: what the network would see of the image, cut."""
    clf = tiny_classifier(fit="image")
    image, boxes = field
    found = clf.classify(image, boxes=boxes)
    fit = fit_stain(clf.network, image)
    crops = cut_crops(image, boxes, 24, clf.network.settings.fill)
    with torch.no_grad():
        logits = clf.network.forward_mixed(fit.mix_tiles(clf.network, crops))
    np.testing.assert_allclose(found.scores, logits.softmax(1), atol=1e-6)
    assert found.report["fit"] == "image"
    alone = clf.classify(image, boxes=boxes, fit="crop")
    assert np.abs(found.scores - alone.scores).max() > 1e-4


@pytest.mark.parametrize("options", [{"normalize": True}, {"beside_rgb": True}], ids=str)
def test_pixels_and_colours_give_the_same(field, options):
    """On a GPU pixels are mapped one by one, on the CPU colours."""
    clf = tiny_classifier(**options)
    image, boxes = field
    image[:3] = 114
    fit, crops = fit_stain(clf.network, image), cut_crops(image, boxes, 24, 0.7)
    with torch.no_grad():
        by_colour = fit.mix_tiles(clf.network, crops)
        by_pixel = fit._mix_pixels(clf.network, torch.from_numpy(crops))
    torch.testing.assert_close(by_pixel, by_colour, atol=1e-4, rtol=1e-4)


def test_denoising_comes_before_all_else(crops):
    plain, calm = tiny_classifier(), tiny_classifier(denoise=True)
    calm.network.load_state_dict(plain.network.state_dict())
    denoised = [denoise_crop(whole_crop(crop, 24)) for crop in crops]
    found = calm.classify(crops).scores
    np.testing.assert_array_equal(found, plain.classify(denoised).scores)
    assert np.abs(found - plain.classify(crops).scores).max() > 1e-4


@pytest.mark.parametrize("front_end", ["beerlanet", "none"])
def test_views_are_averaged(front_end):
    crops = [cell(kind, seed, 24) for seed in range(2) for kind in TYPES]
    one, four, eight = (tiny_classifier(front_end=front_end, views=n) for n in (1, 4, 8))
    turns = [lambda c, k=k: np.rot90(c, k) for k in range(4)]
    mirrored = [lambda c, k=k: np.rot90(c[:, ::-1], k) for k in range(4)]
    every = np.mean([one.classify([t(c) for c in crops]).scores for t in turns + mirrored], axis=0)
    found = eight.classify(crops).scores
    np.testing.assert_allclose(found, every, atol=1e-5)
    assert np.abs(found - one.classify(crops).scores).max() > 1e-4
    some = [turns[0], mirrored[1], turns[2], mirrored[3]]
    half = np.mean([one.classify([t(c) for c in crops]).scores for t in some], axis=0)
    np.testing.assert_allclose(four.classify(crops).scores, half, atol=1e-5)


def test_temperature_softens_and_changes_no_label(clf, crops):
    hot = tiny_classifier(info={"temperature": 3.0})
    first, second = clf.classify(crops), hot.classify(crops)
    np.testing.assert_array_equal(first.labels, second.labels)
    logit = np.log(first.scores[:, 0] / first.scores[:, 1])
    np.testing.assert_allclose(
        np.log(second.scores[:, 0] / second.scores[:, 1]), logit / 3, atol=1e-5
    )


def test_a_prior_is_added_to_the_logits(clf, crops):
    rare = tiny_classifier(info={"prior": [4.0, 0.5], "temperature": 2.0})
    first, second = (model.classify(crops).scores.astype(float) for model in (clf, rare))
    expected = (np.log(first[:, 0] / first[:, 1]) + np.log(8)) / 2
    np.testing.assert_allclose(np.log(second[:, 0] / second[:, 1]), expected, atol=1e-5)


def test_where_memory_does_not_suffice(crops, monkeypatch):
    clf = tiny_classifier()
    sizes = []
    whole = clf.runner.forward_mixed

    def scarce(mixed):
        sizes.append(len(mixed))
        if len(mixed) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return whole(mixed)

    monkeypatch.setattr(clf.runner, "forward_mixed", scarce)
    result = clf.classify(crops)
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert result.report["notes"] == ["Memory did not suffice for 8 crops at a time; 2 did."]
    np.testing.assert_allclose(result.scores, tiny_classifier().classify(crops).scores, atol=1e-6)


def test_other_errors_are_not_taken_for_too_little_memory(crops, monkeypatch):
    clf = tiny_classifier()

    def broken(mixed):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(clf.runner, "forward_mixed", broken)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        clf.classify(crops)


def test_progress_and_cancel(clf, crops):
    told = []
    clf.classify(crops, None, told.append, batch=3)
    assert [(p.done, p.total) for p in told] == [(0, 8), (3, 8), (6, 8), (1, 1)]

    def stop(progress):
        if progress.done == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        clf.classify(crops, report=stop, batch=3)


@pytest.mark.parametrize("front_end", ["beerlanet", "none", "grey"])
def test_a_strange_stain_is_told(crops, front_end):
    clf = tiny_classifier(front_end=front_end)
    clf.info["stain_seen"] = describe_stains([clf.network.fit_crop(crop) for crop in crops])
    assert clf.classify(crops).report["warnings"] == []
    dark = [(crop * 0.4).astype(np.uint8) for crop in crops]
    (warning,) = clf.classify(dark).report["warnings"]
    assert warning.startswith("The background has ")
    inverted = [255 - crop for crop in crops]
    assert clf.classify(inverted).report["warnings"]


@pytest.mark.parametrize("front_end", ["none", "grey"])
def test_without_a_stain_front_end(crops, front_end):
    clf = tiny_classifier(front_end=front_end, fit="image")
    assert len(clf.classify(crops)) == 8
    assert len(clf.classify(crops[0], boxes=[[3, 3, 20, 20]])) == 1
    with pytest.raises(ValueError, match="no stain front end"):
        clf.decompose(crops[0])


def test_decompose_is_what_the_network_sees(clf, crops):
    d = clf.decompose(crops[0])
    x = torch.from_numpy(crops[0].transpose(2, 0, 1).copy())[None].float() / 255
    with torch.no_grad():
        seen = clf.network.stain(x)[0]
    np.testing.assert_allclose(d.densities, seen, atol=1e-5)
    assert d.labels[0] == "Model channel 1"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, x: c.classify(x, boxes=[[0, 0, 0, 5]]), "no area"),
        (lambda c, x: c.classify(x, boxes=[[500, 0, 510, 5]]), "no part in the image"),
        (lambda c, x: c.classify(x, boxes=[1, 2, 3, 4]), "shape"),
        (lambda c, x: c.classify(x[..., 0]), "Not an RGB image"),
        (lambda c, x: c.classify("cells.png"), "Expected an image array"),
        (lambda c, x: c.classify(x, batch=0), "batch must be"),
        (lambda c, x: c.classify(x, fit="slide"), "fit must be"),
    ],
)
def test_wrong_input_is_one_sentence(clf, crops, call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call(clf, crops[0])
    assert "\n" not in str(caught.value)


BOX = np.array([[2.0, 2, 20, 20]])
CALLS = {
    "crops": lambda c, x: c.classify(x),
    "boxes": lambda c, x: c.classify(x, BOX),
    "detections": lambda c, x: c.classify_detections(
        x, Detections(BOX, np.zeros(1, int), np.ones(1), ["RBC"]), ["RBC"]
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "odd",
    [
        None,
        "a.png",
        3,
        {"a": 1},
        [[1, 2], [3]],
        np.zeros((30, 30)),
        np.zeros((0, 30, 3), np.uint8),
        np.zeros((30, 30, 3), object),
        np.zeros((30, 30, 3), np.int32),
        np.full((30, 30, 3), np.nan),
        np.full((30, 30, 3), 3.0),
        np.zeros((30, 30, 3), complex),
        np.ma.MaskedArray(np.zeros((30, 30, 3), np.uint8), True),
        torch.zeros(30, 30, 3, requires_grad=True),
        torch.zeros(30, 30, 3, device="meta"),
        torch.zeros(30, 30, 3).to_sparse(),
    ],
    ids=lambda odd: type(odd).__name__,
)
def test_odd_arrays_are_one_sentence(clf, call, odd):
    with pytest.raises(ValueError, match=r"^[^\n]{10,400}$"):
        CALLS[call](clf, odd)


def test_on_another_device_it_is_the_same_model(clf, crops):
    again = clf.to("cpu")
    np.testing.assert_array_equal(again.classify(crops).scores, clf.classify(crops).scores)
    assert "tiny" in repr(again)
    assert again.classes == TYPES


# --- types of detections -------------------------------------------------------------------------


class Slide:
    """(H, W, 3) that is only ever sliced; what was read."""

    def __init__(self, pixels):
        self._pixels, self.reads = pixels, []
        self.shape, self.dtype, self.ndim = pixels.shape, pixels.dtype, 3

    def __getitem__(self, index):
        part = self._pixels[index]
        self.reads.append(part.size // 3)
        return part

    def palette(self, report=None):
        return palette_of(self._pixels.reshape(-1, 3))


@pytest.fixture(scope="module")
def slide_and_boxes():
    random = np.random.default_rng(3)
    image = np.kron(random.integers(90, 250, (110, 130, 3)), np.ones((20, 20, 1))).astype(np.uint8)
    corner = random.uniform(-8, 1, (60, 2)) + random.uniform(0, 1, (60, 2)) * (2590, 2190)
    boxes = np.hstack([corner, corner + random.uniform(20, 40, (60, 2))])
    boxes[7] = [100, 50, 2500, 2100]  # larger than what is read at once
    return image, boxes


@pytest.mark.parametrize("fit", ["crop", "image"])
def test_a_slide_is_classified_in_parts_as_an_image_in_memory(slide_and_boxes, fit):
    image, boxes = slide_and_boxes
    clf = tiny_classifier(fill=0.8)
    slide = Slide(image)
    expected, found = clf.classify(image, boxes, fit=fit), clf.classify(slide, boxes, fit=fit)
    small = np.arange(60) != 7  # of the large one every second pixel was read
    crops = [cut(image, boxes[small], 24, 0.8) for cut in (cut_crops, read_crops)]
    np.testing.assert_array_equal(*crops)
    np.testing.assert_allclose(found.scores[small], expected.scores[small], atol=1e-5)
    np.testing.assert_allclose(found.scores[7], expected.scores[7], atol=0.05)
    assert max(slide.reads) < 1600**2 < image.size / 3, "what is read at once is bounded"


def test_detections_get_types_of_the_classes_that_the_classifier_is_for(field):
    image, boxes = field
    clf = tiny_classifier(info={"applies_to": ["WBC"]})
    scores = np.linspace(0.9, 0.2, 6)
    labels = [0, 1, 0, 1, 0, 1]
    boxes = boxes.copy()
    boxes[3] = [200, 200, 210, 210]  # outside
    found = Detections(boxes, labels, scores, ["RBC", "leukocyte"], {"seen": np.arange(6)})
    typed = clf.classify_detections(image, found.above(0.5), confidence=0.3)
    assert typed.scores.tolist() == found.above(0.3).scores.tolist()
    expected = clf.classify(image, boxes[[1]])
    assert [bool(name) for name in typed.columns["type"]] == [False, True, False, False, False]
    assert typed.columns["type"][1] == TYPES[expected.labels[0]]
    np.testing.assert_allclose(typed.columns["probability"][1], expected.confidence[0], atol=1e-6)
    assert typed.report["types"] == TYPES
    assert typed.report["classifier"] == "tiny"
    facts = typed.report["classification"]
    assert (facts["classes"], facts["crops"]) == (["leukocyte"], 1)
    assert facts["notes"] == ["1 box has no area in the image and no type."]
    assert len(typed.above(0.0)) == 6, "all candidates are still there"
    assert typed.columns["seen"].tolist() == [0, 1, 2, 3, 4]

    every = clf.classify_detections(image, found, ["RBC"])
    assert sum(name != "" for name in every.columns["type"]) == 3
    with pytest.raises(ValueError, match="no boxes of the class nucleus; the classes are RBC"):
        clf.classify_detections(image, found, ["nucleus"])
    other = Detections(boxes, labels, scores, ["nucleus", "gland"])
    with pytest.raises(ValueError, match="meant for WBC, and the detector's classes are nucleus"):
        clf.classify_detections(image, other)
    assert clf.classify_detections(image, Detections.empty([])).types == TYPES
