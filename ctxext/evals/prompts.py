"""Turn questions into token ids: special tokens, chat template and answer, by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Style = Literal["base", "chat", "thinking"]


def check_style(style: str) -> None:
    if style not in get_args(Style):
        raise ValueError(f"style must be one of {', '.join(get_args(Style))}, got {style!r}.")


class Prompter:
    """Writes prompts for one tokenizer in one style.

    Args:
        style: "base" continues the text; "chat" uses the chat template with thinking off; "thinking" with thinking on.
            None: "chat" if the tokenizer has a template.
        answer_tokens: None: the prompt begins the answer (" The pass key is") and leaves room for exactly the answer. A
            number: leave at least this many tokens (`room`) for a free-form answer, which is generated; for base models
            the prompt still begins the answer. Thinking models get 1024 tokens by default.

    Raises:
        ValueError: the style is unknown or needs a chat template that the tokenizer lacks; `answer_tokens` is below 1.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, style: Style | None = None, answer_tokens: int | None = None
    ) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if style is not None:
            check_style(style)
        if style in ("chat", "thinking") and not template:
            raise ValueError(f"style={style!r} needs a chat template, and this tokenizer has none. Use style='base'.")
        self.tokenizer = tokenizer
        if answer_tokens is not None and answer_tokens < 1:
            raise ValueError(f"answer_tokens must be >= 1, got {answer_tokens}.")
        self.style: Style = style or ("chat" if template else "base")
        self.answer_tokens = 1024 if answer_tokens is None and self.style == "thinking" else answer_tokens

    def prompt(self, body: str, lead: str) -> str:
        """The whole prompt: what the user says, and how the answer begins (" The pass key is ")."""
        begun = lead if self.style == "base" else lead.lstrip() if self.begins else ""
        return self.asked(body) + begun

    @property
    def begins(self) -> bool:
        """Whether prompts begin the answer for the model."""
        return self.style == "base" or self.answer_tokens is None

    def asked(self, body: str) -> str:
        """The prompt up to the answer: `body` in the chat template, or `body` itself in style "base"."""
        if self.style == "base":
            return body
        prompt: Any = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": body}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.style == "thinking",
        )
        return str(prompt)

    def room(self, lead: str, answer: str) -> int:
        """Tokens for a generated answer: `answer_tokens`, or those of the right answer if that is longer.

        The right answer includes its lead where the prompt does not begin it.
        """
        said = answer if self.begins else lead + answer
        return max(self.answer_tokens or 0, len(self.tokenizer(said, add_special_tokens=False)["input_ids"]))

    def divided(self, lead: str, answer: str) -> tuple[str, str]:
        """`lead + answer`, split where the answer's first token begins.

        If the space before a digit is a token of its own, it belongs to the lead: a model that would not write a number
        shows it at the next token.
        """
        bare, spaced, whole = (self.encode(text) for text in (lead, lead + " ", lead + answer))
        is_token = answer.startswith(" ") and len(whole) > len(spaced) and spaced[:-1] == bare
        if is_token and whole[: len(spaced)] == spaced:
            return lead + " ", answer[1:]
        return lead, answer

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids, with the special tokens that the tokenizer puts before a text."""
        bare = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        return [*self.special, *bare]

    def answer_size(self, prompt: str, answer: str) -> int:
        """The tokens of `answer` after `prompt`.

        Raises:
            ValueError: the tokenizer cannot encode the answer, or merges its beginning with the prompt.
        """
        alone, ids = self.encode(prompt), self.encode(prompt + answer)
        read = self.decode(ids[len(alone) :])
        if ids[: len(alone)] != alone or read.strip() != answer.strip():
            raise ValueError(
                f"this tokenizer cannot encode the answer {answer!r} after the prompt: it decodes to {read!r}. Its "
                "answers cannot be scored token by token."
            )
        return len(ids) - len(alone)

    def answer_text(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], budget: int) -> str:
        """Decode a model's answer, without special tokens and thoughts; one of `budget` tokens was cut off."""
        text = self.decode(answer_ids)
        if self.style == "thinking":
            _, closed, said = text.rpartition("</think>")
            began = "<think>" in text or self.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
            ran_out = len(answer_ids) >= budget
            # Thoughts that did not end within the budget are not an answer.
            text = said if closed or not (began or ran_out) else ""
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def special(self) -> list[int]:
        """The prefix of a prompt: `bos`, unless the chat template includes it."""
        return self.bos if self.style == "base" else []

    @cached_property
    def bos(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text (BOS)."""
        # Special tokens after a text would end the prompt, and are omitted.
        full, bare = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        return full[: next(k for k in range(len(full)) if full[k : k + len(bare)] == bare)]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that turns text into ids."""
        tokenizer = self.tokenizer
        fast = tokenizer.is_fast
        backend = tokenizer.backend_tokenizer.to_str() if fast else repr(sorted(tokenizer.get_vocab().items()))
        template = "" if self.style == "base" else str(tokenizer.chat_template)
        parts = (backend, self.style, str(self.answer_tokens), template, str(self.bos))
        return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
