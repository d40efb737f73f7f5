"""The version of this library; the metadata of its packages is made from it."""

__version__ = "0.1.0"
