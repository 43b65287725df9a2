"""What `embershard doctor` looks at: small checks by subject, each with its remedy."""
