"""tools/claims.py: the draw is deterministic and local, and docs/claims.md proves what the pages still say."""

from __future__ import annotations

import re

import claims
import pytest

PROVEN = re.findall(r"^## (\d+)\. \[(\S+)\]\(\S+\)\n\n> (.+)\n", claims.PAGE.read_text(encoding="utf-8"), re.M)


def test_twenty_claims_are_proven_and_stand_in_their_pages_word_for_word() -> None:
    assert [int(number) for number, _, _ in PROVEN] == list(range(1, 21))
    assert [(page, claim) for _, page, claim in PROVEN] == claims.pick(0), "prove what is drawn now"
    texts = claims.texts()
    edited = [f"{number}. {page}" for number, page, claim in PROVEN if claim not in claims.claims(texts[page])]
    assert edited == [], "prove these claims again, and quote them as they are now"


def test_an_edit_changes_its_own_claim_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = claims.pick(0)
    assert before == claims.pick(0)
    assert len(before) == 20
    assert before != claims.pick(1)
    texts = claims.texts()
    page, claim = before[9]
    edited = "The number is 5, as `this` sentence says, not what it said."
    first, *rest = claim.split()
    pattern = r"\s+".join(map(re.escape, [first, *rest]))
    texts[page], changes = re.subn(pattern, edited, texts[page], count=1)
    assert changes == 1
    monkeypatch.setattr(claims, "texts", lambda: texts)
    assert len({*before} - {*claims.pick(0)} - {(page, claim)}) <= 1  # a newcomer may take the last place


def test_sentences_and_rows_with_a_number_or_a_name_are_claims() -> None:
    text = (
        "# Title of 3 words\n\nThis sentence has nothing to prove at all, it is plain. The factor is 4 on\n"
        "every model that was tried in this table. Who finds 5 of them in this?\n\n"
        "| method | perplexity |\n|---|---|\n| `yarn`, with its attention factor | 17.7 nats |\n\n"
        "- It calls `extend_context` once for each of the models.\n"
    )
    assert claims.claims(text) == [
        "The factor is 4 on every model that was tried in this table.",
        "| `yarn`, with its attention factor | 17.7 nats |",
        "It calls `extend_context` once for each of the models.",
    ]
