"""The command `ctxext`: beside the package, whose import loads torch for seconds in which Ctrl-C may be pressed."""

import sys


def main() -> None:
    try:
        from ctxext.cli import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
