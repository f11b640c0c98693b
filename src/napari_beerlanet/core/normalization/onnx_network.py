"""Networks from image to image in ONNX files, which get no more than a gigabyte to run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from napari_beerlanet.core.common.messages import error_detail, quoted

if TYPE_CHECKING:
    import onnx

PROBE_SIDE = 64
"""Pixels of the side of the image that a network is tried out on."""

_MAX_BYTES = 1 << 30  # of all that a network computes; a limit that is no power of two is exceeded
_MAX_NODES = 5000

# fmt: off
_LAYERS = frozenset((
    "Abs", "Add", "AveragePool", "BatchNormalization", "Cast", "Ceil", "Clip", "Concat",
    "Constant", "ConstantOfShape", "Conv", "ConvTranspose", "DepthToSpace", "Div", "Dropout",
    "Elu", "Erf", "Exp", "Flatten", "Floor", "Gather", "Gelu", "Gemm", "GlobalAveragePool",
    "GroupNormalization", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization",
    "LayerNormalization", "LeakyRelu", "Log", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg",
    "PRelu", "Pad", "Pow", "Reciprocal", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Resize",
    "Selu", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "SpaceToDepth", "Split", "Sqrt",
    "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze", "Upsample",
))
# fmt: on
"""Those of networks from image to image; loops, branches and random numbers are not among them."""


def onnx_function(data: bytes) -> Callable[[Tensor], Tensor]:
    """A function from (N, 3, H, W) to the same that runs an ONNX file."""
    try:
        import onnxruntime

        _check_onnx(data)
    except ImportError as error:
        raise ImportError(
            "an ONNX file needs the packages onnx and onnxruntime: "
            'pip install "napari-beerlanet[onnx]"'
        ) from error
    _limit_memory()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong with a file is said in one sentence, by us
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = onnxruntime.InferenceSession(
            data,
            options,
            ["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],  # which has memory of its own
        )
    except Exception as error:  # whatever the parser of a damaged file raises
        raise ValueError(f"not an ONNX network ({error_detail(error)})") from error
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise ValueError("it takes something else than one batch of images (N, 3, H, W) of float")

    def run(images: Tensor) -> Tensor:
        try:
            found = session.run(None, {inputs[0].name: images.cpu().numpy()})[0]
        except Exception as error:
            if "vailable memory" in str(error):
                raise ValueError("its network takes more memory than any generator") from error
            raise ValueError(f"its network does not run ({error_detail(error)})") from error
        return torch.from_numpy(np.asarray(found))

    return run


@cache
def _limit_memory() -> None:
    """Give what sessions of this process compute, all together, one place of limited size."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(_MAX_BYTES, 1, -1, -1))


def _check_onnx(data: bytes) -> None:
    """A `ValueError` with the reason where a network is none from images to images.

    Its layers are known, and its weights are in the file.
    """
    import onnx

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # whatever the parser of a damaged file raises
        raise ValueError(f"not an ONNX network ({error_detail(error)})") from error
    graph = model.graph
    if not graph.node:
        raise ValueError("not an ONNX network, as there are no layers")
    if len(graph.node) > _MAX_NODES:
        raise ValueError(f"it has {len(graph.node):,} layers; at most {_MAX_NODES:,} fit")
    if model.functions or graph.sparse_initializer:
        raise ValueError("it has parts that no generator of images has")
    for node in graph.node:
        if node.op_type not in _LAYERS or node.domain not in ("", "ai.onnx"):
            raise ValueError(f"a layer is {quoted(node.op_type)}, which no generator of images has")
    for tensor in _tensors(graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ValueError("its weights are in another file; save it as one")


def _tensors(graph: onnx.GraphProto) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
