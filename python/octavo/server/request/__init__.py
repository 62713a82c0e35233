"""Common to all APIs: decode, render, submit, collect and stream a request."""
