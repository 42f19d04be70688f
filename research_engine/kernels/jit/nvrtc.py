"""The CUDA run-time compiler (NVRTC) through ctypes: found where pip, torch or the toolkit put it, no GPU needed."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HOW_TO_GET = (
    "pip install 'research_engine[cuda13]' (or [cuda12]) brings it; otherwise set CUDA_HOME to a CUDA toolkit of "
    "version 12 or later"
)


class CompilationError(ValueError):
    """The compiler refused a source; the message begins with its first error and has its whole log."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a source.

    Attributes:
        cubin: machine code for one architecture.
        lowered: by name expression, the name in the cubin.
        log: warnings, or the empty string.
    """

    cubin: bytes
    lowered: Mapping[str, str]
    log: str


def roots() -> Iterator[Path]:
    """Folders that may hold a compiler and CUDA's headers: pip's packages first, then CUDA_HOME and its usual place."""
    for entry in sys.path:
        for name in ("cu13", "cuda_nvrtc", "cuda_runtime"):
            if (folder := Path(entry or ".", "nvidia", name)).is_dir():
                yield folder
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and Path(home).is_dir():
            yield Path(home)


def _libraries() -> Iterator[str]:
    for root in roots():
        for folder in ("lib", "lib64"):
            found = [path for path in (root / folder).glob("libnvrtc.so.*") if re.fullmatch(r"\d+", path.suffix[1:])]
            yield from map(str, sorted(found, reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")


def cuda_include() -> Path | None:
    """The folder of CUDA's own headers (cuda_fp16.h and its like), or None."""
    return next((root / "include" for root in roots() if (root / "include" / "cuda_fp16.h").exists()), None)


class Nvrtc:
    """The library's functions, with its errors as exceptions.

    Attributes:
        path: of the library.
        version: of the compiler, such as (13, 0).
        architectures: that it compiles for, as numbers: 90 for sm_90 and sm_90a.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError: the library is not there."""
        self.path = path
        self._library = ctypes.CDLL(path)
        # What it opens by name when it compiles is beside it, where the loader need not look.
        self._parts = [ctypes.CDLL(str(part)) for part in Path(path).parent.glob("libnvrtc-builtins.so.*.*")]
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = tuple(numbers)

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise RuntimeError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}")

    def _text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{name}", program, buffer)
        return buffer.raw

    def compile(
        self, source: str, file: str, options: Sequence[str], names: Sequence[str], headers: Mapping[str, str]
    ) -> Compiled:
        """Compile `source` to a cubin.

        Args:
            source: CUDA C++.
            file: its name in messages; its folder is searched for quoted includes.
            options: of the compiler, an architecture sm_XY among them.
            names: name expressions of the kernels (or constants) that are wanted.
            headers: includes that are text, by name.

        Raises:
            CompilationError: the source is refused.
        """
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        keys = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), file.encode(), len(headers), texts, keys
        )
        try:
            for name in names:
                self._call("nvrtcAddNameExpression", program, name.encode())
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status:
                raise CompilationError(explain(log, source, file) if log else self._error(status))
            lowered = {}
            for name in names:
                text = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(text))
                lowered[name] = (text.value or b"").decode()
            return Compiled(self._text("CUBIN", program), lowered, log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _error(self, status: int) -> str:
        return f"nvrtcCompileProgram: {self._library.nvrtcGetErrorString(status).decode()}"


def explain(log: str, source: str, file: str) -> str:
    """The log's first error with the line of the source that it is about, then the log."""
    found = re.search(r"^(.+?)\((\d+)\): (?:catastrophic )?error.*$", log, re.MULTILINE)
    if found is None:
        return log
    lines = source.splitlines() if found.group(1) == file else _lines_of(found.group(1))
    number = int(found.group(2))
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"{found.group(0)}\n    {number} | {line}\n\n{log}"


def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


@lru_cache(maxsize=1)
def load() -> Nvrtc:
    """The first compiler that is found.

    Raises:
        ImportError: there is none; the message says how to get one.
    """
    for path in _libraries():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError):
            continue
    raise ImportError(f"libnvrtc, CUDA's run-time compiler, is not on this machine: {HOW_TO_GET}")
