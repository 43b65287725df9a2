"""What tests of several folders share, a noun to a module."""
