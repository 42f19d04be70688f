"""Holds a checkpoint's tensors against those a model wants: nothing missing, nothing left over, every shape right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from research_engine.loading.checkpoint import Checkpoint
from research_engine.loading.errors import LoadError
from research_engine.models.decoder import Decoder

_LISTED = 5  # names an error spells out before it counts the rest


@dataclass(frozen=True)
class Match:
    """What to do with each tensor of a checkpoint, in the checkpoint's order.

    Attributes:
        wanted: stored name -> the model's name of the weight it fills.
        derived: stored name -> the model's name of the value it must agree with.
    """

    wanted: Mapping[str, str]
    derived: Mapping[str, str]


def match_tensors(checkpoint: Checkpoint, blank: Decoder) -> Match:
    """Sort out a checkpoint's tensors; reads none.

    Args:
        blank: the model on the meta device.

    Raises:
        LoadError: a tensor is missing, has no place in the model, or another shape than the model asks for.
    """
    shapes, names, where = checkpoint.shapes(), blank.names, checkpoint.location
    views, values = blank.parameters(), blank.derived()
    places = {stored: _name_in_model(stored, names.prefix, names.other_prefixes, views, values) for stored in shapes}
    found = {name for name in places.values() if name is not None}
    missing = [name for name in views if name not in found]
    if missing:
        raise LoadError(f"{where}: missing {listing(missing)}")
    unused = re.compile(names.unused) if names.unused else None
    unexpected = [n for n, place in places.items() if place is None and not (unused and unused.fullmatch(n))]
    if unexpected:
        raise LoadError(
            f"{where}: unexpected {listing(unexpected)}; the model has no place for it, and leaving it out could "
            "change results"
        )
    twice = [stored for stored, place in places.items() if place is not None and place != stored and place in shapes]
    if twice:
        raise LoadError(
            f"{where}: tensor {twice[0]!r} and tensor {places[twice[0]]!r} are the same weight of the model"
        )
    for stored, place in places.items():
        if place is not None:
            asked = tuple((views[place] if place in views else values[place]).shape)
            if tuple(shapes[stored]) != asked:
                raise LoadError(
                    f"{where}: tensor {stored!r} has the shape {list(shapes[stored])}, the configuration asks for "
                    f"{list(asked)}"
                )
    placed = {stored: place for stored, place in places.items() if place is not None}
    return Match(
        {stored: place for stored, place in placed.items() if place in views},
        {stored: place for stored, place in placed.items() if place not in views},
    )


def _name_in_model(stored: str, prefix: str, others: tuple[str, ...], *known: Mapping[str, object]) -> str | None:
    """The name under which the model knows a stored tensor: its own, or one with another prefix."""
    candidates = [stored] + [prefix + stored[len(other) :] for other in others if stored.startswith(other)]
    return next((name for name in candidates if any(name in names for names in known)), None)


def listing(names: list[str]) -> str:
    """The first few of some tensors' names, in words."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_LISTED])}{more}"
