"""`bench embed`: the texts it makes, the table it prints, and a run without a reference."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from research_engine.bench import embed
from research_engine.loading.tokenizer import byte_tokenizer

OPTIONS = embed.EmbedBenchOptions(model="dummy:tiny", texts=5, median_words=6, repeats=2, threads=1)


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
