"""What a user should hear of a file once: that it was told is remembered in the cache directory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileNotice:
    """A sentence about a file's content, which every run that reads the file would repeat.

    Attributes:
        text: the sentence.
        path: the file.
    """

    text: str
    path: Path

    def is_news(self) -> bool:
        """Whether it is said for the first time of this file as it is now. Leaves an empty file in the cache directory;
        where that cannot be written, it is news every time.
        """
        from research_engine.loading.source import cache_directory

        try:
            found = self.path.stat()
            what = f"{self.path.resolve()} {found.st_size} {found.st_mtime_ns} {self.text}"
            mark = cache_directory() / "told" / hashlib.sha256(what.encode()).hexdigest()[:16]
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch(exist_ok=False)
        except FileExistsError:
            return not mark.is_file()  # a file in the directory's place is no mark
        except OSError:
            pass
        return True
