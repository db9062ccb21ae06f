"""Code retrieval: a description shares no words with the code of its function, and is true of it."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from evals.test_association import content
from evals.test_hidden import made

from ctxext.evals.functions import FUNCTIONS, Code

DONE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "squares": (([1, 2, 3],), 14),
    "palindrome": (("noon",), True),
    "vowels": (("harbour",), 3),
    "divisor": ((12, 18), 6),
    "Celsius": ((212,), 100),
    "leap": ((1900,), False),
    "factorial": ((5,), 120),
    "Fibonacci": ((6,), [0, 1, 1, 2, 3, 5]),
    "prime": ((91,), False),
    "median": (([5, 1, 3, 2],), 2.5),
    "average": (([1, 2, 6],), 3),
    "duplicates": (([2, 1, 2],), [2, 1]),
    "matrix": (([[1, 2], [3, 4]],), [[1, 3], [2, 4]]),
    "distance": ((0, 0, 3, 4), 5),
    "nested": (([[1], [2, 3]],), [1, 2, 3]),
    "binary": ((10,), "1010"),
    "circle": ((2,), 12.5663706),
    "cipher": (("xyz", 3), "abc"),
    "bisection": (([1, 3, 5], 4), 2),
    "interest": ((100, 10, 2), 121),
    "keys": (({1: 2},), {2: 1}),
    "mass": ((80, 2), 20),
    "clock": ((3725,), "1:02:05"),
    "Roman": (("XCIV",), 94),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.does)
def test_a_function_does_what_is_said_in_other_words(function) -> None:
    names: dict[str, Any] = {}
    exec(f"def it{function.code}", names)
    (arguments, result) = next(done for word, done in DONE.items() if re.search(rf"\b{word}\b", function.does))
    found = names["it"](*arguments)
    assert (list(found) if "Fibonacci" in function.does else found) == (
        pytest.approx(result) if isinstance(result, (int, float)) else result
    )
    assert not content(function.does) & content(function.code)


def test_the_functions_stand_in_the_code_as_code() -> None:
    sample = made("code", length=1500)
    for needle in sample.needles:
        (function,) = ast.parse(needle).body
        assert isinstance(function, ast.FunctionDef)
        assert f"\n\n\n{needle}" in sample.body
    assert f"def {sample.references[0]}(" in sample.needles[0]
    assert {rival for rival in sample.rivals} == {re.match(r"def (\w+)", each)[1] for each in sample.needles[1:]}


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="distractors must be 0 to 23, got 24"):
        Code(distractors=24)
