"""Co-reference over a long conversation: repeat the second of several poems about the same thing.

MRCR, "multi-round co-reference resolution": Vodrahalli et al. (2024), "Michelangelo", arXiv:2409.12640, and OpenAI's
data set of that name (2025), whose score is used: the ratio of difflib's SequenceMatcher, 0 unless the answer begins
with a given code. Texts are our own. The conversation is one text, as in Michelangelo, and its other turns are pages of
the haystack; in OpenAI's data every turn is a message, and all turns are requests of the same kinds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random
from string import ascii_lowercase, digits
from typing import ClassVar

from ctxext.evals.hidden import Hidden, HiddenSentences
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import register_task
from ctxext.evals.words import own_words

FORMS = {
    "poem": "My {adjective} {noun}, come {verb} with me, as {adjective2} as a {topic} can be.",
    "riddle": "I {verb} by day, I {verb2} by night, my {noun} is {adjective}, and no {topic} is so {adjective2}.",
    "letter": "Dear {noun}, the {adjective} {topic} has come. I will {verb} it and then {verb2}. Yours, the {noun2}.",
    "recipe": "Take a {adjective} {noun}, {verb} it twice, add a {noun2}, and serve it {adjective2} by the {topic}.",
    "notice": "Lost near the {topic}: a {adjective} {noun}. It may {verb}. Bring it back for a {adjective2} {noun2}.",
}  # fmt: skip
TOPICS = ("harbour", "lantern", "glacier", "cathedral", "volcano", "carousel", "lagoon", "windmill")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@register_task
@dataclass(frozen=True)
class MRCR(HiddenSentences):
    """Repeat one of several answers to the same request. Vodrahalli et al. (2024); OpenAI (2025).

    Attributes:
        needles: how often the same thing was asked for; OpenAI has 2, 4 and 8.
        distractors: requests for another form about the same topic, or the same form about another topic, in turn.
    """

    name: ClassVar[str] = "mrcr"
    metric: ClassVar[str] = "ratio"
    intro = (
        "Below is a conversation between a user and an assistant. Read it well: I will ask you about one of its turns."
    )
    phrase = re.compile(r"^(?:User|Assistant):", re.MULTILINE)
    joint = ""

    needles: int = 2
    distractors: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.needles <= len(ORDINALS):
            raise ValueError(f"needles must be 1 to {len(ORDINALS)}, got {self.needles}.")
        if not 0 <= self.distractors <= 2 * min(len(FORMS) - 1, len(TOPICS) - 1):
            raise ValueError(f"distractors must be 0 to {2 * (len(FORMS) - 1)}, got {self.distractors}.")

    def opening(self, prompter: Prompter) -> str:
        return super().opening(prompter) + "User: Read a book to me.\n\nAssistant: "

    def hide(self, words: Random, answers: Random) -> Hidden:
        forms, topics = words.sample(sorted(FORMS), len(FORMS)), words.sample(TOPICS, len(TOPICS))
        others = [(form, topics[0]) for form in forms[1:]], [(forms[0], topic) for topic in topics[1:]]
        asked = [
            *[(forms[0], topics[0])] * self.needles,
            *[others[k % 2][k // 2] for k in range(self.distractors)],
        ]
        # The one to repeat is drawn for each depth; all others are shared.
        replies = [_reply(form, topic, answers if k == 0 else words) for k, (form, topic) in enumerate(asked)]
        code = "".join(answers.choices(ascii_lowercase + digits, k=8))
        repeat = f"repeat, word for word, the {{ordinal}} {forms[0]} about the {topics[0]}"
        return Hidden(
            sentences=tuple(
                f"\n\nUser: Write a {form} about the {topic}.\n\nAssistant: {reply}\n\nUser: Read on.\n\nAssistant:"
                for (form, topic), reply in zip(asked, replies)
            ),
            references=(replies[0],),
            question=f"User: Begin with the code {code} and a colon, and {repeat}.",
            lead=f" {code}:",
        )

    def asked(self, hidden: Hidden, order: list[int]) -> Hidden:
        same = [k for k in order if k < self.needles]
        return replace(hidden, question=hidden.question.format(ordinal=ORDINALS[same.index(0)]))


def _reply(form: str, topic: str, rng: Random) -> str:
    lists = own_words()
    parts = {"adjective": lists.adjectives, "noun": lists.nouns, "verb": lists.verbs}
    drawn = {f"{kind}{k}": word for kind, words in parts.items() for k, word in zip(("", "2"), rng.sample(words, 2))}
    return FORMS[form].format(topic=topic, **drawn)
