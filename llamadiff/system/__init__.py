"""The machine: files, processes, errors, exits. Knows nothing of models."""
