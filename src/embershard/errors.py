"""Every error that sessions, shards and snapshots raise of themselves; each is an EmbershardError."""

# ruff: noqa: F403  # a list of all of them would have to be kept up

from embershard.proto.codec_errors import *
from embershard.proto.errors import *
from embershard.proto.snapshot_errors import *
from embershard.proto.user_modules import *
