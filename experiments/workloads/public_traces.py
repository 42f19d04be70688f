"""`python -m experiments.workloads.public_traces DIR` makes fits.json again, of the public traces in a folder."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.workloads.azure import AzureLengths
from experiments.workloads.columns import FileLengths
from experiments.workloads.etalon import EtalonLengths
from experiments.workloads.fits import FILE, Fit, fit_of
from experiments.workloads.mooncake import MooncakeLengths
from experiments.workloads.trace_files import TraceLengths
from experiments.workloads.vtc_arena import VTCLengths

_TITLES = {
    "azure_code": "Azure 2023 code",
    "azure_conv": "Azure 2023 conversation",
    "mooncake": "Mooncake conversations",
    "etalon_sharegpt_8k": "etalon's ShareGPT, 8k",
    "etalon_bwb_4k": "etalon's BWB, 4k",
    "etalon_arxiv_4k": "Vidur's arXiv summaries, 4k",
    "vtc": "VTC's arena log",
    "sharegpt": "ShareGPT V3 by SmolLM2's tokenizer",
    "sharegpt_first_round": "ShareGPT's first rounds below 2048 tokens by GPT-2's tokenizer",
    "alpaca_sample": "a sample of Alpaca by GPT-2's tokenizer",
}


def all_fits(folder: Path) -> dict[str, Fit]:
    """Statistics by name of every trace that the folder has."""
    readers: dict[str, TraceLengths] = {
        "azure_code": AzureLengths(source="azure", trace="code"),
        "azure_conv": AzureLengths(source="azure", trace="conv"),
        "mooncake": MooncakeLengths(source="mooncake"),
        "etalon_sharegpt_8k": EtalonLengths(source="etalon", trace="sharegpt_8k"),
        "etalon_bwb_4k": EtalonLengths(source="etalon", trace="bwb_4k"),
        "etalon_arxiv_4k": EtalonLengths(source="etalon", trace="arxiv_4k"),
        "vtc": VTCLengths(source="vtc"),
        "sharegpt": FileLengths(source="file", path="sharegpt_v3_lengths.csv"),
        "sharegpt_first_round": FileLengths(source="file", path="sharegpt_first_round_lengths.csv"),
        "alpaca_sample": FileLengths(source="file", path="alpaca_sample_lengths.csv"),
    }
    fits = {}
    for key, reader in readers.items():
        names = reader.public_names() or (str(reader.path),)
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            continue
        samples = [s for s in reader.read(path) if min(s.prompt_tokens, s.output_tokens) >= 1]
        times = [s.time for s in samples if s.time is not None]
        fits[key] = fit_of(
            _TITLES[key],
            [s.prompt_tokens for s in samples],
            [s.output_tokens for s in samples],
            times or None,
            reader.tick,
        )
    return fits


def main(folder: Path) -> None:
    """Write fits.json."""
    raw = {key: {name: _rounded(value) for name, value in asdict(fit).items()} for key, fit in all_fits(folder).items()}
    FILE.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def _rounded(value: object) -> object:
    if isinstance(value, tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
