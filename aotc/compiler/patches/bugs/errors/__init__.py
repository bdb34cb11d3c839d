"""Errors that eager raises, and compiled code did not."""
