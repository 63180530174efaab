"""Comparison of the library with `cinch_reference`, byte by byte."""
