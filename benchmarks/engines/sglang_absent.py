"""Empty stand-ins for packages that SGLang imports and a CPU does not have, or that have nothing to do with RoPE.

Importing this file makes them importable.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("IPython", "cuda", "cutlass", "gguf", "orjson", "sgl_kernel", "torchvision")


class Empty(type):
    """A class with any attribute, which as a decorator changes nothing."""

    def __getattr__(cls, name: str) -> Empty:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else cls


class EmptyModule(ModuleType):
    __version__, __path__ = "0", list[str]()

    def __getattr__(self, name: str) -> Empty:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class Absent(MetaPathFinder, Loader):
    """Finds the packages that are not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class One(int):
    """Any part of a layer but its rotary embedding: 1, as the number of processes is, or 0 for what is off."""

    def __getattr__(self, name: str) -> One:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given: Any, **named: Any) -> One:
        return self


sys.meta_path.append(Absent())
