"""The packed kernel arguments lie where C puts them."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess

import pytest

from pyflash import params

TABLES = [(kernel, real) for kernel in params.TABLES for real in ("float", "double")]

_CTYPES = {
    "pointer": ctypes.c_void_p,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "tensor_map": ctypes.c_uint64 * 16,
}


def ctypes_struct(kernel: str, real: str) -> type[ctypes.Structure]:
    fields = []
    for field in params.TABLES[kernel]:
        c_type = _CTYPES[real if field.kind == "real" else field.kind]
        if field.kind == "tensor_map":  # aligned to 64 bytes, which ctypes does not know
            end = ctypes.sizeof(type("Front", (ctypes.Structure,), {"_fields_": fields}))
            fields.append((f"before_{field.name}", ctypes.c_char * (-end % 64)))
        fields.append((field.name, c_type * field.count if field.count > 1 else c_type))
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("kernel, real", TABLES)
def test_layout_equals_that_of_ctypes(kernel, real):
    layout, reference = params.layout(kernel, real), ctypes_struct(kernel, real)
    assert layout.offsets == {name: getattr(reference, name).offset for name in layout.offsets}
    assert layout.size - ctypes.sizeof(reference) in range(0, 64) and layout.size >= ctypes.sizeof(reference)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler (g++) on the path")
def test_layout_equals_that_of_the_compiler(tmp_path):
    """All tables in one program: it prints each struct's size and offsets, and its own static_asserts hold."""
    parts = [
        "#include <cstddef>",
        "#include <cstdio>",
        "struct alignas(64) TensorMap { unsigned long long words[16]; };",
    ]
    prints = []
    for number, (kernel, real) in enumerate(TABLES):
        space = f"table_{number}"
        types = "using Element = unsigned short; using Bias = Element; using Output = float; "
        types += "using CuSeqlensQ = int; using CuSeqlensK = int; using SeqUsedQ = int; using SeqUsedK = int;"
        parts.append(f"namespace {space} {{\nnamespace cfg {{ {types} }}")
        parts.append(params.c_struct(kernel, real) + "}")
        prints.append(f'std::printf("{space} sizeof %zu\\n", sizeof({space}::Params));')
        for field in params.TABLES[kernel]:
            prints.append(f'std::printf("{space} {field.name} %zu\\n", offsetof({space}::Params, {field.name}));')
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*parts, "int main() {", *prints, "}"]))
    subprocess.run(["g++", "-std=c++17", "-Wno-invalid-offsetof", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
    expected = []
    for number, (kernel, real) in enumerate(TABLES):
        layout = params.layout(kernel, real)
        expected.append(f"table_{number} sizeof {layout.size}")
        expected += [f"table_{number} {name} {offset}" for name, offset in layout.offsets.items()]
    assert printed == expected


@pytest.mark.parametrize("kernel, real", TABLES)
def test_pack_puts_each_value_in_its_place(kernel, real):
    layout = params.layout(kernel, real)
    values = {}
    for number, field in enumerate(layout.fields):
        if field.kind != "tensor_map":
            value = number + 0.5 if field.kind == "real" else number + 1
            values[field.name] = value if field.count == 1 else tuple(value + i for i in range(field.count))
    reference = ctypes_struct(kernel, real).from_buffer_copy(layout.pack(values))
    for name, value in values.items():
        got = getattr(reference, name)
        assert (tuple(got) if isinstance(value, tuple) else got) == value


def test_pack_zeroes_what_is_not_given_and_refuses_what_does_not_exist():
    layout = params.layout("bwd_delta", "float")
    assert not any(layout.pack({}))
    with pytest.raises(KeyError, match="no_such_field"):
        layout.pack({"no_such_field": 1})


def test_pack_refuses_what_does_not_fit():
    layout = params.layout("bwd_delta", "float")
    with pytest.raises(struct.error):
        layout.pack({"seqlen_q": 2**31})


@pytest.mark.parametrize("kernel", params.TABLES)
def test_every_table_serves_the_launcher(kernel):
    """The launcher writes addresses as 8-byte words into a template of whole words."""
    for real in ("float", "double"):
        layout = params.layout(kernel, real)
        assert layout.size % 8 == 0
        assert all(layout.offsets[f.name] % 8 == 0 for f in layout.fields if f.kind == "pointer")
        assert layout.size <= 4096, "what a kernel takes as arguments on every GPU"
    names = [field.name for field in params.TABLES[kernel]]
    assert len(set(names)) == len(names)
    for tensor in params.strided_tensors(kernel):
        assert {tensor, f"{tensor}_stride"} <= set(names)
