"""Check an engine's RoPE against the vectors of this folder. Python's standard library alone; see docs/conformance.md.

    from check import check_rope
    check_rope(rope)  # rope(config, length) -> (inv_freq, attention_factor); prints a line for each failure

Every check returns the number of failures. A function may raise NotImplementedError for what its engine lacks; if it
does so for every case, the check raises ValueError.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("linear", "theta", "yarn", "llama3", "longrope", "partial", "reading")
RTOL = 2e-6  # of a frequency or an attention factor computed in float32

Case = dict[str, Any]


def cases() -> Iterator[Case]:
    for name in FILES:
        yield from json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def answered(cases: Iterable[Case], ask: Callable[[Case], Any]) -> Iterator[tuple[Case, Any]]:
    """Each case with the engine's answer; prints how many it has, and how many it does not support."""
    checked = unsupported = 0
    for case in cases:
        try:
            answer = ask(case)
        except NotImplementedError:
            unsupported += 1
        else:
            checked += 1
            yield case, answer
    print(f"{checked} cases checked, {unsupported} not supported")
    if not checked:
        raise ValueError("the engine supports none of the cases, so nothing was checked.")


def agrees(expected: Case, inv_freq: Sequence[float], attention_factor: float) -> bool:
    found, exact = [attention_factor, *inv_freq], [expected["attention_factor"], *expected["inv_freq"]]
    return len(found) == len(exact) and all(abs(got - value) <= RTOL * value for got, value in zip(found, exact))


def check_rope(rope: Callable[[Case, int], tuple[Sequence[float], float]]) -> int:
    """Check rope(config, length) -> (inv_freq in radians per token, attention factor); names known wrong readings."""
    failures = 0
    for case, found in answered(cases(), lambda case: rope(case["config"], case["length"])):
        if not agrees(case, *found):
            failures += 1
            seen = [words for words, wrong in case["known_wrong"].items() if agrees({**case, **wrong}, *found)]
            print(
                f"{case['name']}: {'as if ' + '; '.join(seen) if seen else 'wrong'} ({case['note'] or case['source']})"
            )
    return failures


def check_cos_sin(cos_sin: Callable[[Case, int, list[int]], tuple[Any, Any]]) -> int:
    """Check cos_sin(config, length, positions) -> (cos, sin), each [position][pair] and times the attention factor.

    An angle in float32 is off by its size times the relative error of the frequency and of one product.
    """
    failures = 0
    for case, tables in answered(cases(), lambda case: cos_sin(case["config"], case["length"], case["positions"])):
        wrong = []
        for table, exact in zip(tables, (case["cos"], case["sin"]), strict=True):
            for position, got, row in zip(case["positions"], table, exact, strict=True):
                for pair, value in zip(case["pairs"], row):
                    angle = position * case["inv_freq"][pair]
                    if not abs(got[pair] - value) <= case["attention_factor"] * (2**-22 + angle * (RTOL + 2**-24)):
                        wrong.append(f"position {position}, pair {pair}: {got[pair]}, not {value}")
        if wrong:
            failures += 1
            print(f"{case['name']}: {len(wrong)} wrong; {wrong[0]}")
    return failures


def check_logprobs(logprobs: Callable[[Case, list[int]], Sequence[float]], atol: float = 1e-3) -> int:
    """Check logprobs(config fields, token_ids), log p(token_ids[k] | token_ids[:k]) in nats for k = 1, 2, ..."""
    content, failures = json.loads((HERE / "logprobs.json").read_text(encoding="utf-8")), 0
    for case, found in answered(content["cases"], lambda case: logprobs(case["config"], content["token_ids"])):
        exact = dict(zip(content["positions"], case["logprobs"]))
        wrong = [at for at, value in exact.items() if not abs(found[at - 1] - value) <= atol]  # NaN is wrong
        if wrong:
            failures += 1
            print(f"{case['name']}: {len(wrong)} of {len(exact)} positions, from {wrong[0]} to {wrong[-1]}")
    return failures
