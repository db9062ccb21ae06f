"""Model types examined in processes of their own, so that a crash or a hang is a row and not the end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from survey.matrix import Row, examine

TIME_LIMIT = 60.0  # seconds for one model type


def examine_all(types: dict[str, str], workers: int = 2, time_limit: float = TIME_LIMIT) -> Iterator[Row]:
    """A row for each of `types` (model type: kind), in the order in which they are done."""
    waiting = list(types.items())[::-1]
    team = [_Worker() for _ in range(min(workers, len(types)))]
    try:
        while waiting or any(worker.task for worker in team):
            wait([worker.connection for worker in team], timeout=0.5)
            for place, worker in enumerate(team):
                row, alive = worker.look(time_limit)
                if not alive:
                    worker.stop()
                    team[place] = worker = _Worker()
                if row is not None:
                    yield row
                if worker.is_ready and worker.task is None and waiting:
                    worker.give(*waiting.pop())
    finally:
        for worker in team:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.task: tuple[str, str] | None = None
        self.since = time.monotonic()

    def give(self, model_type: str, kind: str) -> None:
        self.task, self.since = (model_type, kind), time.monotonic()
        self.connection.send(self.task)

    def look(self, time_limit: float) -> tuple[Row | None, bool]:
        """The row that it has finished, if any, and whether it can go on."""
        try:
            if self.connection.poll():
                row: Row | None = self.connection.recv()
                self.is_ready, self.task = True, None
                return row, True
        except (EOFError, ConnectionError):
            self.process.join()
            return self._lost(f"its process ended with exit code {self.process.exitcode}"), False
        if self.task is not None and time.monotonic() - self.since > time_limit:
            return self._lost(f"not done in {time_limit:g} seconds"), False
        return None, True

    def _lost(self, why: str) -> Row:
        if self.task is None:
            raise RuntimeError(f"a worker of the survey could not start: {why}. Run with --workers 1 to see why.")
        model_type, kind = self.task
        return Row(model_type=model_type, kind=kind, verdict="unbuildable", reason=why)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # what was imported stays; collecting between models is then cheap
    connection.send(None)
    while True:
        try:
            model_type, kind = connection.recv()
        except EOFError:
            return
        connection.send(examine(model_type, kind))
        gc.collect()
