"""What is asked: prompts of the length wanted, the same ones for the same seed, and none twice before it must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research_engine.bench.datasets import build_dataset
from research_engine.bench.serve_options import DatasetOptions
from research_engine.loading.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


class WordTokenizer:
    """A token a word with the space before it, and a begin token, as large vocabularies have them."""

    vocab_size = 200

    def encode(self, text, add_special_tokens=True):
        return ([0] if add_special_tokens else []) + [hash(word) % 199 + 1 for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        letters = "abcdefghijklmnopqrstuvwxyz"
        return "".join(f" {letters[token % 26]}{letters[token // 26 % 26]}" for token in ids)


def dataset(name, tokenizer=TOKENIZER, *, as_text=False, seed=0, **options):
    return build_dataset(DatasetOptions(dataset_name=name, **options), seed, tokenizer, as_text=as_text)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WordTokenizer()], ids=["bytes", "words"])
def test_random_prompts_have_the_tokens_that_were_asked_for(tokenizer):
    samples = dataset("random", tokenizer, random_input_len=50, random_output_len=7).draw(20, 0)
    assert {len(tokenizer.encode(sample.prompt)) for sample in samples} == {50}
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in samples} == {(50, 7)}
    assert len({sample.prompt for sample in samples}) == 20


def test_without_a_tokenizer_prompts_are_token_ids_or_letters():
    (ids,) = dataset("random", None, random_input_len=9).draw(1, 0)
    assert len(ids.prompt) == ids.prompt_tokens == 9 and max(ids.prompt) < 256
    (letters,) = dataset("random", None, as_text=True, random_input_len=9).draw(1, 0)
    assert letters.prompt_tokens is None and len(letters.prompt.split()) == 9


def test_lengths_vary_within_the_range_ratio():
    samples = dataset("random", random_input_len=100, random_output_len=50, random_range_ratio=0.5).draw(300, 0)
    inputs, outputs = [s.prompt_tokens for s in samples], [s.output_tokens for s in samples]
    assert min(inputs) >= 50 and max(inputs) <= 150 and len(set(inputs)) > 50
    assert min(outputs) >= 25 and max(outputs) <= 75


def test_a_prefix_is_shared():
    samples = dataset("random", random_input_len=10, random_prefix_len=20).draw(5, 0)
    assert len({sample.prompt[:20] for sample in samples}) == 1 and len({sample.prompt for sample in samples}) == 5
    assert {sample.prompt_tokens for sample in samples} == {30}


def test_the_same_seed_gives_the_same_requests_and_another_run_other_prompts_of_the_same_lengths():
    first, again, other = (
        dataset("random", seed=seed, random_input_len=30, random_range_ratio=0.5).draw(10, run)
        for seed, run in ((1, 0), (1, 0), (1, 1))
    )
    assert first == again
    assert [s.prompt_tokens for s in first] == [s.prompt_tokens for s in other]
    assert not {s.prompt for s in first} & {s.prompt for s in other}
    assert dataset("random", seed=2, random_input_len=30).draw(10, 0) != first


def test_more_requests_begin_with_the_same_ones():
    made = dataset("random", random_input_len=30)
    assert made.draw(20, 0)[:10] == made.draw(10, 0)


def test_repeated_prefixes():
    options = {
        "prefix_repetition_prefix_len": 30,
        "prefix_repetition_suffix_len": 5,
        "prefix_repetition_num_prefixes": 3,
    }
    samples = dataset("prefix_repetition", **options).draw(30, 0)
    heads = [sample.prompt[:30] for sample in samples]
    assert len(set(heads)) == 3 and all(heads.count(head) == 10 for head in heads)
    assert len({sample.prompt for sample in samples}) == 30


def conversations(tmp_path: Path, count: int, cut: bool = False) -> str:
    turn = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a" * 9}]
    records = [{"id": i, "conversations": [{**turn[0], "value": f"question {i}"}, turn[1]]} for i in range(count)]
    text = json.dumps([*records, {"conversations": [turn[0]]}, {"id": "odd"}])
    path = tmp_path / "share.json"
    path.write_text(text[:-30] if cut else text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("cut", [False, True])
def test_sharegpt_takes_prompt_and_length_of_the_first_two_turns(tmp_path, cut):
    samples = dataset("sharegpt", dataset_path=conversations(tmp_path, 8, cut)).draw(8, 0)
    assert {sample.output_tokens for sample in samples} == {9}
    assert {sample.prompt for sample in samples} == {f"question {i}" for i in range(8)}
    forced = dataset("sharegpt", dataset_path=conversations(tmp_path, 3), sharegpt_output_len=2).draw(2, 0)
    assert {sample.output_tokens for sample in forced} == {2}


def test_runs_take_other_conversations_until_none_is_left(tmp_path):
    made = dataset("sharegpt", dataset_path=conversations(tmp_path, 10))
    runs = [{sample.prompt for sample in made.draw(4, run)} for run in (0, 1, 2)]
    assert not runs[0] & runs[1] and len(runs[2]) == 4
    assert {sample.prompt for sample in made.draw(4, 0)} == runs[0]


def test_sharegpt_needs_a_tokenizer_and_an_array(tmp_path):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        dataset("sharegpt", None)
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a JSON array"):
        dataset("sharegpt", dataset_path=str(path))


def custom(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_file_of_ones_own(tmp_path):
    path = custom(tmp_path, '{"prompt": "one", "output_tokens": 3}', "", '{"prompt": "two!", "output_tokens": 4}')
    made = dataset("custom", dataset_path=path, custom_output_len=-1, disable_shuffle=True)
    assert [(s.prompt, s.prompt_tokens, s.output_tokens) for s in made.draw(3, 0)] == [
        ("one", 3, 3), ("two!", 4, 4), ("one", 3, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{", "line 1"), ('{"text": 1}', 'text "prompt"'), ('{"prompt": "a"}', 'needs "output_tokens"')],
)
def test_a_file_of_ones_own_that_is_wrong_names_the_line(tmp_path, line, reason):
    with pytest.raises(ValueError, match=reason):
        dataset("custom", dataset_path=custom(tmp_path, line), custom_output_len=-1)


@pytest.mark.parametrize("name", ["custom", "trace"])
def test_a_dataset_of_a_file_needs_one(name):
    with pytest.raises(ValueError, match="needs dataset-path"):
        dataset(name)
    with pytest.raises(ValueError, match="no such file"):
        dataset(name, dataset_path="nowhere.jsonl")


def test_a_trace_gives_lengths_and_times(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,arrival\n5,2,10\n6,3,12\n", encoding="utf-8")
    made = dataset("trace", dataset_path=str(path))
    assert made.is_timed
    assert [(s.prompt_tokens, s.output_tokens, s.arrival) for s in made.draw(2, 0)] == [(5, 2, 0.0), (6, 3, 2.0)]
    with pytest.raises(ValueError, match="2 requests with times"):
        made.draw(3, 0)
    untimed = dataset("trace", dataset_path=str(path), self_timed=False)
    assert not untimed.is_timed and [s.arrival for s in untimed.draw(3, 0)] == [None] * 3


def test_requests_of_a_trace_with_the_same_blocks_share_that_prefix(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
            for length, ids in ((1030, [7, 8, 9]), (1024, [7, 8]), (600, [7, 5]))]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    a, b, c = (sample.prompt for sample in dataset("trace", dataset_path=str(path)).draw(3, 0))
    assert (len(a), len(b), len(c)) == (1030, 1024, 600)
    assert a[:1024] == b and a[:512] == c[:512] and a[512:600] != c[512:600]
