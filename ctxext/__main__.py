"""The command `ctxext`. Its imports take seconds, during which Ctrl-C may be pressed."""

import sys


def main() -> None:
    try:
        from ctxext.cli import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
