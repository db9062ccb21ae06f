"""Downloads from the hub, with clear errors."""

from __future__ import annotations

from pathlib import Path

from ctxext.utils.values import one_line


def hub_folder(name: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """A repository of the hub, downloaded to its cache.

    Raises:
        FileNotFoundError: the download failed; the error says why.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the error classes of its HTTP library differ between versions
        raise FileNotFoundError(
            f"{name!r} is not a folder here, and could not be downloaded: {_why_not_given(error, revision)}"
        ) from error


def _why_not_given(error: Exception, revision: str | None) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "its owner wants terms to be accepted first. Accept them on its page, and log in with `hf auth login`."
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such name, or it is private. Check the name; log in with `hf auth login`."
    if isinstance(error, RevisionNotFoundError):
        return f"it has no branch, tag or commit {revision!r}. Leave the revision out for its main branch."
    if isinstance(error, LocalEntryNotFoundError):  # not in the cache either
        return "it cannot be reached from here. Check the connection (and HF_HUB_OFFLINE), or pass a local folder."
    return f"{one_line(error)}. Check the name and the connection, or pass a local folder."
