"""Models of ModelScope: by prefix or by variable, through a package that may be missing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from research_engine.loading import LoadError, resolve_model


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A stand-in for the package; the calls it got. Repositories named ``old`` hold pickled weights."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(model_id: str, **options: Any) -> str:
        calls.append({"model_id": model_id, **options})
        if model_id == "some/missing":
            raise RuntimeError("no such repository")
        directory = Path(options["cache_dir"]) / model_id
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").touch()
        for pattern in options["allow_patterns"]:
            if pattern == ("pytorch_model*.bin" if model_id.endswith("old") else "*.safetensors"):
                (directory / pattern.replace("*", "")).touch()
        return str(directory)

    module = types.ModuleType("modelscope")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path))
    return calls


def test_the_prefix_and_the_variable_fetch_from_modelscope(
    modelscope: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_prefix = resolve_model("modelscope:Qwen/Qwen3-0.6B")
    monkeypatch.setenv("RESEARCH_ENGINE_USE_MODELSCOPE", "1")
    by_variable = resolve_model("Qwen/Qwen3-0.6B")
    assert by_prefix.path == by_variable.path == tmp_path / "modelscope" / "Qwen" / "Qwen3-0.6B"
    assert by_prefix.format == "safetensors"
    assert [call["model_id"] for call in modelscope] == ["Qwen/Qwen3-0.6B"] * 2
    assert not any("pytorch_model" in pattern for pattern in modelscope[0]["allow_patterns"])


def test_pickled_weights_are_fetched_where_there_are_no_others(modelscope: list[dict[str, Any]]) -> None:
    assert resolve_model("modelscope:some/old").format == "bin"
    assert len(modelscope) == 2


def test_a_failure_names_the_repository_and_the_alternatives(modelscope: list[dict[str, Any]]) -> None:
    with pytest.raises(LoadError, match=r"modelscope:some/missing: .*no such repository; .*dummy:tiny"):
        resolve_model("modelscope:some/missing")
    with pytest.raises(LoadError, match=r"modelscope:three/part/name: must read modelscope:OWNER/NAME"):
        resolve_model("modelscope:three/part/name")


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(LoadError, match=r"needs the package modelscope.*pip install 'research_engine\[modelscope\]'"):
        resolve_model("modelscope:Qwen/Qwen3-0.6B")
