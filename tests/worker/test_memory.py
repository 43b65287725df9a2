import platform

import pytest

from embershard.worker.memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_glibc_takes_the_settings() -> None:
    assert keep_freed_memory()
