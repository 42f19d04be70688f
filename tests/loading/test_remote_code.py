"""Code that a repository brings: never without being asked, and for configuration and tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from research_engine.loading import LoadError, load_config, load_model, resolve_model
from tests.models.tiny_llama import make_reference, saved

CODE = """
from pathlib import Path

from transformers import PretrainedConfig

Path(__file__)
Path({witness!r}).touch()


class SpecialConfig(PretrainedConfig):
    model_type = "special"

    def __init__(self, rms_norm_eps=0.25, **options):
        self.rms_norm_eps = rms_norm_eps
        super().__init__(**options)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama whose configuration is read by code in the repository, which leaves the file ``ran`` behind."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = saved(make_reference(num_hidden_layers=1), tmp_path / "special")
    path = directory / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("rms_norm_eps",)}
    maps = {"AutoConfig": "configuration_special.SpecialConfig", "AutoModelForCausalLM": "modeling_special.Special"}
    path.write_text(json.dumps({**config, "model_type": "special", "auto_map": maps}))
    (directory / "configuration_special.py").write_text(CODE.format(witness=str(tmp_path / "ran")))
    (directory / "modeling_special.py").write_text(f"open({str(tmp_path / 'model_ran')!r}, 'w')\nclass Special: pass\n")
    return directory


def test_a_repositorys_code_runs_only_when_trusted_and_only_for_the_configuration(
    repository: Path, tmp_path: Path
) -> None:
    source = resolve_model(str(repository))
    assert load_config(source).norm_eps == 1e-6  # what config.json says, which is nothing
    assert not (tmp_path / "ran").exists()
    assert load_config(source, trust_remote_code=True).norm_eps == 0.25
    assert (tmp_path / "ran").exists()
    load_model(source, dtype=torch.float32, device="cpu", progress=False, trust_remote_code=True)
    assert not (tmp_path / "model_ran").exists()


def test_an_architecture_that_is_code_of_the_repository_is_refused_even_when_trusted(repository: Path) -> None:
    path = repository / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["SpecialForCausalLM"]}))
    for trusted in (False, True):
        with pytest.raises(LoadError, match=r"'SpecialForCausalLM' is not supported \(the code .* is never run\)"):
            load_config(resolve_model(str(repository)), trust_remote_code=trusted)
