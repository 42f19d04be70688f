"""`bench embed`: the texts it makes, the table it prints, and a run without a reference."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from research_engine.bench import embed
from research_engine.loading.tokenizer import byte_tokenizer

OPTIONS = embed.EmbedBenchOptions(model="dummy:tiny", texts=5, median_words=6, repeats=2, threads=1, device="cpu")


def printed(result: embed.EmbedBenchResult) -> str:
    out = io.StringIO()
    embed.report(result, Console(file=out, width=140))
    return out.getvalue()


def test_texts_depend_on_the_seed_alone() -> None:
    texts = embed.make_texts(OPTIONS, byte_tokenizer())
    assert len(texts) == 5 and all(texts)
    assert embed.make_texts(OPTIONS, byte_tokenizer()) == texts


def test_a_model_without_files_is_measured_alone_and_the_table_says_so() -> None:
    result = embed.run(OPTIONS)
    assert len(result.project) == 2 and min(result.project) > 0 and result.reference == []
    assert result.tokens == sum(len(text) for text in embed.make_texts(OPTIONS, byte_tokenizer()))
    assert "no comparison" in printed(result)


FAKE_VLLM = """
import json, os
__version__ = "0.0-fake"
class LLM:
    def __init__(self, **options):
        assert options["runner"] == "pooling" and options["dtype"] == "float32"
        import tokenizers
        config = json.load(open(os.path.join(options["model"], "config.json")))
        words = tokenizers.Tokenizer.from_file(os.path.join(options["model"], "tokenizer.json"))
        assert words.encode("w3 w7").ids == [3, 7] and words.get_vocab_size() == config["vocab_size"]
        self.files = sorted(os.listdir(options["model"]))
    def embed(self, prompts, use_tqdm):
        assert "modules.json" in self.files and "config.json" in self.files
        class Output: pass
        outputs = []
        for prompt in prompts:
            output = Output(); output.outputs = Output()
            output.outputs.embedding = [1.0] * WIDTH
            assert all(isinstance(i, int) for i in prompt["prompt_token_ids"])
            outputs.append(output)
        return outputs
"""


def test_vllm_gets_the_same_prompts_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("WIDTH", "128"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = embed.EmbedBenchOptions(
        model="dummy:tiny", texts=4, repeats=2, threads=1, device="cpu", compare="vllm", vllm_python=sys.executable
    )
    result = embed.run(options)
    assert result.reference_name == "vLLM 0.0-fake" and len(result.reference) == 2
    assert result.least_cosine is not None and -1 <= result.least_cosine < 1
    assert "least cosine" in printed(result)


def test_a_vllm_that_fails_is_quoted() -> None:
    options = embed.EmbedBenchOptions(
        model="dummy:tiny", texts=2, repeats=1, threads=1, device="cpu", compare="vllm", vllm_python=sys.executable
    )
    with pytest.raises(ValueError, match=r"ended with 1:(.|\n)*No module named 'vllm'"):
        embed.run(options)
    with pytest.raises(ValueError, match="used by --compare vllm alone"):
        embed.EmbedBenchOptions(vllm_python="python")


def test_the_ratio_is_of_medians() -> None:
    out = printed(embed.EmbedBenchResult(10, 100, [1.0, 2.0, 9.0], [3.0, 4.0, 5.0], 0.99999, "a machine"))
    assert "ratio 2.00; least cosine between the two 0.999990" in out
    assert "5 (1 to 10)" in out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("texts", 0),
        ("repeats", 0),
        ("sigma", -1.0),
        ("sigma", math.nan),
        ("sigma", 11.0),
        ("threads", -1),
        ("seed", -1),
    ],
)
def test_a_wrong_option_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        embed.EmbedBenchOptions(**{name: value})
