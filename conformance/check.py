"""Check an engine's RoPE against the vectors of this folder. Python's standard library alone; see docs/conformance.md.

    from check import check_rope
    check_rope(rope)  # rope(config, length) -> (inv_freq, attention_factor); prints a line for each failure

Every check returns the number of failures. A function may raise NotImplementedError for what its engine lacks; if it
does so for every case, the check raises ValueError. Any other exception is a failure of that case.
"""

import json
import reprlib
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


def failures(cases: Iterable[Case], ask: Callable[[Case], Any], wrong: Callable[[Case, Any], str], shape: str) -> int:
    """How many answers fail; prints a line for each, then how many cases were checked and not supported.

    `wrong` says what is wrong with an answer, "" for nothing; it raises if the answer is not of the shape `shape`.
    """
    checked = unsupported = failed = 0
    for case in cases:
        try:
            answer = ask(case)
        except NotImplementedError:
            unsupported += 1
            continue
        except Exception as error:
            words = f"raised {type(error).__name__}: {error}"
        else:
            try:
                words = wrong(case, answer)
            except Exception:
                words = f"returned {' '.join(reprlib.repr(answer).split())}, expected {shape}"
        checked += 1
        if words:
            failed += 1
            print(f"{case['name']}: {words}")
    print(f"{checked} cases checked, {unsupported} not supported")
    if not checked:
        raise ValueError("the engine supports none of the cases, so nothing was checked.")
    return failed


def close(got: float, exact: float) -> bool:
    return abs(got - exact) <= RTOL * exact


def agrees(expected: Case, inv_freq: Sequence[float], attention_factor: float) -> bool:
    found, exact = [attention_factor, *inv_freq], [expected["attention_factor"], *expected["inv_freq"]]
    return len(found) == len(exact) and all(map(close, found, exact))


def both(got: float, exact: float) -> str:
    """Two numbers, with as many digits as tell them apart."""
    shown = ((float(f"{got:.{digits}g}"), float(f"{exact:.{digits}g}")) for digits in range(5, 18))
    return next((f"{one}, expected {other}" for one, other in shown if one != other), f"{got}, expected {exact}")


def differences(case: Case, inv_freq: Sequence[float], attention_factor: float) -> Iterator[str]:
    """What differs, in numbers."""
    if not close(attention_factor, case["attention_factor"]):
        yield f"attention factor {both(attention_factor, case['attention_factor'])}"
    if len(inv_freq) != len(case["inv_freq"]):
        yield f"{len(inv_freq)} frequencies, expected {len(case['inv_freq'])}"
        return
    for pair, (got, exact) in enumerate(zip(inv_freq, case["inv_freq"])):
        if not close(got, exact):
            yield f"inv_freq differs from pair {pair}: {both(got, exact)}"
            return


def check_rope(rope: Callable[[Case, int], tuple[Sequence[float], float]]) -> int:
    """Check rope(config, length) -> (inv_freq in radians per token, attention factor).

    A failure is printed with its numbers and the first of the known misreadings that gives the same.
    """

    def wrong(case: Case, answer: Any) -> str:
        frequencies, attention_factor = answer
        found = [float(each) for each in frequencies], float(attention_factor)
        words = list(differences(case, *found))
        if not words:
            return ""
        seen = [words for words, misread in case["known_wrong"].items() if agrees({**case, **misread}, *found)]
        words += [f"as if {misread}" for misread in seen[:1]]
        return f"{'; '.join(words)} ({case['note'] or case['source']})"

    return failures(
        cases(), lambda case: rope(case["config"], case["length"]), wrong, "(inv_freq, attention_factor), in numbers"
    )


def check_cos_sin(cos_sin: Callable[[Case, int, list[int]], tuple[Any, Any]]) -> int:
    """Check cos_sin(config, length, positions) -> (cos, sin), each [position][pair] and times the attention factor.

    An angle in float32 is off by its size times the relative error of the frequency and of one product.
    """

    def wrong(case: Case, answer: Any) -> str:
        found = []
        for name, table, rows in zip(("cos", "sin"), answer, (case["cos"], case["sin"]), strict=True):
            for position, row, exact in zip(case["positions"], table, rows, strict=True):
                for pair, value in zip(case["pairs"], exact):
                    got, angle = float(row[pair]), position * case["inv_freq"][pair]
                    if not abs(got - value) <= case["attention_factor"] * (2**-22 + angle * (RTOL + 2**-24)):
                        found.append(f"{name} at position {position}, pair {pair}: {both(got, value)}")
        return f"{len(found)} wrong; {found[0]}" if found else ""

    return failures(
        cases(),
        lambda case: cos_sin(case["config"], case["length"], case["positions"]),
        wrong,
        "(cos, sin), each with a row of all pairs for each position",
    )


def check_logprobs(logprobs: Callable[[Case, list[int]], Sequence[float]], atol: float = 1e-3) -> int:
    """Check logprobs(config fields, token_ids), log p(token_ids[k] | token_ids[:k]) in nats for k = 1, 2, ..."""
    content = json.loads((HERE / "logprobs.json").read_text(encoding="utf-8"))

    def wrong(case: Case, answer: Any) -> str:
        pairs = {at: (float(answer[at - 1]), value) for at, value in zip(content["positions"], case["logprobs"])}
        off = [at for at, (got, value) in pairs.items() if not abs(got - value) <= atol]  # NaN is wrong
        if not off:
            return ""
        return f"{len(off)} of {len(pairs)} positions, from {off[0]} to {off[-1]}; at {off[0]}: {both(*pairs[off[0]])}"

    return failures(
        content["cases"],
        lambda case: logprobs(case["config"], content["token_ids"]),
        wrong,
        f"{len(content['token_ids']) - 1} log-probabilities",
    )
