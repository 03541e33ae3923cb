"""What is run by hand, apart from its tests: benchmarks, the zoo, recordings, generated pages, training."""
