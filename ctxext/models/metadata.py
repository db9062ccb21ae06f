"""The extension metadata in a config: its lengths, and whether they are still valid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ctxext.utils.json_files import FACTOR, NUMBER, OBJECT, TEXT, TOKENS, JsonObject, Kind, or_none
from ctxext.utils.values import shown

RECORD = "context_extension.json"
# In config.json: the summary of the extension in `context_extension.json`. Other programs that rewrite the folder
# drop it.
BESIDE = "context_extension"

Existing = Literal["refuse", "keep", "compose", "replace"]
EXISTING = Kind(f"one of {', '.join(get_args(Existing))}", lambda value: value in get_args(Existing))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of a model and its extension, in tokens. These numbers are defined only here.

    Attributes:
        original: trained length before any scaling, from which existing="replace" starts; None if unknown.
        trained: trained length with the frequencies that the extension started from.
        start: what the factor counts from: `original`, or the maximum length of an existing scaling that is kept or
            composed with.
        target: the maximum length.
        factor: target / start, as requested.
    """

    original: int | None
    trained: int
    start: int
    target: int
    factor: float

    @property
    def words(self) -> str:
        """`512 → 2,048 tokens`"""
        return f"{self.start:,} → {self.target:,} tokens"

    @classmethod
    def of_mark(cls, mark: dict[str, Any]) -> Lengths:
        """From a config's extension metadata, in the form of `check_mark`."""
        rest = {name: mark[name] for name in ("trained", "start", "target", "factor")}
        return cls(original=mark["original"]["length"], **rest)

    def to_mark(self) -> dict[str, Any]:
        """The inverse of `of_mark`."""
        rest = asdict(self)
        return {"original": {"length": rest.pop("original")}, **rest}


def summary_of(name: str | None, lengths: Lengths) -> str:
    """`yarn ×4: 512 → 2,048 tokens`; None means that the current scaling is kept."""
    return f"{'current scaling kept' if name is None else name} ×{lengths.factor:g}: {lengths.words}"


def by_own_names(text_config: Any, updates: dict[str, Any]) -> dict[str, Any]:
    """The fields under the config's own attribute names, such as n_positions for max_position_embeddings."""
    return {text_config.attribute_map.get(name, name): value for name, value in updates.items()}


def live_mark(text_config: Any) -> dict[str, Any] | None:
    """The extension metadata in this config, checked; None if one of the fields it set was edited since."""
    mark = getattr(text_config, "ctxext", None)
    if mark is None:
        return None
    place = getattr(text_config, "_name_or_path", "")
    check_mark(mark, f"{place or 'the model'}'s config.json")
    return mark if all(still_says(getattr(text_config, n, None), v) for n, v in mark["fields"].items()) else None


def check_mark(mark: Any, file: str, entry: str = "ctxext") -> None:
    """Raise ValueError, naming the field, unless `mark` is well-formed metadata."""
    if not OBJECT.holds(mark):
        raise ValueError(f"{entry} in {file} must be {OBJECT.words}, got {shown(mark)}. Restore the file.")
    read = JsonObject(file, mark, f"{entry}.")
    kinds = {"version": TEXT, "fields": OBJECT, "method": or_none(OBJECT), "factor": FACTOR, "existing": EXISTING}
    for name, kind in {**kinds, **dict.fromkeys(("trained", "start", "target"), TOKENS)}.items():
        read.get(name, kind)
    original = read.part("original")
    original.get("length", or_none(TOKENS))
    is_rope = "rope_theta" in original.content
    if mark["method"] is not None or not is_rope:
        method = read.part("method")
        method.get("name", TEXT)
        method.get("factor", FACTOR)
    if is_rope and isinstance(original.content["rope_theta"], dict):  # by layer type
        thetas = original.part("rope_theta")
        for name in thetas.content:
            thetas.get(name, NUMBER)
    elif is_rope:
        original.get("rope_theta", NUMBER)


def still_says(now: Any, then: Any) -> bool:
    """Whether a config value is unchanged; transformers adds keys to dictionaries while loading."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and now[key] == value for key, value in then.items())
    return bool(now == then)
