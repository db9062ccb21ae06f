"""Runs `ctxext fit` twice in each process of a launch. Arguments: JSON with the lists of arguments, and a folder."""

import json
import sys
from pathlib import Path

from test_episodes import texts

from ctxext.cli import commands
from ctxext.utils.processes import Processes

for arguments in json.loads(sys.argv[1]):
    commands(arguments, standalone_mode=False)
(Path(sys.argv[2]) / f"texts-{Processes.here().rank}").write_text(texts())
