"""Adapters to training frameworks; each needs the framework it is named after, which weft itself does not."""
