"""The edge to the array libraries: what comes in, where it lies, and how to make more of the same kind.

A library is recognised through `sys.modules`, never imported: an array of it exists, so it is there. CuPy and torch
arrays are used where they are, JAX arrays and everything else through DLPack. Nothing is ever copied.
"""

from __future__ import annotations

import secrets
import sys
from functools import cache

import numpy as np

from . import device
from .errors import Unsupported
from .features import BY_NAME
from .problem import DTYPES, ITEMSIZES, Tensor, argument, contiguous

_DLPACK_CPU, _DLPACK_CUDA = 1, 2


# What an array's Tensor follows from, and where it lies, as its library says it, cheap to get and hashable: shape,
# strides, dtype, the address modulo 16, and the CUDA device's number (None on the CPU).
Key = tuple


class Kind:
    """An array library on one kind of device. Views are what the methods take.

    `facts(views)` are the Keys and the addresses by name: all that a call needs to know of its arrays, in one go
    because it is asked in each call. `make(forms, like, addresses)` makes arrays without gaps by name and notes their
    addresses; `form(shape, dtype)` is what it makes one of, found once for a plan.
    """

    name: str
    gpu = True
    autograd = False
    direct = True  # whether arrays are their own views

    def view(self, array):
        """The array itself, or what gives access to its memory."""
        return array

    def wrap(self, view, like):
        """The inverse of `view`, for results, as an array of the library that `like` is of."""
        return view

    def writable(self, view) -> bool:
        return True

    def seed(self) -> int:
        """One for dropout, drawn as the library's users expect."""
        return secrets.randbits(63)

    def upload(self, host: np.ndarray, device_id: int | None):
        """A view of the same numbers on the device; what comes next on the current stream sees them."""
        return host


def _torch_seed() -> int:
    """By torch's generator, which torch.manual_seed sets and checkpointing sets back."""
    return int(sys.modules["torch"].randint(2**63 - 1, ()))


