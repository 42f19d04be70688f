"""YAML of users: read with the lines of its nodes, and refused where it would become more than a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.config import ConfigError, load_experiment
from research_engine import yaml_text
from research_engine.yaml_text import MOST_VALUES, read_yaml, value_of

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def laughs(levels: int) -> str:
    """Nine aliases of nine aliases of ..."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(lines)


@given(PLAIN)
def test_what_was_written_is_read(value: object) -> None:
    assert read_yaml(yaml.safe_dump(value))[1] == value


def test_aliases_that_stand_for_little_are_read() -> None:
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: {<<: {x: 1}, y: 2}")[1] == {
        "a": [1, 2], "b": [[1, 2], [1, 2]], "c": {"x": 1, "y": 2}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (laughs(9), f"stands for more than {MOST_VALUES:,} values"),
        ("a: &a [*a]", "an alias stands for what it lies in"),
        ("a: &a\n  <<: *a", "an alias stands for what it lies in"),
        ("x: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("when: 2020-13-45", "month must be in 1..12"),
        ("n: " + "9" * 5000, "digits"),
        ("a: *b", "undefined alias"),
    ],
)
def test_what_is_too_much_or_nothing_is_refused_in_words(text: str, told: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        read_yaml(text)
    assert told in str(caught.value)


def test_the_bound_counts_values_and_not_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MOST_VALUES", 10)
    assert read_yaml("[1, 2, 3, 4, 5, 6, 7, 8, 9]")[1] == list(range(1, 10))
    with pytest.raises(yaml.MarkedYAMLError, match="more than 10 values"):
        read_yaml("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")


def test_an_experiment_of_nested_aliases_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "laughs.yaml"
    file.write_text(laughs(9), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"laughs.yaml, line \d: no YAML: stands for more than 100,000 values"):
        load_experiment(str(file))
    with pytest.raises(ConfigError, match="the value is no YAML: an alias stands for what it lies in"):
        load_experiment("quickstart", ["workload=&a {x: *a}"])


def test_a_key_that_is_no_word_is_told(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("base:\n  &model: dummy:tiny\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="own.yaml"):
        load_experiment(str(file))
    node, _ = read_yaml("&x : 3\n4: 5")
    assert isinstance(node, yaml.MappingNode) and [value_of(key) for key, _ in node.value] == [None, 4]
