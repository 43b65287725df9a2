"""What `embershard bench` measures: shards, workers that pull and push or train, and what that cost."""
