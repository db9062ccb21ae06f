"""Downloads from the hub, with clear errors."""

from __future__ import annotations

from pathlib import Path

from ctxext.utils.values import one_line


def hub_folder(name: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """A repository of the hub, downloaded to its cache. Raises FileNotFoundError, with the reason, if that fails."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the error classes of its HTTP library differ between versions
        raise FileNotFoundError(
            f"{name!r} is not a local folder and could not be downloaded: {_why_not_given(error, revision)}"
        ) from error


def snapshot(folder: Path) -> tuple[str, str] | None:
    """The hub name (owner/name) and the commit of a snapshot in the hub's cache; None for another folder."""
    repository, kind, commit = ("", "", "", *folder.resolve().parts)[-3:]
    name = repository.removeprefix("models--").replace("--", "/")
    return (name, commit) if kind == "snapshots" and repository.startswith("models--") and "/" in name else None


def _why_not_given(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated. Accept its terms on its hub page, and log in with `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it does not exist or is private. Check the name, or log in with `hf auth login`."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no branch, tag or commit {revision!r}. Drop the revision for its main branch."
    if isinstance(error, errors.LocalEntryNotFoundError):  # not in the cache either
        return "the hub cannot be reached. Check the connection (and HF_HUB_OFFLINE), or pass a local folder."
    return f"{one_line(error)}. Check the name and the connection, or pass a local folder."
