"""What users bring along in a file of their own, `path/to/file.py:ClassName`, and names told nearest first."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from research_engine.engine.foreign import words_of


def callable_from_file(path: Path, attribute: str, *, kind: str, method: str) -> Callable[..., Any]:
    """The class, or function, of that name in a Python file, which is run.

    Args:
        path: the file.
        attribute: the name in it; an empty one, as of `file.py` alone, is answered with the names there are.
        kind: what it is to be, for messages: scheduler, router.
        method: that classes of the kind have, so that a message lists them and no others.

    Raises:
        ValueError: no such file or name, or the file raises; lists the classes that there are, nearest first.
    """
    if not path.is_file():
        raise ValueError(
            f"no file {str(path)!r} to take {f'the {kind} {attribute!r}' if attribute else f'a {kind}'} from"
        )
    module_name = f"research_engine_user_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {words_of(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        fitting = {
            key: value for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, method)
        }
        own = [key for key, value in fitting.items() if value.__module__ == module_name]
        classes = own or list(fitting)  # what a file only imports is not meant where it has classes of its own
        if not classes:
            raise ValueError(f"{path} has no class with a method {method}, so no {kind} to name after a colon")
        if not attribute:
            raise ValueError(f"{path}: name the {kind} in it: {', '.join(f'{path}:{name}' for name in classes)}")
        raise ValueError(f"{path} has no class {attribute!r}; {nearest_first(attribute, classes)}")
    return found


def file_and_attribute(name: str) -> tuple[Path, str] | None:
    """Of `path/to/file.py:ClassName`; an empty class where it is forgotten. None for what names no Python file."""
    path, _, attribute = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    return (Path(path).expanduser(), attribute) if path.endswith(".py") else None


def nearest_first(wrong: str, valid: Iterable[str]) -> str:
    """The end of a message about a wrong name: the valid ones, those most like it first."""
    names = list(valid)
    near = difflib.get_close_matches(wrong, names, n=len(names) or 1, cutoff=0.5)
    ordered = [*near, *(name for name in names if name not in near)]
    return f"valid ones, nearest first: {', '.join(ordered)}" if ordered else "it takes none"
