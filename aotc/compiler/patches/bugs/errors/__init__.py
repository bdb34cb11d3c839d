"""Errors that eager raises, and compiled code does not without these patches."""
