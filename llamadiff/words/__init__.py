"""What is said of a result: the finding, its proof, what to do next."""
