"""What users bring along in a file of their own, `path/to/file.py:ClassName`, and names told nearest first."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from research_engine.engine.foreign import words_of


def callable_from_file(path: Path, attribute: str, *, kind: str, method: str) -> Callable[..., Any]:
    """The class, or function, of that name in a Python file, which is run.

    A file that imports from its own package (`from .base import ...`) is that package's module, imported once.

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
    root = _package_of(path)
    try:
        module = _executed(f"research_engine_user_{kind}_{path.stem}", path) if root is None else _imported(path, root)
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {words_of(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        fitting = {
            key: value for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, method)
        }
        own = [key for key, value in fitting.items() if value.__module__ == module.__name__]
        classes = own or list(fitting)  # what a file only imports is not meant where it has classes of its own
        if not classes:
            raise ValueError(f"{path} has no class with a method {method}, so no {kind} to name after a colon")
        if not attribute:
            raise ValueError(f"{path}: name the {kind} in it: {', '.join(f'{path}:{name}' for name in classes)}")
        raise ValueError(f"{path} has no class {attribute!r}; {nearest_first(attribute, classes)}")
    return found


def source_files(path: Path) -> list[Path]:
    """The files that decide what a user's file does: itself, and all of its package where it imports from there."""
    root = _package_of(path)
    return [path] if root is None else sorted(root.rglob("*.py"))


def _package_of(path: Path) -> Path | None:
    """The outermost folder of the package that a file lies in and imports from; None where it needs no package."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # loading it says what is wrong
        return None
    own = root = path.resolve()
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    relative = any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))
    return root if relative and root != own else None


def _imported(path: Path, root: Path) -> ModuleType:
    """A file as a module of its package. Raises ImportError: another package has that name; or what the file raises."""
    name, parts = root.name, path.resolve().relative_to(root.parent).with_suffix("").parts
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        _executed(name, root / "__init__.py", [str(root)])
    found = getattr(importlib.import_module(name), "__file__", None)
    if found is None or Path(found).resolve() != root / "__init__.py":
        raise ImportError(f"it imports from its package {name!r}, and {found or 'another one'} has that name already")
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _executed(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """A file as a module of that name, a package's if it has folders; dataclasses look their module up."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


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
