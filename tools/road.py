"""The road of `factor` from extend_context to the frequencies of a live model, seen by running it.

PYTHONPATH=tools:tests/support python tools/road.py     # writes docs/architecture.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext import extend_context
from ctxext.methods import YaRN
from ctxext.patches.rotary import RotarySite

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
# Two stops: where the method is made, and where the family's class builds the new frequencies.
STOPS = (YaRN.__init__.__code__, RotarySite.build.__code__)


def hops() -> list[str]:
    """The functions of ctxext that were on the stack at a stop, `room/file.py: function`, in the order of the road."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or frame.f_code not in STOPS:
            return
        stack, at = [], frame if frame.f_code is STOPS[1] else frame.f_back
        while at is not None:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(ROOT / "ctxext"):
                stack.append(f"{path.relative_to(ROOT / 'ctxext')}: {at.f_code.co_qualname}")
            at = at.f_back
        found.extend(name for name in reversed(stack) if name not in found)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    ))  # fmt: skip
    sys.setprofile(profile)
    try:
        extend_context(model, 4.0, "yarn")
    finally:
        sys.setprofile(None)
    return found


def drawing() -> str:
    """The hops as a Mermaid drawing, one box a room."""
    rooms: dict[str, list[str]] = {}
    names = hops()
    for number, name in enumerate(names, 1):
        room = name.split("/")[0] if "/" in name else "api"
        rooms.setdefault(room, []).append(f'    h{number}["{number}. {name.split("/")[-1]}"]')
    boxes = [line for room, lines in rooms.items() for line in (f"  subgraph {room}", *lines, "  end")]
    arrows = "  " + " --> ".join(f"h{number}" for number in range(1, len(names) + 1))
    return "\n".join(["```mermaid", "flowchart LR", *boxes, arrows, "```"])


def updated(page: str) -> str:
    return re.sub(r"```mermaid.*?```", lambda _: drawing(), page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
