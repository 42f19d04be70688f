"""YAML of users, read with a bound on what it may become: aliases of aliases stand for more than any memory holds."""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 100_000
"""Keys and values of one text, each counted as often as aliases repeat it. An experiment has some hundreds."""


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The nodes of a text, which know their lines, and the plain value that they stand for.

    Raises:
        yaml.YAMLError: it is no YAML, stands for more than MOST_VALUES values, holds an alias within what the alias
            stands for, or is nested too deeply; a MarkedYAMLError knows where.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _count(node, {})
        return node, loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, OverflowError) as error:  # a date of the 13th month, an integer of thousands of digits
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def value_of(node: yaml.Node) -> Any:
    """The plain value of one node of a text that was read."""
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _count(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values that a node stands for. `known` has those of other nodes, None for those that it lies in; mutates it."""
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise _error("an alias stands for what it lies in", node)
        return count
    known[id(node)] = None
    count = 1
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    else:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
    for part in parts:
        count += _count(part, known)
        if count > MOST_VALUES:
            raise _error(f"stands for more than {MOST_VALUES:,} values once its aliases are written out", node)
    known[id(node)] = count
    return count


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
