"""The I/O thread of a process, at the end of the process."""

import subprocess
import sys

import pytest

# C runs what __cxa_atexit is given behind the interpreter's end, as it does the destructors of torch
ENDS_SLOWLY = """
import ctypes, time
from embershard.proto.transport.io_thread import io_loop
loop = io_loop()
loop.call_soon_threadsafe(loop.call_later, 0.5, print)
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(1_000_000), None)
time.sleep(0.2)  # until the loop waits for its timer
"""


@pytest.mark.skipif(sys.platform != "linux", reason="__cxa_atexit by ctypes")
def test_a_timer_that_is_due_behind_the_interpreters_end_does_not_crash_the_process():
    done = subprocess.run([sys.executable, "-c", ENDS_SLOWLY], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
