"""TGI's API."""
