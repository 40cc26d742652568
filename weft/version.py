"""The version, where a plan and the package find the same one."""

__version__ = "0.1.0"
