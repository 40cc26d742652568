"""What a plan looks like to a person."""
