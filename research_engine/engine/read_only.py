"""What a request shows of itself: its lists and dictionaries for reading, and attributes that cannot be assigned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, overload

Item = TypeVar("Item")
Key = TypeVar("Key")


class ReadOnlyList(Sequence[Item]):
    """A list that somebody else goes on writing, for reading: it shows what the list holds now, and has no way to
    change it. Slices and sums are lists of the caller's own.
    """

    __slots__ = ("_items",)
    __hash__ = None  # type: ignore[assignment]  # what it shows changes

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ReadOnlyList):
            return self._items == other._items
        return self._items == other if isinstance(other, list) else NotImplemented

    def __add__(self, other: Sequence[Item]) -> list[Item]:
        return [*self._items, *other]

    def __repr__(self) -> str:
        return repr(self._items)


class ReadOnlyDict(Mapping[Key, Item]):
    """A dictionary that nobody writes any more; unlike MappingProxyType it can be copied and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Key, Item]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Key) -> Item:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def read_only(slot: str) -> Any:
    """A property that reads a slot, at the speed of C."""
    return property(attrgetter(slot))
