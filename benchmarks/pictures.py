"""The pictures of README and docs: real images in a real window, with the code as it is.

    xvfb-run -a -s "-screen 0 1920x1200x24" python benchmarks/pictures.py [--out docs]
        [--shared ../shared]
        [--only loop types normalize training review slide batch overlay]

The others: `million.py --pictures docs` makes million-*.jpg, `contact_sheet.py` contact_sheet.jpg.
Every click is a real one, and every number on a picture is computed; a training run of a minute and
a batch of six images are part of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from walk import Walk

_SIZE = 1400, 960
_QUALITY = 88
_TRAINING_FIELDS = 8
_BATCH_IMAGES = 3  # of each laboratory
_SEARCHED_TILES = 12
_SLIDE_SIDE = 10_240
_REVIEWED = "BloodImage_00007"  # a platelet in it is not annotated
_PARASITES = "malaria/images/1701151546-0011-R_T.jpg"


class Pictures(Walk):
    """A walk that saves what README and docs show."""

    def save(self, name: str, fit: bool = True) -> None:
        """The window as docs/NAME.jpg; `fit`: with the whole image in view."""
        if fit:
            self.viewer.reset_view()
        self.pause(1.0)
        path = self.out / f"{name}.jpg"
        self.viewer.window._qt_window.grab().save(str(path), quality=_QUALITY)
        print(path, f"{path.stat().st_size // 1024} KB", flush=True)

    def open_tab(self, tab: Any) -> Any:
        """The panel of a tab of the workspace."""
        from napari_beerlanet.ui.workspace.workspace import open_workspace

        return open_workspace(self.viewer, tab).open_tab(tab)

    def find_cells(self) -> Any:
        """Find cells in the chosen image; returns the panel."""
        from napari_beerlanet.ui.workspace.workspace import CELLS

        cells = self.open_tab(CELLS)
        self.wait(lambda: not cells.model.task.running, "the model")
        self.click(cells.run_button)
        self.wait(lambda: cells.detect_task.running, "the start")
        self.wait(lambda: not cells.detect_task.running, "the cells")
        return cells


def loop(window: Pictures, shared: Path) -> None:
    """Stains, cells and annotations of the sample."""
    from napari_beerlanet.ui.workspace.footer import Step
    from napari_beerlanet.ui.workspace.workspace import ANNOTATE, STAINS, open_workspace

    window.viewer.open_sample("napari-beerlanet", "bccd")
    stains = window.open_tab(STAINS)
    window.click(stains.run_button)
    window.wait(lambda: stains.live.idle and stains.fitted is not None, "the stains")
    window.save("window-stains")
    window.find_cells()
    window.save("window-cells")
    workspace = open_workspace(window.viewer)
    following = workspace.footer.next_button
    window.wait(lambda: following.text() == Step.CORRECT, "“Next”")
    window.click(following)
    window.wait(lambda: following.text() == Step.ADD, "the copies")
    annotate = workspace.panel(ANNOTATE)
    boxes = annotate.annotation_actions.annotated.boxes.layer
    boxes.mode, boxes.selected_data = "select", {1}
    window.save("window-annotate")


def types(window: Pictures, shared: Path) -> None:
    """Red cells of the malaria sample, found and classified in one click."""
    from napari_beerlanet.ui.workspace.presets import MalariaPreset
    from napari_beerlanet.ui.workspace.workspace import CLASSIFY

    window.viewer.open_sample("napari-beerlanet", "malaria")
    classify = window.open_tab(CLASSIFY)
    preset = classify.findChild(MalariaPreset)
    window.wait(preset.button.isEnabled, "the preset")
    window.click(preset.button)
    window.wait(lambda: preset.running, "the start")
    window.wait(lambda: not preset.running, "the cell types")
    window.save("window-classify")


def normalize(window: Pictures, shared: Path) -> None:
    """Methods on a smear of another laboratory, in the colours of the sample, side by side."""
    from napari_beerlanet.ui.workspace.workspace import COMPARE

    image = sorted((shared / "data" / "other-lab" / "images").glob("*.jpg"))[0]
    window.viewer.open(image)
    panel = window.open_tab(COMPARE)
    window.click(panel.run_button)
    window.wait(lambda: panel.comparison is not None and not panel.adding, "the versions")
    window.save("window-normalize", fit=False)


def training(window: Pictures, shared: Path) -> None:
    """A model that has learned from fields of another laboratory, beside the one before."""
    from napari_beerlanet.ui.workspace.workspace import ANNOTATE, TRAIN

    own = Path(tempfile.mkdtemp())
    data = shared / "data" / "other-lab"
    for path in sorted((data / "images").glob("*.jpg"))[: _TRAINING_FIELDS + 1]:
        for folder, suffix in (("images", ".jpg"), ("labels", ".txt")):
            (own / "fields" / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(data / folder / f"{path.stem}{suffix}", own / "fields" / folder)
    images = sorted((own / "fields" / "images").iterdir())
    unseen = images[-1].rename(own / images[-1].name)
    (own / "fields" / "labels" / f"{unseen.stem}.txt").unlink()
    (own / "fields" / "data.yaml").write_text(
        "path: .\ntrain: images\nval: images\nnames: [RBC, WBC, Platelets]\n"
    )
    window.viewer.open(unseen)
    window.find_cells()
    annotate = window.open_tab(ANNOTATE)
    annotate.project.create_project(own / "another laboratory")
    window.wait(lambda: annotate.store.project is not None, "the project")
    annotate.annotation_actions.import_dataset(str(own / "fields"))
    window.wait(lambda: not annotate.annotation_actions.project_task.running, "the import")
    train = window.open_tab(TRAIN)
    window.wait(train.start_button.isEnabled, "the data")
    train.form.length.value = "quick"
    window.click(train.start_button)
    window.wait(lambda: train.run_view.running, "the start")
    comparison = train.comparison
    window.wait(lambda: comparison.comparison is not None, "the comparison")
    window.wait(lambda: not comparison.compare_task.running, "the open image")
    train.reveal(comparison.title)
    window.save("window-finetune")


def review(window: Pictures, shared: Path) -> None:
    """Table, gallery, histogram, annotations and likely label errors."""
    from napari_beerlanet.ui.workspace.workspace import REVIEW

    bccd = shared / "data" / "bccd"
    window.viewer.open(bccd / "JPEGImages" / f"{_REVIEWED}.jpg")
    window.viewer.open(bccd / "Annotations" / f"{_REVIEWED}.xml", plugin="napari-beerlanet")
    image, drawn = window.viewer.layers[-2:]
    drawn.visible = False  # the detections are what is reviewed
    window.viewer.layers.selection.active = image
    window.find_cells()
    panel = window.open_tab(REVIEW)
    window.wait(lambda: len(panel.rows), "the review")
    for act in (panel.next, panel.accept, panel.accept, panel.accept, panel.reject):
        act()
        window.pause(0.2)
    window.save("review-table")
    pages = {panel.tabs.tabText(k): k for k in range(panel.tabs.count())}
    panel.tabs.setCurrentIndex(pages["Gallery"])
    window.pause(2)
    window.save("review-gallery")
    panel.tabs.setCurrentIndex(pages["Histogram"])
    window.pause(1)
    column = panel.histogram.column
    column.setCurrentIndex(next(k for k in range(column.count()) if "mean" in column.itemText(k)))
    low, high = panel.histogram._extent
    panel.histogram.range.setRegion((low + 0.15 * (high - low), low + 0.6 * (high - low)))
    window.save("review-histogram")
    panel.filter.clear()
    panel.filter.set_range("confidence", 0.25, 1.0)
    panel.tabs.setCurrentIndex(pages["Annotations"])
    metrics = panel.annotation_tab.metrics
    window.wait(lambda: metrics.matches is not None, "the annotations")
    window.save("review-annotations")
    sections = {metrics.section_bar.tabText(k): k for k in range(metrics.section_bar.count())}
    metrics.section_bar.setCurrentIndex(sections["Label errors"])
    metrics.label_error_list.setCurrentRow(0)
    window.save("review-label-errors")


def slide(window: Pictures, shared: Path) -> None:
    """The stains of a slide, and one that is being searched."""
    import zarr
    from slide_window import SCALE, make_pyramid

    from napari_beerlanet.ui.workspace.workspace import CELLS, STAINS

    viewer = window.viewer
    stains = window.open_tab(STAINS)
    path = shared / "data" / "slide" / "CMU-1-Small-Region.svs"
    viewer.open(path, plugin="napari-beerlanet")
    window.click(stains.run_button)
    window.wait(lambda: stains.fitted is not None and stains.live.idle, "the slide's stains")
    stains.form.blending_buttons.buttons()[1].click()
    window.wait(lambda: stains.layers.complete, "the layers")
    viewer.scene.camera.zoom *= 2.5
    window.pause(3)
    window.save("slide-stains", fit=False)
    viewer.layers.clear()
    pyramid = Path(tempfile.gettempdir()) / "beerlanet" / f"smear-{_SLIDE_SIDE}.zarr"
    pyramid.parent.mkdir(parents=True, exist_ok=True)
    if not pyramid.exists():
        make_pyramid(pyramid, _SLIDE_SIDE)
    group = zarr.open_group(pyramid, mode="r")
    levels = [group[name] for name in sorted(group.array_keys())]
    viewer.add_image(levels, rgb=True, multiscale=True, name="slide", scale=(SCALE, SCALE))
    viewer.reset_view()
    cells = window.open_tab(CELLS)
    window.wait(lambda: not cells.model.task.running, "the model")
    cells.form.size_auto.value = False
    cells.form.cell_size.value = 60
    window.click(cells.run_button)
    window.wait(
        lambda: (
            cells.slide.total > 0 and cells.slide.remaining <= cells.slide.total - _SEARCHED_TILES
        ),
        "the search",
    )
    window.save("slide-search")
    cells.detect_task.cancel()
    window.wait(lambda: not cells.detect_task.running, "the end of the search")


def batch(window: Pictures, shared: Path) -> None:
    """A folder of images, with the table of counts."""
    from napari_beerlanet.ui.workspace.workspace import BATCH

    folder = Path(tempfile.mkdtemp()) / "smears"
    folder.mkdir()
    for name in ("bccd/JPEGImages", "other-lab/images"):
        for path in sorted((shared / "data" / name).glob("*.jpg"))[:_BATCH_IMAGES]:
            shutil.copy(path, folder / path.name)
    window.viewer.open(sorted(folder.iterdir())[0])
    window.find_cells()
    panel = window.open_tab(BATCH)
    window.wait(panel.run_button.isEnabled, "the images")
    window.click(panel.run_button)
    window.wait(lambda: panel.progress.running, "the start")
    window.wait(lambda: not panel.progress.running, "the batch")
    window.pause(2)
    window.save("window-batch")


def overlay(window: Pictures, shared: Path) -> None:
    """The picture that the command line saves of its detections."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as own:
        image = shared / "data" / _PARASITES
        command = [sys.executable, "-m", "napari_beerlanet", "detect", str(image), "--out", own]
        subprocess.run(command, check=True)
        picture = Image.open(next(Path(own).rglob("*overlay*")))
        picture.thumbnail((1200, 1200))
        picture.convert("RGB").save(window.out / "detections.jpg", quality=_QUALITY)


SCENES: dict[str, Callable[[Pictures, Path], None]] = {
    scene.__name__: scene
    for scene in (loop, types, normalize, training, review, slide, batch, overlay)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--only", nargs="*", choices=list(SCENES), default=list(SCENES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        own = tempfile.mkdtemp()  # nobody's settings, projects or saved annotations
        os.environ |= {
            "NAPARI_BEERLANET_CONFIG": f"{own}/settings",
            "NAPARI_CONFIG": f"{own}/napari.yaml",
            "YOLO_CONFIG_DIR": f"{own}/yolo",
            "YOLO_OFFLINE": "true",
        }
        window = Pictures(options.out, _SIZE, "dark")
        window.pause(1)
        SCENES[name](window, options.shared.absolute())
        window.viewer.close()
        window.pause(0.5)


if __name__ == "__main__":
    main()
