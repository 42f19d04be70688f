"""VTC (OSDI 2024), Table 2: service difference between clients, out of the results in the paper's artifact."""

from __future__ import annotations

from pathlib import Path

from experiments.analysis.paper_table import PaperTable, match_of, order_of
from experiments.workloads.trace_files import existing_file
from research_engine import metrics
from research_engine.metrics.fairness import read_vtc_responses

DESCRIPTION = "VTC Table 2: service difference, out of the artifact's results (needs --traces)"
PAPER = {
    "FCFS": ("FCFS", 759.97, 433.53),
    "LCF": ("LCF", 750.49, 323.82),
    "VTC": ("VTC", 368.40, 251.66),
    "VTC(oracle)": ("VTC_oracle", 329.46, 227.51),
}
"""Row -> policy in the file's name, the paper's largest and mean difference in weighted tokens a second."""

WITHIN = 1e-4
"""Of the paper's figures: the data are the paper's own, and what it prints is rounded in the fifth digit."""
PLAN = f"reads the results of {len(PAPER)} policies out of the artifact, and compares what their clients received"


def files() -> dict[str, Path]:
    """Row -> the file of its results. Raises WorkloadError: one is not there."""
    return {row: existing_file(f"vtc_real_{policy}.jsonl") for row, (policy, _, _) in PAPER.items()}


def table() -> PaperTable:
    """The paper's table from its own data, by our definition of service difference (docs/metrics.md).

    Raises:
        ConfigError, WorkloadError: the files are not there.
    """
    ours = {}
    for row, file in files().items():
        services = read_vtc_responses(file)
        ours[row] = metrics.service_difference(services, window=60.0, start=0.0, end=600.0)
    names = ["VTC(oracle)", "VTC", "LCF", "FCFS"]
    return PaperTable(
        title="Service difference of real requests (chatbot arena, 27 clients, 10 minutes)",
        source='Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, Table 2',
        columns=["Max diff", "Avg diff"],
        rows={
            row: [(f"{largest:.2f}", f"{ours[row].max:.2f}"), (f"{mean:.2f}", f"{ours[row].mean:.2f}")]
            for row, (_, largest, mean) in PAPER.items()
        },
        verdicts=[
            order_of("largest: VTC(oracle) < VTC < LCF < FCFS", names, [ours[name].max for name in names], 2),
            order_of("mean: VTC(oracle) < VTC < LCF < FCFS", names, [ours[name].mean for name in names], 2),
            match_of("Max diff", {name: (PAPER[name][1], ours[name].max) for name in names}, WITHIN),
            match_of("Avg diff", {name: (PAPER[name][2], ours[name].mean) for name in names}, WITHIN),
        ],
        differs="""The requests were served by the paper's authors; what is ours is the metric alone. Rows RPM and
        VTC(predict), and the columns of throughput and variance, are left out.""",
    )
