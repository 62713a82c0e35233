"""What every API shares of a request: decode, render, submit, stream."""
