"""The errors of sessions, shards, codecs, snapshots and user-defined modules; each is an EmbershardError."""

# ruff: noqa: F403  # a list of all of them would have to be kept up

from embershard.proto.errors import *
