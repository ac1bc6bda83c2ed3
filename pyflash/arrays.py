"""The edge to the array libraries: what comes in, where it lies, and how to make more of the same kind.

A library is recognised through `sys.modules`, never imported: an array of it exists, so it is there. CuPy and torch
arrays are used where they are, JAX arrays and everything else through DLPack. Nothing is ever copied.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

import numpy as np

from .errors import Unsupported
from .problem import DTYPES, Tensor, argument

_DLPACK_CPU, _DLPACK_CUDA = 1, 2


class Key(NamedTuple):
    """What an array's Tensor follows from, as its library says it: cheap to get, and hashable."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: object
    misalignment: int  # the address modulo 16


class Kind:
    """An array library on one kind of device. `view` is what the other methods take."""

    name: str
    gpu = True

    def view(self, array):
        """The array itself, or what gives access to its memory."""
        return array

    def wrap(self, view, like):
        """The inverse of `view`, for results, as an array of the library that `like` is of."""
        return view

    def writable(self, view) -> bool:
        return True


def _tensor(key: Key, dtype: str, unit: int) -> Tensor:
    alignment = 16 if not key.misalignment else key.misalignment & -key.misalignment
    return Tensor(tuple(key.shape), tuple(s // unit for s in key.strides), dtype, alignment)


class _ArrayInterface(Kind):
    """Arrays with NumPy's attributes: strides in bytes, NumPy dtypes."""

    def tensor(self, key: Key) -> Tensor:
        itemsize = key.dtype.itemsize or 1
        if any(s % itemsize for s in key.strides):
            raise Unsupported(f"strides of {key.strides} bytes are no multiples of the itemsize of {key.dtype}")
        return _tensor(key, key.dtype.name, itemsize)

    def dtype(self, name: str):
        return np.dtype(name) if name != "bfloat16" else _bfloat16()


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise Unsupported("bfloat16 arrays on the CPU, and CuPy's, need ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


class _NumPy(_ArrayInterface):
    name, gpu = "numpy", False

    def device_id(self, view) -> None:
        return None

    def key(self, view) -> Key:
        return Key(view.shape, view.strides, view.dtype, view.ctypes.data & 15)

    def address(self, view) -> int:
        return view.ctypes.data

    def empty(self, shape, dtype, like):
        return np.empty(shape, dtype)

    def writable(self, view) -> bool:
        return view.flags.writeable


class _CuPy(_ArrayInterface):
    name = "cupy"

    def device_id(self, view) -> int:
        return view.device.id

    def key(self, view) -> Key:
        return Key(view.shape, view.strides, view.dtype, view.data.ptr & 15)

    def address(self, view) -> int:
        return view.data.ptr

    def empty(self, shape, dtype, like):
        return sys.modules["cupy"].empty(shape, dtype)

    def stream(self, device_id: int) -> int:
        return sys.modules["cupy"].cuda.get_current_stream().ptr


class _Torch(Kind):
    name = "torch"

    def device_id(self, view) -> int:
        return view.get_device()

    def key(self, view) -> Key:
        return Key(view.shape, view.stride(), view.dtype, view.data_ptr() & 15)

    def tensor(self, key: Key) -> Tensor:
        return _tensor(key, str(key.dtype).removeprefix("torch."), 1)

    def dtype(self, name: str):
        return getattr(sys.modules["torch"], name)

    def address(self, view) -> int:
        return view.data_ptr()

    def empty(self, shape, dtype, like):
        return sys.modules["torch"].empty(shape, dtype=dtype, device=like.device)

    def stream(self, device_id: int) -> int:
        return sys.modules["torch"].cuda.current_stream(device_id).cuda_stream


class _TorchCpu(_NumPy):
    name = "torch on the CPU"

    def view(self, array):
        torch = sys.modules["torch"]
        array = array.detach()
        return array.view(torch.int16).numpy().view(_bfloat16()) if array.dtype == torch.bfloat16 else array.numpy()

    def wrap(self, view, like):
        torch = sys.modules["torch"]
        if view.dtype.name == "bfloat16":
            return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(view)


class _JaxCpu(_NumPy):
    name = "jax on the CPU"

    def view(self, array):
        return np.asarray(array)

    def wrap(self, view, like):
        return sys.modules["jax"].numpy.asarray(view)


class _JaxCuda(_CuPy):
    name = "jax"

    def view(self, array):
        import cupy

        return cupy.from_dlpack(array)

    def wrap(self, view, like):
        return sys.modules["jax"].dlpack.from_dlpack(view)

    def writable(self, view) -> bool:
        return False  # JAX relies on its arrays never changing


class _DLPack(_CuPy):
    """A CUDA array of a library that PyFlash does not know by name."""

    name = "DLPack"

    def view(self, array):
        import cupy

        return cupy.from_dlpack(array)

    def wrap(self, view, like):
        namespace = getattr(like, "__array_namespace__", lambda: None)()
        return namespace.from_dlpack(view) if hasattr(namespace, "from_dlpack") else view


class _DLPackCpu(_NumPy):
    name = "DLPack on the CPU"

    def view(self, array):
        return np.from_dlpack(array)

    def wrap(self, view, like):
        namespace = getattr(like, "__array_namespace__", lambda: None)()
        return namespace.from_dlpack(view) if hasattr(namespace, "from_dlpack") else view


NUMPY, CUPY, TORCH, TORCH_CPU, JAX, JAX_CPU, DLPACK, DLPACK_CPU = (
    _NumPy(), _CuPy(), _Torch(), _TorchCpu(), _JaxCuda(), _JaxCpu(), _DLPack(), _DLPackCpu()
)  # fmt: skip


@cache
def _library(array_type: type) -> str | None:
    """The library that an array type belongs to, or None."""
    for library, attribute in (("numpy", "ndarray"), ("cupy", "ndarray"), ("torch", "Tensor"), ("jax", "Array")):
        known = getattr(sys.modules.get(library), attribute, None)
        # jax.Array is an abstract class: asking for the subclass relation sees its registered implementations.
        if isinstance(known, type) and issubclass(array_type, known):
            return library
    if issubclass(array_type, getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", ())):
        return "jax"
    return "dlpack" if hasattr(array_type, "__dlpack__") and hasattr(array_type, "__dlpack_device__") else None


def kind_of(array, name: str) -> Kind:
    """The kind of an argument; `name` is for the error."""
    name = argument(name)
    library = _library(type(array))
    if library == "cupy":
        return CUPY
    if library == "torch":
        if array.layout is not sys.modules["torch"].strided:
            raise Unsupported(f"{name}: got a tensor of layout {array.layout}, takes torch.strided")
        if array.is_cuda:
            return TORCH
        if array.device.type == "cpu":
            dtype = str(array.dtype).removeprefix("torch.")
            if dtype not in DTYPES:  # not left to NumPy, which does not know them all
                raise TypeError(f"{name}: got dtype {dtype}, takes one of {', '.join(DTYPES)}")
            return TORCH_CPU
        raise Unsupported(f"{name}: got a torch tensor on {array.device}, takes one on a CUDA device or the CPU")
    if library == "numpy":
        return NUMPY
    if library == "jax":
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise Unsupported(
                f"{name}: got a JAX tracer; PyFlash launches its own kernels and cannot be traced: call outside jax.jit"
            )
        platform = next(iter(array.devices())).platform
        if platform in ("gpu", "cuda"):
            return JAX
        if platform == "cpu":
            return JAX_CPU
        raise Unsupported(f"{name}: got a JAX array on {platform}, takes one on a CUDA device or the CPU")
    if library == "dlpack":
        device_type = array.__dlpack_device__()[0]
        if device_type == _DLPACK_CUDA:
            return DLPACK
        if device_type == _DLPACK_CPU:
            return DLPACK_CPU
        raise Unsupported(f"{name}: got an array on DLPack device type {device_type}, takes 1 (CPU) or 2 (CUDA)")
    raise TypeError(
        f"{name}: got {type(array).__module__}.{type(array).__qualname__}, takes an array of CuPy, NumPy, torch, JAX "
        "or any library with __dlpack__"
    )


def common_kind(arrays: dict[str, object]) -> Kind:
    """The one kind of all arguments."""
    (first, kind), *rest = ((name, kind_of(array, name)) for name, array in arrays.items())
    for name, other in rest:
        if other is not kind:
            raise TypeError(f"{argument(name)}: got a {other.name} array, takes {kind.name}, as {first}")
    return kind


def common_device(kind: Kind, views: dict[str, object]) -> int | None:
    """The one device of all arguments: a CUDA device's number, or None for the CPU."""
    (first, device), *rest = ((name, kind.device_id(view)) for name, view in views.items())
    for name, other in rest:
        if other != device:
            got, takes = f"an array on CUDA device {other}", f"one on device {device}, as {first}"
            raise ValueError(f"{argument(name)}: got {got}, takes {takes}")
    return device


def byte_range(tensor: Tensor, address: int) -> tuple[int, int]:
    """First byte and past-the-last byte that a tensor occupies."""
    if 0 in tensor.shape:
        return address, address
    itemsize = DTYPES[tensor.dtype].itemsize
    steps = [(n - 1) * s * itemsize for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = sum(min(x, 0) for x in steps), sum(max(x, 0) for x in steps)
    return address + low, address + high + itemsize
