"""The error of a lab that cannot be set up or run as asked."""


class LabError(RuntimeError):
    """Says what was asked, what is there, and what to do."""
