"""Arrays in, floats out: metrics, roundings, tolerances."""
