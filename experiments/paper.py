"""What a reproduction adds to an experiment: the paper's figures and their source, its claims, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field, FiniteFloat, field_validator, model_validator

from experiments.settings import Settings, nearest_first

SUSTAINED = "sustained"
"""The name under which a claim or a column asks for what `Sustained` finds."""


def known_metric(name: str) -> str:
    """Raises ValueError for what is no metric of tables."""
    from experiments.analysis.metrics import METRICS

    if name != SUSTAINED and name not in METRICS:
        raise ValueError(f"no metric {name!r}; {nearest_first(name, [*METRICS, SUSTAINED])}")
    return name


class Sustained(Settings):
    """The highest load at which a metric keeps a limit, on the straight line between the loads that were run.

    Args:
        metric: that grows with the load.
        limit: in the metric's unit.
        over: the factor that is the load; a number at every level.
    """

    metric: str
    limit: float
    over: str

    _known = field_validator("metric")(known_metric)


class Column(Settings):
    """One column of the paper's table.

    Args:
        metric: out of the metrics of tables, or `sustained`.
        label: as the paper calls it; None takes the metric's own.
        digits: after the point; None takes the metric's.
        paper: cell -> the paper's figure, in the metric's unit. Cells that the paper has no figure for are left out.
        within: the share of the paper's figure by which each of ours may differ for them to match. None, where the
            paper's figures are not expected to come out again: no match is claimed, nor judged. What is 0 in the paper
            has to be 0.
    """

    metric: str
    label: str | None = None
    digits: int | None = Field(default=None, ge=0)
    paper: Mapping[str, FiniteFloat] = Field(default_factory=dict)
    within: float | None = Field(default=None, gt=0, lt=1)

    _known = field_validator("metric")(known_metric)

    @model_validator(mode="after")
    def _has_something_to_match(self) -> Column:
        if self.within is not None and not self.paper:
            raise ValueError("within: a column without figures of the paper has nothing to match")
        return self


class Claim(Settings):
    """An order that the paper finds, and that our figures have or have not.

    Args:
        text: in words.
        metric: as in `Column`.
        rising: cells by rising value, each strictly above the one before.
        factor: each at least this many times the one before.
    """

    text: str
    metric: str
    rising: tuple[str, ...] = Field(min_length=2)
    factor: float = Field(default=1.0, ge=1)

    _known = field_validator("metric")(known_metric)


class Paper(Settings):
    """A table of a paper, and what is claimed of it.

    Args:
        source: authors, title, place, number of the figure or table.
        columns: left to right; rows are the cells, or, of `sustained`, what is left of them without the load.
        claims: what must hold for the figures to say the same as the paper's.
        sustained: how the metric `sustained` is found.
        differs: what is not as in the paper, in sentences.
        left_out: rows of the paper's table that figures and claims name, and that no cell of the grid makes; those that
            the command line takes out of a grid are added. What is claimed of them cannot be told.
    """

    source: str
    columns: tuple[Column, ...] = Field(min_length=1)
    claims: tuple[Claim, ...] = Field(min_length=1)
    sustained: Sustained | None = None
    differs: str
    left_out: tuple[str, ...] = ()

    def row_of(self, metric: str, label: str, levels: Mapping[str, str]) -> str:
        """The row of a metric's figures that a cell of that label, and of those levels of factors, belongs to."""
        if metric != SUSTAINED:
            return label
        assert self.sustained is not None
        return ", ".join(level for factor, level in levels.items() if factor != self.sustained.over)

    def rows_named(self) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
        """(place in this section, metric, row) of all that a column has a figure for, or a claim names."""
        for index, column in enumerate(self.columns):
            yield from ((("columns", index, "paper", row), column.metric, row) for row in column.paper)
        for index, claim in enumerate(self.claims):
            yield from ((("claims", index, "rising", at), claim.metric, row) for at, row in enumerate(claim.rising))

    @property
    def metrics(self) -> set[str]:
        """All that columns and claims ask for."""
        return {column.metric for column in self.columns} | {claim.metric for claim in self.claims}
