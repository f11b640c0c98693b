"""Networks from image to image in ONNX files, with a bound on what they cost.

What one would cost is computed before anything of it is run: a file of a few hundred bytes may ask
for any amount of memory and time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from napari_beerlanet.core.common.messages import error_detail, quoted

if TYPE_CHECKING:
    import onnx

PROBE_SIDE = 64
"""Pixels of the side of the image that the sizes of all layers are computed for."""

_MAX_NODES = 5000
# Per pixel, of one layer and of all: CycleGAN's ResNet has 64 and about 1500, and makes a million
# products.
_MAX_LAYER_VALUES, _MAX_VALUES, _MAX_PRODUCTS = 1024, 10_000, 10_000_000
_MAX_FOLDED = 1000  # numbers of a constant that is computed, and such constants
_MAX_FIXED_VALUES = 1 << 26  # of what does not depend on the image, such as weights

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

# fmt: off
_FOLDED = frozenset((
    "Cast", "Concat", "ConstantOfShape", "Gather", "Identity", "Reshape", "Slice", "Squeeze",
    "Transpose", "Unsqueeze",
))
# fmt: on

Shapes = dict[str, tuple[int, ...]]


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
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong with a file is said in one sentence, by us
    try:
        session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    except Exception as error:  # whatever the parser of a damaged file raises
        raise ValueError(f"not an ONNX network ({error_detail(error)})") from error
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise ValueError("it takes something else than one batch of images (N, 3, H, W) of float")

    def run(images: Tensor) -> Tensor:
        try:
            found = session.run(None, {inputs[0].name: images.cpu().numpy()})[0]
        except Exception as error:
            raise ValueError(f"its network does not run ({error_detail(error)})") from error
        return torch.from_numpy(np.asarray(found))

    return run


def _check_onnx(data: bytes) -> None:
    """A `ValueError` with the reason where a network is none from images to images, or too large.

    Its layers are known, its weights are in the file, and the size of every layer follows from the
    image's.
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
        if math.prod(tensor.dims) > _MAX_FIXED_VALUES:
            raise ValueError("its weights are larger than any generator's")
    shapes = _infer_shapes(model)
    _check_cost(graph, shapes)


def _tensors(graph: onnx.GraphProto) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _infer_shapes(model: onnx.ModelProto) -> Shapes:
    """Of everything that is computed of an image of 64 × 64, as the file itself may lie."""
    import onnx

    fixed = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in fixed]
    dims = inputs[0].type.tensor_type.shape.dim if len(inputs) == 1 else ()
    if len(dims) != 4:
        raise ValueError("it takes something else than one batch of images (N, 3, H, W) of float")
    for dim, size in zip(dims, (1, 3, PROBE_SIDE, PROBE_SIDE), strict=True):
        dim.Clear()
        dim.dim_value = size
    _fold_constants(model)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    except Exception as error:  # it has errors of its own for whatever does not fit
        raise ValueError(f"its layers do not fit together ({error_detail(error)})") from error
    shapes = {tensor.name: tuple(tensor.dims) for tensor in found.initializer}
    for value in (*found.input, *found.value_info, *found.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shapes[value.name] = tuple(dim.dim_value for dim in kind.shape.dim)
    return shapes


def _fold_constants(model: onnx.ModelProto) -> None:
    """Compute the few numbers that torch's exporter writes as layers, such as those of a padding.

    The inference of shapes follows some of these layers only.
    """
    from onnx import numpy_helper

    graph, left, kept = model.graph, _MAX_FOLDED, []
    small = {one.name: one for one in graph.initializer if math.prod(one.dims) <= _MAX_FOLDED}
    for node in list(graph.node):
        kept.append(node)
        value = next((one.t for one in node.attribute if one.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            small |= {name: value for name in node.output if math.prod(value.dims) <= _MAX_FOLDED}
        elif node.op_type in _FOLDED and all(name in small for name in node.input if name) and left:
            left -= 1
            given = {name: small[name] for name in node.input if name}
            try:
                result = _computed(node, given, model.opset_import)
            except Exception:  # then its size is not known, and that is said
                continue
            if result.size <= _MAX_FOLDED:
                small[node.output[0]] = numpy_helper.from_array(result, node.output[0])
                graph.initializer.append(small[node.output[0]])
                kept.pop()
    del graph.node[:]
    graph.node.extend(kept)


def _computed(node: onnx.NodeProto, given: dict[str, Any], opsets: Any) -> Any:
    """What one layer makes of constants."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    values = {name: numpy_helper.to_array(tensor) for name, tensor in given.items()}
    if node.op_type == "ConstantOfShape":
        (wanted,) = values.values()
        size = math.prod(int(n) for n in wanted)
        if size > _MAX_FOLDED:
            raise ValueError("too large")
    inputs = [helper.make_tensor_value_info(n, t.data_type, None) for n, t in given.items()]
    outputs = [helper.make_tensor_value_info(node.output[0], 0, None)]
    graph = helper.make_graph([node], "one layer", inputs, outputs)
    made: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
    return made.run(None, values)[0]


def _check_cost(graph: onnx.GraphProto, shapes: Shapes) -> None:
    pixels = PROBE_SIDE**2
    values = products = 0
    for node in graph.node:
        made = [shapes.get(name) for name in node.output if name]
        known = [math.prod(shape) for shape in made if shape is not None]
        layer = f"a layer ({node.op_type})"
        if len(known) < len(made):
            raise ValueError(f"the size of {layer} does not follow from the image's")
        if sum(known) > _MAX_LAYER_VALUES * pixels:
            raise ValueError(f"{layer} is larger than any generator's")
        values += sum(known)
        products += _products(node, sum(known), shapes)
        if values > _MAX_VALUES * pixels or products > _MAX_PRODUCTS * pixels:
            raise ValueError(f"up to {layer} it takes longer than any generator")


def _products(node: onnx.NodeProto, values: int, shapes: Shapes) -> int:
    """How many products are added up, for `values` results."""
    given = [shapes.get(name, ()) for name in node.input]
    if node.op_type == "Conv":  # (out, in, height, width)
        return values * math.prod(given[1][1:])
    if node.op_type == "ConvTranspose":  # (in, out, height, width)
        return math.prod(given[0]) * math.prod(given[1][1:])
    if node.op_type in ("MatMul", "Gemm"):
        return values * max(given[0], default=1)
    if node.op_type.endswith("Pool") and not node.op_type.startswith("Global"):
        kernels = [a.ints for a in node.attribute if a.name == "kernel_shape"]
        return values * math.prod(kernels[0] if kernels else ())
    return values
