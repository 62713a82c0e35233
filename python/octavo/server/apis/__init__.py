"""The APIs, one folder each."""
