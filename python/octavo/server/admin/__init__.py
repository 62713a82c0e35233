"""Admin listener: loads, unloads and swaps models while the server runs."""
