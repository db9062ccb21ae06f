"""Tables for the documentation, made from the registry."""

from __future__ import annotations

import math

from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.metadata_file import RECORD
from ctxext.methods import ContextMethod, RopeMethod, RopeScaling, list_methods

_ROPE = RopeGeometry.plain(dim=128, rope_theta=10_000.0, length=4096)
# Encodings other than RoPE: most families store them in weights or config, some only in code.
_SAVED = {
    "learned": "weights",
    "sinusoidal": f"weights, or `{RECORD}` where the model computes its table",
    "alibi": f"`{RECORD}`",
    "t5": "`relative_attention_max_distance`",
    "relative": f"weights, or `{RECORD}` where the model computes its distances",
}


def saved_as(method: type[ContextMethod]) -> str:
    """Where a saved model holds the extension: a `rope_type` for plain transformers, or `context_extension.json`."""
    if not issubclass(method, RopeMethod):
        return _SAVED[method.encoding]
    example = method.example(_ROPE, factor=4.0)
    if not isinstance(example, RopeScaling):
        return f"`{RECORD}`"
    if not example.in_attention:
        return _rope_type(example)
    return f"`{RECORD}`, or frozen: {_rope_type(example.at_length(_ROPE, 4 * _ROPE.original_max_position_embeddings))}"


def _rope_type(method: RopeScaling) -> str:
    parameters = method.rope_parameters(_ROPE)
    raised = parameters["rope_type"] == "default" and not math.isclose(parameters["rope_theta"], _ROPE.rope_theta)
    return "`rope_theta`" if raised else f"`{parameters['rope_type']}`"


def sentence(method: type[ContextMethod]) -> str:
    """The first sentence of the method's docstring."""
    return (method.__doc__ or "").strip().splitlines()[0].split(". ")[0].rstrip(".")


def method_table() -> str:
    """The table of methods, in Markdown."""
    lines = ["| method | for | what it does | paper | saved as | use |", "|---|---|---|---|---|---|"]
    for method in list_methods():
        alias = f" ({', '.join(f'`{a}`' for a in method.aliases)})" if method.aliases else ""
        paper = f"[{method.paper.title}]({method.paper.url}), {method.paper.year}"
        lines.append(
            f"| `{method.name}`{alias} | {method.encoding} | {sentence(method)} | {paper} | {saved_as(method)} | "
            f"{method.training} |"
        )
    return "\n".join(lines)
