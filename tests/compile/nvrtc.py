"""Any libnvrtc by its path, next to the one that CuPy has loaded. Through NVRTC's C interface."""

from __future__ import annotations

import ctypes
from pathlib import Path

from pyflash import compile, source


class Nvrtc:
    def __init__(self, path: str):
        place = Path(path).resolve()
        for builtins in place.parent.glob("libnvrtc-builtins.so.*"):  # some versions look for theirs elsewhere
            ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(str(place))

    def _call(self, name: str, *arguments: object) -> int:
        return getattr(self.library, f"nvrtc{name}")(*arguments)

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        assert not self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    @property
    def archs(self) -> list[int]:
        count = ctypes.c_int()
        assert not self._call("GetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        assert not self._call("GetSupportedArchs", archs)
        return list(archs)

    @compile.apart
    def compile(self, text: str, name: str, arch: str) -> tuple[bytes, str]:
        """The cubin and the log, or b"" and the log. With the options of `pyflash.compile`."""
        headers = source.headers(text)

        def strings(values):
            return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))

        program = ctypes.c_void_p()
        status = self._call(
            "CreateProgram", ctypes.byref(program), text.encode(), f"{name}.generated.cu".encode(), len(headers),
            strings(list(headers.values())), strings(list(headers)),
        )  # fmt: skip
        assert not status, status
        try:
            options = [f"-arch={arch}", *compile._OPTIONS, *["-no-cache"] * (self.version >= (12, 9))]
            failed = self._call("CompileProgram", program, len(options), strings(options))
            log = self._text(program, "ProgramLog").decode()
            return b"" if failed else self._text(program, "CUBIN"), log
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert not self._call(f"Get{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        assert not self._call(f"Get{what}", program, data)
        return data.raw.rstrip(b"\0") if what == "ProgramLog" else data.raw
