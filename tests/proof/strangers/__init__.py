"""Engines written for the tests from scratch: no line of theirs is the package's, nor calls it."""
