"""The network behind the front end in OpenVINO, which runs it on a CPU faster than torch does.

In bfloat16 the first blocks, whose rounding moves boxes most, and all that is no convolution of the
others stay in float32. That costs a fifth of what bfloat16 spares.

OpenVINO is optional, and nothing here needs it until a network is to run in it. A network is
converted in memory from its weights. What comes of that (a graph and its constants, no code) is
kept in the user's cache under a hash of everything that it depends on, so other weights never find
it, and is converted again where the file is damaged.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, LifoQueue
from types import ModuleType
from typing import Any, Literal
from weakref import WeakValueDictionary
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn

from napari_beerlanet.core.common.storage import atomic_path, remove_path
from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.settings import OpenVinoMode
from napari_beerlanet.core.detection.ultralytics_api import cache_folder
from napari_beerlanet.core.stains.front_end import weights_digest

VARIABLE = "NAPARI_BEERLANET_OPENVINO"
"""Environment variable that says what "auto" is: float32, bfloat16 or off."""

Precision = Literal["float32", "bfloat16"]

_TELEMETRY = "openvino_telemetry"
_PRECISION_NAMES = {"float32": "f32", "bfloat16": "bf16"}  # OpenVINO's
_FORMAT = 2  # of the files in the cache
# What may be rounded, by the names that tracing gives: of the blocks from this one on convolutions
# and what belongs to them, and of the head its branches, not what makes boxes of them.
_FIRST_ROUNDED_BLOCK = 5
_BLOCK_NAME = re.compile(r"__module\.network\.model\.(\d+)\.(?P<inside>.*)")
_HEAD_BRANCH = re.compile(r"(one2one_)?cv\d")
_KEPT_FILES = 8  # in the cache, those of the networks that were used last
# What a converted network is compared with torch on, (N, height, width): it may have taken a size
# that it was converted with for a constant.
_EXAMPLE, _PROBES = (1, 96, 64), ((1, 64, 96), (2, 128, 160))
_MAX_BOX_ERROR, _MAX_SCORE_ERROR = 0.05, 1e-3  # pixels per hundred, and score, of the comparison

_networks: WeakValueDictionary[tuple[Any, ...], OpenVinoNetwork] = WeakValueDictionary()
_lock = threading.RLock()
_parent_has_threads = False


class ConversionError(Exception):
    """A network that OpenVINO cannot run; the message is a reason in a few words."""


class OpenVinoNetwork:
    """A compiled network: what layer 0 gets to what the head returns, for any number of threads.

    `streams` callers run side by side, each on its part of the `threads`; others wait.
    """

    def __init__(
        self, content: bytes, precision: Precision, threads: int, streams: int = 1
    ) -> None:
        self.precision, self.threads, self.streams = precision, threads, streams
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISION_NAMES[precision],
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": streams,
            # Processes that share a machine would all be pinned to its first cores.
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled = _core().import_model(content, "CPU", settings)
        self._spare: LifoQueue[Any] = LifoQueue()  # requests: each serves one caller at a time

    def __call__(self, mixed: Tensor) -> Tensor:
        """The head's output (N, 4 + classes, anchors) float32 of `mixed` (N, 3, H, W)."""
        try:
            request = self._spare.get_nowait()
        except Empty:
            request = self._compiled.create_infer_request()
        try:
            request.infer({0: np.ascontiguousarray(mixed.numpy())}, share_inputs=True)
        except RuntimeError as error:
            if "alloc" in str(error).lower():
                raise MemoryError(str(error)) from error
            raise
        output = np.array(request.get_output_tensor(0).data, np.float32)
        self._spare.put(request)
        return torch.from_numpy(output)


def is_installed() -> bool:
    """Whether OpenVINO can be imported."""
    try:
        return find_spec("openvino") is not None
    except (ImportError, ValueError):
        return False


def is_usable() -> bool:
    """Whether it is installed, and this process is no fork of one whose threads it would need."""
    return is_installed() and not _parent_has_threads