def _tensor(key: Key, dtype: str, unit: int) -> Tensor:
    shape, strides, _, misalignment, _ = key
    alignment = misalignment & -misalignment if misalignment else 16
    return Tensor(tuple(shape), tuple(s // unit for s in strides), dtype, alignment)


class _ArrayInterface(Kind):
    """Arrays with NumPy's attributes: strides in bytes, NumPy dtypes."""

    def tensor(self, key: Key) -> Tensor:
        _, strides, dtype, *_ = key
        if not dtype.isnative:
            takes = "the machine's byte order: array.astype(array.dtype.newbyteorder('='))"
            raise Unsupported(f"got dtype {dtype}, takes {takes}")
        itemsize = dtype.itemsize or 1
        if any(s % itemsize for s in strides):
            raise Unsupported(f"strides of {strides} bytes are no multiples of the itemsize of {dtype}")
        return _tensor(key, dtype.name, itemsize)

    def dtype(self, name: str):
        return np.dtype(name) if name != "bfloat16" else _bfloat16()

    def form(self, shape: tuple[int, ...], dtype: str) -> tuple:
        return shape, self.dtype(dtype)


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise Unsupported("bfloat16 arrays on the CPU, and CuPy's, need ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


class _NumPy(_ArrayInterface):
    name, gpu = "numpy", False

    def facts(self, views) -> tuple[dict[str, Key], dict[str, int]]:
        keys, addresses = {}, {}
        for name, view in views.items():
            address = addresses[name] = view.ctypes.data
            keys[name] = view.shape, view.strides, view.dtype, address & 15, None
        return keys, addresses

    def make(self, forms, like, addresses) -> dict[str, np.ndarray]:
        made = {name: np.empty(*form) for name, form in forms.items()}
        addresses.update({name: view.ctypes.data for name, view in made.items()})
        return made

    def writable(self, view) -> bool:
        return view.flags.writeable


class _CuPy(_ArrayInterface):
    name = "cupy"

    def facts(self, views) -> tuple[dict[str, Key], dict[str, int]]:
        keys, addresses = {}, {}
        for name, view in views.items():
            memory = view.data
            address = addresses[name] = memory.ptr
            keys[name] = view.shape, view.strides, view.dtype, address & 15, memory.device_id
        return keys, addresses

    def make(self, forms, like, addresses) -> dict[str, object]:
        made, ndarray = {}, sys.modules["cupy"].ndarray
        for name, (shape, dtype) in forms.items():
            view = made[name] = ndarray(shape, dtype)
            addresses[name] = view.data.ptr
        return made

    def stream(self, device_id: int) -> int:
        return sys.modules["cupy"].cuda.get_current_stream().ptr

    def upload(self, host: np.ndarray, device_id: int | None):
        with device.current(device_id):
            return sys.modules["cupy"].asarray(host)


class _Torch(Kind):
    name = "torch"
    autograd = True
    seed = staticmethod(_torch_seed)

    def facts(self, views) -> tuple[dict[str, Key], dict[str, int]]:
        keys, addresses = {}, {}
        for name, view in views.items():
            address = addresses[name] = view.data_ptr()
            keys[name] = view.shape, view.stride(), view.dtype, address & 15, view.get_device()
        return keys, addresses

    def tensor(self, key: Key) -> Tensor:
        return _tensor(key, str(key[2]).removeprefix("torch."), 1)

    def form(self, shape: tuple[int, ...], dtype: str) -> tuple:
        return shape, contiguous(shape, dtype).strides, getattr(sys.modules["torch"], dtype)

    def make(self, forms, like, addresses) -> dict[str, object]:
        made = {}
        for name, (shape, strides, dtype) in forms.items():
            view = made[name] = like.new_empty_strided(shape, strides, dtype=dtype)  # quicker than new_empty
            addresses[name] = view.data_ptr()
        return made

    def stream(self, device_id: int) -> int:
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # spares the making of a Stream in every call
        return raw(device_id) if raw else torch.cuda.current_stream(device_id).cuda_stream

    def upload(self, host: np.ndarray, device_id: int | None):
        return sys.modules["torch"].from_numpy(host).to(f"cuda:{device_id}")


class _TorchCpu(_NumPy):
    name = "torch on the CPU"
    direct = False
    autograd = True
    seed = staticmethod(_torch_seed)

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
    direct = False

    def view(self, array):
        return np.asarray(array)

    def wrap(self, view, like):
        return sys.modules["jax"].numpy.asarray(view)


class _JaxCuda(_CuPy):
    name = "jax"
    direct = False

    def view(self, array):
        import cupy

        return cupy.from_dlpack(array)

    def wrap(self, view, like):
        return sys.modules["jax"].dlpack.from_dlpack(view)

    def writable(self, view) -> bool:
        return False  # JAX relies on its arrays never changing


def _in_library_of(like, view):
    """`view` as an array of the library that `like` is of, if that says how; otherwise as it is."""
    namespace = getattr(like, "__array_namespace__", lambda: None)()
    return namespace.from_dlpack(view) if hasattr(namespace, "from_dlpack") else view


class _DLPack(_CuPy):
    """A CUDA array of a library that PyFlash does not know by name."""

    name = "DLPack"
    direct = False

    def view(self, array):
        import cupy

        return cupy.from_dlpack(array)

    def wrap(self, view, like):
        return _in_library_of(like, view)


class _DLPackCpu(_NumPy):
    name = "DLPack on the CPU"
    direct = False

    def view(self, array):
        return np.from_dlpack(array)

    def wrap(self, view, like):
        return _in_library_of(like, view)


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


def traced_by_torch() -> bool:
    """Whether torch.compile or torch.export looks on: tensors have no memory then, and are not to be asked for it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def kind_of(array, name: str) -> Kind:
    """The kind of an argument; `name` is for the error."""
    library = _library(type(array))
    if library == "cupy":
        return CUPY
    if library == "torch" and array.is_cuda and array.layout is sys.modules["torch"].strided and not array.is_neg():
        return TORCH
    shown = argument(name)
    if library == "torch":
        if array.layout is not sys.modules["torch"].strided:
            raise Unsupported(f"{shown}: got a tensor of layout {array.layout}, takes torch.strided")
        if array.is_neg():  # its memory holds the numbers with the other sign
            takes = "one that is resolved: tensor.resolve_neg()"
            raise Unsupported(f"{shown}: got a tensor with the negative bit set, takes {takes}")
        if array.device.type == "cpu":
            dtype = str(array.dtype).removeprefix("torch.")
            if dtype not in ITEMSIZES:  # not left to NumPy, which does not know them all
                takes = BY_NAME[name].takes if name in BY_NAME else f"one of {', '.join(DTYPES)}"
                raise TypeError(f"{shown}: got dtype {dtype}, takes {takes}")
            return TORCH_CPU
        raise Unsupported(f"{shown}: got a torch tensor on {array.device}, takes one on a CUDA device or the CPU")
    if library == "numpy":
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{shown}: got a numpy.ma.MaskedArray, takes a plain array, as of array.filled()")
        return NUMPY
    if library == "jax":
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise Unsupported(
                f"{shown}: got a JAX tracer; PyFlash launches its own kernels: call it outside jax.jit and jax.vmap, "
                "and differentiate pyflash.jax.flash_attention"
            )
        platform = next(iter(array.devices())).platform
        if platform in ("gpu", "cuda"):
            return JAX
        if platform == "cpu":
            return JAX_CPU
        raise Unsupported(f"{shown}: got a JAX array on {platform}, takes one on a CUDA device or the CPU")
    if library == "dlpack":
        device_type = array.__dlpack_device__()[0]
        if device_type == _DLPACK_CUDA:
            return DLPACK
        if device_type == _DLPACK_CPU:
            return DLPACK_CPU
        raise Unsupported(f"{shown}: got an array on DLPack device type {device_type}, takes 1 (CPU) or 2 (CUDA)")
    raise TypeError(
        f"{shown}: got {type(array).__module__}.{type(array).__qualname__}, takes an array of CuPy, NumPy, torch, JAX "
        "or any library with __dlpack__"
    )


def common_kind(arrays: dict[str, object]) -> Kind:
    """The one kind of all arguments."""
    kind = None
    for name, array in arrays.items():
        other = kind_of(array, name)
        if kind is None:
            first, kind = name, other
        elif other is not kind:
            raise TypeError(f"{argument(name)}: got a {other.name} array, takes {kind.name}, as {argument(first)}")
    if kind.autograd:
        forward_ad = sys.modules["torch"].autograd.forward_ad
        if forward_ad._current_level >= 0:  # asked once: unpack_dual is slow
            for name, array in arrays.items():
                if forward_ad.unpack_dual(array).tangent is not None:
                    takes = "one without: there is no derivative in forward mode"
                    raise Unsupported(f"{argument(name)}: got a tensor with a tangent, takes {takes}")
    return kind


class Inspected:
    """The arguments of a call: their views, keys and addresses by name."""

    __slots__ = ("views", "keys", "addresses")

    def __init__(self, kind: Kind, arrays: dict[str, object]):
        self.views = arrays if kind.direct else {name: kind.view(array) for name, array in arrays.items()}
        self.keys, self.addresses = kind.facts(self.views)

    def device_id(self) -> int | None:
        """The one device that they lie on."""
        first, (*_, device_id) = next(iter(self.keys.items()))
        for name, (*_, other) in self.keys.items():
            if other != device_id:
                takes = f"one on device {device_id}, as {argument(first)}"
                raise ValueError(f"{argument(name)}: got an array on CUDA device {other}, takes {takes}")
        return device_id

    def upload(self, kind: Kind, hosts: dict[str, np.ndarray]) -> None:
        """More arguments, from the host to that device."""
        device_id = self.device_id()
        uploaded = {name: kind.upload(host, device_id) for name, host in hosts.items()}
        keys, addresses = kind.facts(uploaded)
        self.views, self.keys, self.addresses = self.views | uploaded, self.keys | keys, self.addresses | addresses


def byte_range(tensor: Tensor, address: int) -> tuple[int, int]:
    """First byte and past-the-last byte that a tensor occupies."""
    if 0 in tensor.shape:
        return address, address
    itemsize = ITEMSIZES[tensor.dtype]
    steps = [(n - 1) * s * itemsize for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = sum(min(x, 0) for x in steps), sum(max(x, 0) for x in steps)
    return address + low, address + high + itemsize
