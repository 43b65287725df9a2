"""Benchmarks of `embershard bench`: shards, workers that pull and push or train, and their costs."""
