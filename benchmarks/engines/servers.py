"""Servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engines.conformance import EngineError

STARTS = 300  # seconds


@contextmanager
def running(
    command: Sequence[str], url: str, log: Path, *, cwd: Path | None = None, **environment: str
) -> Iterator[None]:
    """The process, from when its `url` answers.

    Raises EngineError with the end of its log if it ends, or does not answer within `STARTS`.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd, env={**os.environ, **environment})
    try:
        end = time.monotonic() + STARTS
        while True:
            try:
                urllib.request.urlopen(url, timeout=5)
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > end:
                    raise EngineError(f"{command[0]} does not answer:\n{log.read_text()[-3000:]}") from error
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
