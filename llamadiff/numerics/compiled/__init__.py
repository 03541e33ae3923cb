"""What is compiled when the package is installed, and does no more than NumPy does without it: it is faster.

kernels.c is C, and knows nothing of Python. Where there was no compiler, everything here answers None.
"""
