"""Tables that documents take from the registry."""

from __future__ import annotations

import math

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeScaling, list_methods

_ROPE = RopeGeometry.plain(dim=128, rope_theta=10_000.0, length=4096)


def saved_as(method: type[RopeScaling]) -> str:
    """The `rope_type` under which plain transformers loads a model extended by `method`."""
    example = method.example(_ROPE, factor=4.0)
    if example.is_dynamic:
        example = example.at_length(_ROPE, 4 * _ROPE.original_max_position_embeddings)
        return f"`{example.rope_parameters(_ROPE)['rope_type']}`, pinned"
    parameters = example.rope_parameters(_ROPE)
    raised = parameters["rope_type"] == "default" and not math.isclose(parameters["rope_theta"], _ROPE.rope_theta)
    return "`rope_theta`" if raised else f"`{parameters['rope_type']}`"


def sentence(method: type[RopeScaling]) -> str:
    """What the method does to λ: the first sentence of its docstring."""
    return (method.__doc__ or "").strip().splitlines()[0].split(". ")[0].rstrip(".")


def method_table() -> str:
    """The README's table of methods, in Markdown."""
    lines = ["| method | what it does to λ | paper | saved as | use |", "|---|---|---|---|---|"]
    for method in list_methods():
        alias = f" ({', '.join(f'`{a}`' for a in method.aliases)})" if method.aliases else ""
        paper = f"[{method.paper.title}]({method.paper.url}), {method.paper.year}"
        lines.append(
            f"| `{method.name}`{alias} | {sentence(method)} | {paper} | {saved_as(method)} | {method.training} |"
        )
    return "\n".join(lines)
