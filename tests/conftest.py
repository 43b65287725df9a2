"""What all tests need."""

import signal

# A shell that runs the tests in the background has them, and every process they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
