"""Networks by name, and inputs and first weights for them that cost no privacy."""
