"""A process that hears nothing for a while."""

import os
import signal
from contextlib import contextmanager


@contextmanager
def standing_still(pid):
    """Stop a child of this process for as long as the block takes."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # its threads run on until the signal reaches them: on a busy machine long enough to answer
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
