"""Benchmarks of the whole service. They print a table, end with one JSON line, and keep results in `results/`."""