def choose_precision(mode: OpenVinoMode, notes: list[str]) -> Precision | None:
    """The precision that a setting means on this machine; None is torch.

    What is asked for and cannot be had is told in `notes`.
    """
    asked = _asked(mode, notes)
    if asked == "off" or _parent_has_threads:
        return None
    if not is_installed():
        if mode != "auto":
            notes.append(
                "OpenVINO is not installed, so torch ran the network: "
                'pip install "napari-beerlanet[openvino]".'
            )
        return None
    if asked == "bfloat16" and not has_bfloat16():
        notes.append("This CPU has no bfloat16; float32 was used.")
        return "float32"
    # Not bfloat16 by itself: the search of the resolution may end elsewhere, and all boxes with it.
    return "bfloat16" if asked == "bfloat16" else "float32"


def may_round(mode: OpenVinoMode) -> bool:
    """Whether a setting leaves it to us to take bfloat16 where its boxes are the same."""
    return _asked(mode, []) == "auto" and has_bfloat16()


def _asked(mode: OpenVinoMode, notes: list[str]) -> str:
    """The setting, or what the environment says it is."""
    if mode != "auto":
        return mode
    asked = os.environ.get(VARIABLE, "").strip().lower() or mode
    if asked not in ("auto", "float32", "bfloat16", "off"):
        notes.append(f"{VARIABLE} is {asked!r}, not float32, bfloat16 or off: left aside.")
        return mode
    return asked


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16."""
    return "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def inference_threads() -> int:
    """Threads that a network runs on: those that torch has, within our own limit."""
    return min(torch.get_num_threads(), thread_count())


def openvino_network(
    network: StainDetectionModel, precision: Precision, threads: int, streams: int = 1
) -> OpenVinoNetwork:
    """A fused network, compiled; a `ConversionError` where OpenVINO cannot run it.

    Equal networks share one: in this process while it is in use, and through the cache.
    """
    with _lock:
        key, how = _network_key(network), (precision, threads, streams)
        found = _networks.get((key, *how))
        if found is None:
            path = cache_folder() / "openvino" / f"{key}.bin"
            try:
                found = OpenVinoNetwork(_load(path), *how)
            except Exception:  # there is none yet, or it is damaged
                content = convert(network)
                found = OpenVinoNetwork(content, *how)
                _save(path, content)
            _networks[(key, *how)] = found
        return found


def convert(network: StainDetectionModel) -> bytes:
    """A fused network as the CPU plug-in of OpenVINO reads it; checked against torch."""
    try:
        model = _keep_float32(to_openvino(network), len(network.model) - 1)
        content = _core().compile_model(model, "CPU", _EXACT).export_model()
        content = content if isinstance(content, bytes) else content.getvalue()
        difference = describe_difference(network, OpenVinoNetwork(content, "float32", 1))
    except MemoryError:
        raise
    except Exception as error:
        raise ConversionError(f"{type(error).__name__}") from error
    if difference:
        raise ConversionError(difference)
    return bytes(content)


_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


def to_openvino(network: StainDetectionModel) -> Any:
    """A fused network as an `openvino.Model` with one input, (N, 3, H, W), and one output."""
    openvino = import_openvino()
    traced = trace(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return openvino.convert_model(traced, input=[openvino.PartialShape([-1, 3, -1, -1])])


def _keep_float32(model: Any, head: int) -> Any:
    """The model of a network, marked such that bfloat16 leaves in float32 what it should.

    OpenVINO has that mark in its files alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.xml"
        import_openvino().serialize(model, file, file.with_suffix(".bin"))
        tree = ElementTree.parse(file)
        for layer in tree.iterfind("layers/layer"):
            if not _may_be_rounded(layer.get("name", ""), head):
                facts = layer.find("rt_info")
                facts = ElementTree.SubElement(layer, "rt_info") if facts is None else facts
                ElementTree.SubElement(facts, "attribute", name="precise", version="0")
        tree.write(file)
        return _core().read_model(file)


def _may_be_rounded(name: str, head: int) -> bool:
    """Whether a layer of this name may be rounded; `head` is the number of the last block."""
    place = _BLOCK_NAME.match(name)
    if place is None:
        return False
    block = int(place[1])
    return block >= _FIRST_ROUNDED_BLOCK and (
        block < head or _HEAD_BRANCH.match(place["inside"]) is not None
    )


