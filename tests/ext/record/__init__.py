"""Tests of what judges the tensors of a file, and of checkpoints that become one."""
