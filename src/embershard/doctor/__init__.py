"""The checks of `embershard doctor`, by subject, each with its remedy."""
