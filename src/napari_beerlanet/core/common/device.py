"""Choose and describe the torch device (CUDA, MPS, CPU), its memory; the only `is_available()`."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from napari_beerlanet.core.common.messages import shortened

if TYPE_CHECKING:
    import torch

_OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "alloc_failed")


def preload_torch() -> None:
    """Load torch's library before torch is imported, without holding Python's lock. Linux only.

    An import holds the lock while a library is loaded, for half a second in this case, and every
    other thread stands still meanwhile, that of a window, too. A call through ctypes does not.
    """
    spec = find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    dlopen = getattr(ctypes.CDLL(None), "dlopen", None) if spec is not None else None
    if spec is None or spec.origin is None or dlopen is None:
        return
    folder = Path(spec.origin).parent / "lib"
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # As torch does it: first what all of its libraries need, for all to see.
    dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    dlopen(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW | os.RTLD_LOCAL)


def import_torchvision() -> Any:
    """torchvision, imported without torch's compiler, which it would load."""
    if "torchvision" not in sys.modules:
        with without_compiler() as absent:
            import torchvision
        pooling = sys.modules.get("torchvision.ops.roi_align") if absent else None
        if pooling is not None and hasattr(pooling, "is_compile_supported"):
            pooling.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    import torchvision

    return torchvision


@contextmanager
def without_compiler() -> Iterator[bool]:
    """Nothing in the place of torch's compiler, for what loads it without need of it.

    That takes more than a second, and it loads triton: where Mesa draws a window without a graphics
    card, each brings an LLVM, and the one that comes second ends the process. Yields whether it is
    absent: one that is loaded already stays.
    """
    if "torch._dynamo" in sys.modules:
        yield False
        return
    absent = {name: ModuleType(name) for name in ("torch._dynamo", "torch._dynamo.utils")}
    for module in absent.values():
        module.__dict__["__getattr__"] = _ineffective
    sys.modules |= absent
    try:
        yield True
    finally:
        for name in absent:
            del sys.modules[name]


def _ineffective(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda function=None, *_, **__: function


def _is_compile_supported(device: str) -> bool:
    """What torchvision asks the compiler when someone pools regions, which we never do."""
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device))


@contextmanager
def collections_paused() -> Iterator[None]:
    """While much is imported: a garbage collection stops all threads, and would free nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def import_torch(*modules: str) -> None:
    """Import torch, and modules that need it, in a thread beside a window that is to respond."""
    with collections_paused():
        preload_torch()
        for name in ("torch", *modules):
            importlib.import_module(name)


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device for a name: "auto" prefers CUDA, then Apple's MPS, then the CPU.

    A device that this machine does not have is refused with a sentence that names those it has.
    """
    import torch

    if str(device) == "auto":
        return torch.device(available_devices()[0])
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f'"{shortened(device)}" is no device name; use "auto" or one of '
            f"{', '.join(available_devices())}."
        ) from error
    present = available_devices()
    known = wanted.type in {name.split(":")[0] for name in present}
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        known = False
    if not known and not _holds_tensors(wanted):
        raise ValueError(f'This machine has no "{shortened(device)}"; it has {", ".join(present)}.')
    return wanted


def _holds_tensors(device: torch.device) -> bool:
    """Whether a device that "auto" never takes is there, such as torch_xla's once imported."""
    import torch

    if device.type in ("cpu", "cuda", "mps", "meta"):
        return False
    try:
        return torch.zeros(1, device=device).device.type == device.type
    except Exception:  # each kind of device that is not there has an error of its own
        return False


def available_devices() -> list[str]:
    """Names of the devices present, best first; the CPU is always the last."""
    import torch

    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [*names, "cpu"]


def device_for_worker(device: str, number: int) -> str:
    """What "auto" is for the worker of a number: several on a machine share its CUDA devices."""
    if device != "auto" or number == 0:
        return device
    cards = [name for name in available_devices() if name.startswith("cuda")]
    return cards[number % len(cards)] if cards else device


def describe_device(device: torch.device) -> str:
    """A device as a person would name it, for instance "NVIDIA A100 (cuda:0)"."""
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return {"mps": "Apple GPU (mps)", "cpu": "CPU"}.get(device.type, str(device))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory did not suffice; not every device has a class for that."""
    import torch

    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in _OUT_OF_MEMORY_MESSAGES
    )


def free_memory(device: torch.device) -> None:
    """Give back what a device keeps for later."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def compute_pending(device: torch.device) -> None:
    """Have a device compute what it has put off; others than XLA's put nothing off.

    XLA compiles and runs all that a value depends on when the value is asked for, and forgets it
    again: the next value that depends on the same has the same compiled and computed once more.
    """
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


def on_cpu_note(device: torch.device, what: str) -> str:
    """The sentence on a run that a device has no memory for, and that the CPU does instead."""
    return f"Memory of {describe_device(device)} did not suffice for {what}; the CPU was used."


def place_on(module: torch.nn.Module, device: torch.device) -> tuple[torch.device, list[str]]:
    """Move a module to a device, or the CPU where memory does not suffice; the device, notes."""
    try:
        module.to(device)
        return device, []
    except Exception as error:
        if device.type == "cpu" or not is_out_of_memory(error):
            raise
    # Not in the handler: there the error still holds what is in memory.
    module.cpu()
    free_memory(device)
    return next(module.parameters()).device, [on_cpu_note(device, "the model")]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given, for instance to take the time."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.zeros(1, device=device).cpu()


# --- what not every device can do ---


def precise_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have nothing better."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def image_layout(device: torch.device) -> torch.memory_format:
    """Channels last where that is faster; on Apple's GPUs convolutions of it have wrong results."""
    import torch

    return torch.channels_last if device.type in ("cpu", "cuda") else torch.contiguous_format


def no_gradients(device: torch.device) -> AbstractContextManager[Any]:
    """`torch.inference_mode`, or `torch.no_grad` on devices that cannot do with it, such as XLA."""
    import torch

    return torch.inference_mode() if device.type in ("cpu", "cuda", "mps") else torch.no_grad()


def copy_to(module: torch.nn.Module, device: torch.device) -> Any:
    """A copy of a module on a device; nothing is copied where the module is."""
    import torch

    moved: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to(device, copy=True), p.requires_grad)
        for p in module.parameters()
    }
    moved |= {id(b): b.detach().to(device, copy=True) for b in module.buffers()}
    return copy.deepcopy(module, moved).to(device)
