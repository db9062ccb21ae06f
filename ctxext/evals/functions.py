"""Code retrieval: find the function that does what the question describes.

After RepoQA, Liu et al. (2024), arXiv:2406.06025, whose "searching needle function" describes a function of a
repository in words. The functions are our own and their names are drawn at random, so that neither memory nor matching
words finds them. `--haystack code` hides them in Python's standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar, NamedTuple

from ctxext.evals.hidden import Hidden, HiddenSentences
from ctxext.evals.samples import register_task
from ctxext.evals.words import distinct, own_words


class Function(NamedTuple):
    """A function.

    Attributes:
        does: what it does, in words that its code does not have.
        named: a pattern of the names that it has elsewhere: a text that defines one is not used.
        code: its parameters and its body.
    """

    does: str
    named: str
    code: str


FUNCTIONS = (
    Function(
        "adds up the squares of many numbers",
        "square",
        "(items):\n    return sum(x * x for x in items)",
    ),
    Function(
        "tells whether a word is a palindrome",
        "palindrom",
        "(s):\n    return s == s[::-1]",
    ),
    Function(
        "counts vowels",
        "vowel",
        '(s):\n    return len([c for c in s if c in "aeiou"])',
    ),
    Function(
        "finds the greatest common divisor",
        "gcd|divisor",
        "(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
    ),
    Function(
        "converts Fahrenheit to Celsius",
        "fahrenheit|celsius",
        "(t):\n    return (t - 32) * 5 / 9",
    ),
    Function(
        "tells leap years",
        "leap",
        "(y):\n    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
    ),
    Function(
        "computes the factorial",
        "factorial",
        "(n):\n    x = 1\n    for k in range(2, n + 1):\n        x *= k\n    return x",
    ),
    Function(
        "generates the Fibonacci sequence",
        "fib",
        "(n):\n    a, b = 0, 1\n    for _ in range(n):\n        yield a\n        a, b = b, a + b",
    ),
    Function(
        "tells whether a number is prime",
        "prime",
        "(n):\n    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))",
    ),
    Function(
        "finds the median",
        "median",
        "(items):\n    items = sorted(items)\n    return (items[(len(items) - 1) // 2] + items[len(items) // 2]) / 2",
    ),
    Function(
        "computes the average",
        "mean|average",
        "(items):\n    return sum(items) / len(items)",
    ),
    Function(
        "removes duplicates",
        "dup|uniq",
        "(items):\n    return list(dict.fromkeys(items))",
    ),
    Function(
        "transposes a matrix",
        "transpose",
        "(a):\n    return [list(c) for c in zip(*a)]",
    ),
    Function(
        "measures the distance between two points",
        "dist|hypot",
        "(x, y, u, v):\n    return ((x - u) ** 2 + (y - v) ** 2) ** 0.5",
    ),
    Function(
        "flattens a nested collection",
        "flatten",
        "(items):\n    return [x for part in items for x in part]",
    ),
    Function(
        "writes a number in binary",
        "bin(?:ary)?(?![a-z])",
        '(n):\n    s = ""\n    while n:\n        s, n = str(n & 1) + s, n >> 1\n    return s',
    ),
    Function(
        "computes the area of a circle",
        "area|circle",
        "(r):\n    return 3.14159265 * r * r",
    ),
    Function(
        "encrypts with the Caesar cipher",
        "caesar|rot13|crypt",
        '(s, k):\n    return "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in s)',
    ),
    Function(
        "does a bisection search",
        "bisect|search",
        "(items, x):\n"
        "    low, high = 0, len(items)\n"
        "    while low < high:\n"
        "        mid = (low + high) // 2\n"
        "        low, high = (mid + 1, high) if items[mid] < x else (low, mid)\n"
        "    return low",
    ),
    Function(
        "computes compound interest",
        "interest",
        "(p, r, n):\n    return p * (1 + r / 100) ** n",
    ),
    Function(
        "swaps keys and values",
        "invert|swap|flip",
        "(d):\n    return {v: k for k, v in d.items()}",
    ),
    Function(
        "computes the body mass index",
        "bmi|mass",
        "(kg, m):\n    return kg / m**2",
    ),
    Function(
        "turns seconds into a clock time",
        "time|clock",
        '(n):\n    return f"{n // 3600}:{n % 3600 // 60:02}:{n % 60:02}"',
    ),
    Function(
        "reads Roman numerals",
        "roman",
        "(s):\n"
        '    d = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}\n'
        "    n = [d[c] for c in s] + [0]\n"
        "    return sum(-a if a < b else a for a, b in zip(n, n[1:]))",
    ),
)


@register_task
@dataclass(frozen=True)
class Code(HiddenSentences):
    """Which function counts vowels? After Liu et al. (2024).

    Attributes:
        distractors: other functions of the same kind.
    """

    name: ClassVar[str] = "code"
    intro = "Read the code below well: I will ask you which of its functions does something."
    joint = "\n\n\n"

    distractors: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.distractors < len(FUNCTIONS):
            raise ValueError(f"distractors must be 0 to {len(FUNCTIONS) - 1}, got {self.distractors}.")

    def hide(self, words: Random, answers: Random) -> Hidden:
        functions = words.sample(FUNCTIONS, 1 + self.distractors)
        lists = own_words()
        new = distinct(lambda: f"{answers.choice(lists.adjectives)}_{answers.choice(lists.nouns)}")
        names = list(islice(new, len(functions)))
        return Hidden(
            sentences=tuple(f"def {name}{each.code}\n" for name, each in zip(names, functions)),
            references=(names[0],),
            rivals=tuple(names[1:]),
            question=f"Which of the functions above {functions[0].does}? Answer with its name.",
            lead=f" The function that {functions[0].does} is called",
            taken=re.compile(rf"\bdef \w*(?:{functions[0].named})", re.IGNORECASE),
        )
