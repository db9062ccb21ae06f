"""RULER's thirteen tasks. Hsieh et al. (2024), arXiv:2404.06654; github.com/NVIDIA/RULER.

The prompts are RULER's word for word; the code is ours. There are two modes.

`compat="exact"`: a prompt and the room for its answer have exactly the tokens asked for, of whatever tokenizer,
BOS and chat template included. The haystack is the longest that fits, and begins with the end of one unit more
(a line, a document). The lists of `cwe` and `fwe` have no such end: what they leave over, less than a word or a
token in 2048, goes to the answer's room. A number or uuid that alone is the answer is teacher-forced, all else is
generated. Every trial has a text, words and places of its own. No distractor holds an answer, no key, value or
variable comes twice, no common word of `cwe` is a part of another word, and the three words of `fwe` are without
tie.

`compat="nvidia"` (on the command line `--setting niah_single_1.compat=nvidia`, for each task): worded, sized and scored
as NVIDIA's scripts at commit c3f5e3b (July 2026), so that published numbers can be compared. BOS is not counted; the
number of units is searched for once, on other prompts, and lowered by steps of up to 500 words where a prompt is too
long after all; essays are the beginning of the text, their last sentence cut; `vt` has one example for each length,
with other variables in every sample; the room for an answer is NVIDIA's, whatever `answer_tokens` says; the lead
follows the chat template as it is, spaces included, and is sent to servers too; all answers are generated. What
differs still:

- the streams of chance. NVIDIA's shuffles some lists with seed 42 in every sample; here each is its own, and
  keys and values are distinct;
- the essays: pass Paul Graham's as haystack. Sentences end by a regular expression, not by nltk's punkt;
- words are those of wonderwords if it is installed, else our own; where they are too few for `cwe`, words of
  the haystack follow, not NVIDIA's list of English words;
- the questions of `qa_1` and `qa_2` have to be passed as `data`: SQuAD 2.0 and HotpotQA, dev;
- the example of `cwe` is not a turn of the chat template of its own;
- a thinking model gets no lead, and room for its thoughts;
- where nothing fits, a ValueError in place of an endless loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ctxext.evals.ruler.aggregation import CommonWords, FrequentWords
from ctxext.evals.ruler.fitting import RulerTask
from ctxext.evals.ruler.niah import Niah
from ctxext.evals.ruler.qa import QuestionAnswering
from ctxext.evals.ruler.tracking import VariableTracking
from ctxext.evals.samples import add_task

# As scripts/synthetic.yaml; what a row does not name is as the class has it.
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
    add_task(_name, partial(_cls, name=_name, **_settings))
