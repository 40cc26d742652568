"""The executor: collectives, updates and the compiled programs."""
