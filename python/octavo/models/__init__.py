"""Architectures: from a configuration to a `DecoderSpec`, and the names of the weights."""
