"""What `embershard compare` does: runs of one job in several arms, what they came to, and whether it paid."""
