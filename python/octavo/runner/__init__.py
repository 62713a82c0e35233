"""Runs the steps that the core plans."""
