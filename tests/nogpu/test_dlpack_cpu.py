"""Arrays of libraries that PyFlash does not know by name, through DLPack on the CPU."""

from __future__ import annotations

import types

import numpy as np
import pytest

import pyflash


class Array:
    """A minimal array library's array: its memory is NumPy's, its only interface DLPack."""

    def __init__(self, data: np.ndarray, device=(1, 0)):
        self.data, self.device = data, device

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: Array(np.from_dlpack(array)))


class Plain:
    """Without a namespace there is no way back to the library."""

    def __init__(self, data: np.ndarray):
        self.data = data

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)


Q = np.random.default_rng(0).standard_normal((2, 5, 4, 8)).astype(np.float32)


def test_arrays_come_back_as_their_kind():
    q = Array(Q)
    out, lse = pyflash.flash_attention(q, q, q, return_lse=True)
    assert type(out) is Array and type(lse) is Array
    expected, expected_lse = pyflash.flash_attention(Q, Q, Q, return_lse=True)
    assert np.array_equal(out.data, expected) and np.array_equal(lse.data, expected_lse)
    gradients = pyflash.flash_attention_backward(out, q, q, q, out, lse)
    for got, want in zip(
        gradients, pyflash.flash_attention_backward(expected, Q, Q, Q, expected, expected_lse), strict=True
    ):
        assert type(got) is Array and np.array_equal(got.data, want)


def test_arrays_of_a_library_without_a_namespace_come_back_as_numpys():
    q = Plain(Q)
    out = pyflash.flash_attention(q, q, q)
    assert type(out) is np.ndarray and np.array_equal(out, pyflash.flash_attention(Q, Q, Q))


def test_strides_are_kept():
    turned = Array(np.ascontiguousarray(Q.swapaxes(1, 2)).swapaxes(1, 2))
    assert np.array_equal(pyflash.flash_attention(turned, turned, turned).data, pyflash.flash_attention(Q, Q, Q))


@pytest.mark.parametrize("device_type", [8, 10, 15])
def test_other_devices_are_refused(device_type):
    q = Array(Q, (device_type, 0))
    with pytest.raises(pyflash.Unsupported, match=rf"^q: got an array on DLPack device type {device_type}, takes"):
        pyflash.flash_attention(q, q, q)


def test_next_to_numpys_arrays_it_is_refused():
    with pytest.raises(TypeError, match=r"^k: got a numpy array, takes DLPack on the CPU, as q"):
        pyflash.flash_attention(Array(Q), Q, Q)
