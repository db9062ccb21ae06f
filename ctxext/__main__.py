"""The command `ctxext`. Its imports take seconds, during which Ctrl-C may be pressed."""

import signal
import sys
from typing import Any


def main() -> None:
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, note)
    try:
        from ctxext.cli import app

        app(pressed)
    except BaseException:
        if not pressed:
            raise
        # An import that it ended may have turned it into another error, or gone on without it.
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
