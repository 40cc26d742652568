"""A plan as a thing: what was decided, for which step, kept on disk and agreed between ranks."""
