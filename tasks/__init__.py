"""Tasks of every modality, the benchmarks, and the runner that composes them."""
