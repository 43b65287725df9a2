"""What checkpoints are called; without torch, for who starts a job."""

from __future__ import annotations

import re

MANIFEST = "checkpoint.json"
BEST_FILE, OWNER_FILE = "BEST", "OWNER"
FOLDER = "step-"
NAME = re.compile(rf"{FOLDER}\d{{9,}}(-\d+)?")
