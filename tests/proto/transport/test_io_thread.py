"""The I/O thread of a process, at the end of the process."""

import subprocess
import sys
import types

import pytest

from embershard.proto.transport import io_thread

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

USED_AT_EXIT = """
import atexit, asyncio
from datetime import timedelta
def submit():
    try:
        transport.submit(Pull(0, ()), timedelta(seconds=200))
    except RuntimeError as error:
        print(error)
atexit.register(submit)
import embershard
atexit.register(lambda: print(asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "sent"), io_loop()).result(200)))
from embershard.proto.messages import Pull
from embershard.proto.transport.io_thread import io_loop
from embershard.proto.transport.stream import StreamTransport
transport = StreamTransport("127.0.0.1:1")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="__cxa_atexit by ctypes")
def test_a_timer_that_is_due_behind_the_interpreters_end_does_not_crash_the_process():
    done = subprocess.run([sys.executable, "-c", ENDS_SLOWLY], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_registered_behind_the_import_still_uses_the_thread_at_exit_and_others_are_told_that_it_has_ended():
    done = subprocess.run(
        [sys.executable, "-c", USED_AT_EXIT], capture_output=True, text=True, timeout=250, check=False
    )
    sent, refused = done.stdout.splitlines()
    assert sent == "sent"
    assert "call atexit.register behind `import embershard`" in refused


def test_threads_that_gevent_has_replaced_are_refused(monkeypatch):
    """The loop would have run in the caller's own thread, for ever."""
    monkeypatch.setattr(io_thread, "_loop", None)
    patched = types.SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    with pytest.raises(RuntimeError, match=r"without gevent\.monkey\.patch_all\(\)"):
        io_thread.io_loop()
    assert io_thread._loop is None
