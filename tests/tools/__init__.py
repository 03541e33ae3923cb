"""What is run by hand, apart from what pytest collects: benchmarks, the zoo, recordings, generated pages, training."""
