"""RULER's thirteen tasks. Hsieh et al. (2024), arXiv:2404.06654; github.com/NVIDIA/RULER.

The prompts have RULER's wording; the code is ours. There are two modes.

`compat="exact"`: the prompt and its answer have exactly the tokens asked for, BOS and chat template included, with any
tokenizer. The haystack begins with the end of a line or document to fill the length; `cwe` and `fwe` cannot, and leave
the remainder (less than a word or a token in 2048) to the answer. A single number or uuid is teacher-forced, all other
answers are generated. Every trial has its own text, words and places. No distractor contains an answer; no key, value
or variable occurs twice; no common word of `cwe` is part of another word; the three words of `fwe` have no ties.

`compat="nvidia"` (on the command line `--setting niah_single_1.compat=nvidia`, per task): wording, sizes and scores of
NVIDIA's scripts at commit c3f5e3b (July 2026), to compare with published numbers. BOS is not counted. The number of
units is searched for once, on other prompts, and lowered in steps of up to 500 words if a prompt is still too long.
Essays are the beginning of the text, with their last sentence cut off. `vt` has one example per length, with other
variables in every sample. An answer has NVIDIA's token limit, whatever `answer_tokens` says. The lead follows the chat
template unchanged, and is sent to servers too. All answers are generated. Differences that remain:

- random numbers: NVIDIA's code shuffles some lists with seed 42 in every sample; here every sample has its own seed,
  and keys and values are distinct;
- the essays: pass Paul Graham's as the haystack. Sentences end by a regular expression, not by nltk's punkt;
- the words are those of wonderwords if it is installed, else our own; if `cwe` needs more, words of the haystack
  follow, unless NVIDIA's list of English words is passed as `english_words`;
- the questions of `qa_1` and `qa_2` must be passed as `data`: the dev files of SQuAD 2.0 and HotpotQA;
- the example of `cwe` is not a separate turn of the chat template;
- a thinking model gets no lead, but room for its thoughts;
- if nothing fits, a ValueError instead of an endless loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ctxext.evals.ruler.aggregation import CommonWords, FrequentWords
from ctxext.evals.ruler.fitting import RulerTask
from ctxext.evals.ruler.niah import Niah
from ctxext.evals.ruler.qa import QuestionAnswering
from ctxext.evals.ruler.tracking import VariableTracking
from ctxext.evals.samples import TASKS

# NVIDIA's scripts/synthetic.yaml; other settings are the defaults of the class.
_TABLE: dict[str, tuple[type[RulerTask], dict[str, Any]]] = {
    "niah_single_1": (Niah, {"haystack": "noise"}),
    "niah_single_2": (Niah, {"haystack": "essay"}),
    "niah_single_3": (Niah, {"haystack": "essay", "value": "uuids"}),
    "niah_multikey_1": (Niah, {"haystack": "essay", "keys": 4}),
    "niah_multikey_2": (Niah, {"haystack": "needle"}),
    "niah_multikey_3": (Niah, {"haystack": "needle", "key": "uuids", "value": "uuids"}),
    "niah_multivalue": (Niah, {"haystack": "essay", "values": 4}),
    "niah_multiquery": (Niah, {"haystack": "essay", "queries": 4}),
    "vt": (VariableTracking, {"chains": 1, "hops": 4}),
    "cwe": (CommonWords, {"freq_common": 30, "freq_uncommon": 3}),
    "fwe": (FrequentWords, {"alpha": 2.0}),
    "qa_1": (QuestionAnswering, {"hops": 1}),
    "qa_2": (QuestionAnswering, {"hops": 2}),
}
RULER = tuple(_TABLE)

for _name, (_cls, _settings) in _TABLE.items():
    TASKS[_name] = partial(_cls, name=_name, **_settings)
