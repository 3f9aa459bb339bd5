"""Stands in for a run: trains until it is asked to stop, then takes a while for its checkpoint."""

import json
import os
import signal
import sys
import time
from pathlib import Path

notes = Path(os.environ["FAKE_NOTES"])
(notes / "fit.json").write_text(json.dumps(sys.argv[1:]))
if os.environ["FAKE_FIT"].isdigit():
    sys.exit(int(os.environ["FAKE_FIT"]))
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
(notes / "training").touch()
while not asked:
    time.sleep(0.02)
(notes / "stopping").touch()
time.sleep(0.5)
(notes / "asked.json").write_text(json.dumps(asked))
sys.exit(128 + asked[0])
