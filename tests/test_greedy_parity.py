"""Greedy output of the real SmolLM2 through `LLM` equals transformers' token by token, however prompts are cut."""

from __future__ import annotations

import pytest
import torch

from research_engine import LLM, SamplingParams
from research_engine.loading import load_tokenizer
from tests.models.smollm2 import smollm2_reference, smollm2_source

NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "The three primary colors are",
    "import numpy as np\n\ndef mean(values):\n    return",
    "Q: What is the largest planet in the solar system?\nA:",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5,",
    "The main difference between a list and a tuple in Python is",
    "In 1969, Neil Armstrong",
    "To make a cup of tea, first",
    "SELECT name, age FROM",
    "The mitochondria is the",
    "Translate to French: Good morning, how are you?",
    "A group of lions is called a",
    "The novel begins on a rainy evening in London. " * 6 + "Then",
    "Our results show that the proposed method " * 12,
    "E = mc^2 means that",
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """transformers' greedy tokens, past end tokens, of all prompts as one left-padded batch."""
    reference, tokenizer = smollm2_reference(), load_tokenizer(smollm2_source())
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    out = reference.generate(ids, attention_mask=mask, do_sample=False, **limits)
    rows: list[list[int]] = out[:, width:].tolist()
    return rows


def test_greedy_tokens_of_twenty_prompts_equal_transformers(expected: list[list[int]]) -> None:
    llm = LLM(
        "smollm2-135m-instruct", dtype="float32", device="cpu", max_num_seqs=8, max_num_batched_tokens=48,
        num_blocks=100, max_model_len=256, check_integrity=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    steps = llm.engine.records.steps
    assert any(max(step.num_tokens) > 1 and min(step.num_tokens) == 1 for step in steps)  # mixed batches did happen
    for output in outputs:
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
