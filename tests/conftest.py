"""What all tests need."""

import signal

from hypothesis import settings

# A shell that runs the tests in the background has them, and every process they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that took long says how busy the machine is, not that a claim is false.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
