"""Engines that share nothing with llamadiff, and faults that others reported; kept_back.py is for measuring alone."""
