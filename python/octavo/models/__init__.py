"""Model families: from a configuration to a decoder. A family is one file and a line in `registry`."""
