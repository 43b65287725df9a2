"""embershard: a sharded parameter server for recommender models in PyTorch."""
