"""Where a candidate comes from: one file a kind, each of which ends in the same trace."""
