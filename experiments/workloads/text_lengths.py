"""`python -m experiments.workloads.text_lengths FILE.json TOKENIZER.json OUT.csv` counts the tokens of a data set.

FILE is ShareGPT's, of which the first round of every conversation is taken: the user's first message and the answer
to it; records that go on with an earlier one's conversation are left out. Or it is Alpaca's, of which an instruction,
its input below it if it has one, is the prompt. What is written are numbers alone: prompt_tokens, output_tokens.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from research_engine.datasets.sharegpt import ConversationFile

USERS, ANSWERERS = ("human", "user"), ("gpt", "chatgpt", "bing", "bard", "assistant")
MOST = 2047  # of prompt and output together: what is longer the PagedAttention paper's benchmark leaves out
LATER_PART = re.compile(r"_[1-9]\d*$")  # ShareGPT's long conversations are several records: id_0, id_1, ...


def rounds(records: Iterator[Any]) -> Iterator[tuple[str, str]]:
    """Prompt and output of each record that has both; others are passed over."""
    for record in records:
        if not isinstance(record, Mapping):
            continue
        if "conversations" in record:
            found = _first_round(record)
        else:
            parts = [record.get("instruction"), record.get("input"), record.get("output")]
            found = None
            if isinstance(parts[0], str) and isinstance(parts[2], str):
                found = "\n".join(filter(None, parts[:2])), parts[2]
        if found is not None and all(found):
            yield found


def _first_round(record: Mapping[str, Any]) -> tuple[str, str] | None:
    turns = record["conversations"]
    if LATER_PART.search(str(record.get("id", ""))) or not isinstance(turns, list) or len(turns) < 2:
        return None
    first, second = turns[:2]
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return None
    if first.get("from") not in USERS or second.get("from") not in ANSWERERS:
        return None
    prompt, output = first.get("value"), second.get("value")
    return (prompt, output) if isinstance(prompt, str) and isinstance(output, str) else None


def main(source: Path, tokenizer: Path, out: Path) -> None:
    """Write the lengths; those of more than MOST tokens together are left out."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    with out.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("prompt_tokens", "output_tokens"))
        for texts in rounds(ConversationFile(source).read()):
            prompt, output = (len(encode(text, add_special_tokens=False).ids) for text in texts)
            if prompt + output <= MOST:
                rows.writerow((prompt, output))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
