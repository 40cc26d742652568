"""From the user's model and loss to one functional ATen graph."""