def trace(network: StainDetectionModel) -> Any:
    """A fused network as TorchScript: `NetworkBehindFrontEnd` for images of any size."""
    with warnings.catch_warnings(), torch.no_grad():
        # Tracing is deprecated; what comes after it loads torch's compiler, see `without_compiler`.
        warnings.simplefilter("ignore")
        module = NetworkBehindFrontEnd(network)
        images = torch.rand(_EXAMPLE[0], 3, *_EXAMPLE[1:])
        return torch.jit.trace(module, images, check_trace=False)  # type: ignore[no-untyped-call]


class NetworkBehindFrontEnd(nn.Module):
    """A copy of a fused network without its front end that computes its anchors for any size."""

    def __init__(self, network: StainDetectionModel) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).float().eval()
        self.network = self.network.to(memory_format=torch.contiguous_format)
        head = self.network.model[-1]
        head.export, head.dynamic = True, True

    def forward(self, mixed: Tensor) -> Tensor:
        """The head's output."""
        output: Any = self.network.predict_mixed(mixed)
        first: Tensor = output[0] if isinstance(output, (list, tuple)) else output
        return first


def describe_difference(network: StainDetectionModel, converted: Callable[[Tensor], Tensor]) -> str:
    """In what the results of a network and of what it was converted to differ, "" if they agree."""
    random = torch.Generator().manual_seed(0)
    for count, height, width in _PROBES:
        images = torch.rand(count, 3, height, width, generator=random)
        with torch.inference_mode():
            output = network.predict_mixed(images.to(memory_format=torch.channels_last))
        expected = output[0] if isinstance(output, (list, tuple)) else output
        found = converted(images)
        if found.shape != expected.shape:
            return "its results have another shape"
        error = (found - expected).abs()
        scores = error[:, :, 4:] if getattr(network, "end2end", False) else error[:, 4:]
        boxes = error[:, :, :4] if getattr(network, "end2end", False) else error[:, :4]
        largest = _MAX_BOX_ERROR * max(height, width) / 100
        if not (scores.max() <= _MAX_SCORE_ERROR and boxes.max() <= largest):
            return "its results differ"
    return ""


@cache
def _core() -> Any:
    # Imported here: half a second that whoever runs on a GPU need not wait.
    return import_openvino().Core()


def import_openvino() -> ModuleType:
    """OpenVINO without its telemetry.

    It reports every import and conversion to Google Analytics, unasked, and writes an identifier
    to the user's home folder; no setting of a process prevents that. Where its package for this
    cannot be imported, it does without. Whoever has imported OpenVINO before us has decided.
    """
    if "openvino" in sys.modules:
        return import_module("openvino")
    with _lock:
        missing = object()
        earlier: Any = sys.modules.get(_TELEMETRY, missing)
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
        try:
            return import_module("openvino")
        finally:
            if earlier is missing:
                del sys.modules[_TELEMETRY]
            else:
                sys.modules[_TELEMETRY] = earlier


# --- the cache ------------------------------------------------------------------------------------


def _network_key(network: StainDetectionModel) -> str:
    """A hash of all that a converted network depends on."""
    digest = hashlib.sha256(weights_digest(network).encode())
    head = network.model[-1]
    described = [
        *(version(name) for name in ("openvino", "torch", "ultralytics")),
        _FORMAT,
        network.model,
        *(getattr(head, name, None) for name in ("nc", "reg_max", "end2end", "max_det", "xyxy")),
        network.stride.tolist(),
    ]
    digest.update(repr(described).encode())
    return digest.hexdigest()


def _load(path: Path) -> bytes:
    """What `_save` wrote; a `ValueError` where the file is damaged."""
    stored = path.read_bytes()
    content = stored[32:]
    if hashlib.sha256(content).digest() != stored[:32]:
        raise ValueError("its checksum differs")
    with suppress(OSError):
        os.utime(path)
    return content


def _save(path: Path, content: bytes) -> None:
    """Keep what was converted; without a place for it, it is converted each time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, durable=False) as unfinished:
            unfinished.write_bytes(hashlib.sha256(content).digest() + content)
        files = sorted(path.parent.glob("*.bin"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_KEPT_FILES]:
            remove_path(file)


def _note_fork() -> None:
    # OpenVINO's threads do not survive a fork, and it would wait for them for ever.
    global _parent_has_threads
    _parent_has_threads = _core.cache_info().currsize > 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
