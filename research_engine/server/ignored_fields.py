"""Tells the log of fields that no endpoint knows: they are passed over, and one may be a typing error."""

from __future__ import annotations

import difflib
import logging

import msgspec

log = logging.getLogger("research_engine.server")
MOST_NAMES = 50  # told of; a client that makes names up does not fill the log or the memory
_MOST_BYTES = 65536  # of a body that is looked at
_LONGEST = 60  # characters of a name; known ones are shorter
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class IgnoredFields:
    """Remembers which names were told of: each is told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, kind: type[msgspec.Struct], body: bytes) -> None:
        """Look at the names in a body that has been decoded as `kind`."""
        if len(body) > _MOST_BYTES or len(self._told) >= MOST_NAMES:
            return
        known = kind.__struct_fields__
        for whole in _decoder.decode(body):
            name = whole[:_LONGEST]
            if whole not in known and name not in self._told and len(self._told) < MOST_NAMES:
                self._told.add(name)
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                meant = f"; {near[0]!r} is known" if near else ""
                log.warning("the field %r of a request is passed over%s", name, meant)
