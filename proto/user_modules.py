"""Modules of users, in which a process finds codecs and row optimizers as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from embershard.proto.errors import BadModule, EmbershardError


def members_of(module: str) -> Mapping[str, object]:
    """Import a module and return its members by name. BadModule where it cannot be imported."""
    try:
        return vars(importlib.import_module(module))
    except EmbershardError:  # it says by itself what is wrong
        raise
    except (Exception, SystemExit) as error:  # a user's module may fail in any way, and end itself
        said = f"{type(error).__name__}: {error}"
        reason = f"cannot be imported: {said}; `python -c 'import {module}'` has to work here"
        raise BadModule(module=module, reason=reason) from error
