"""The standard workloads, behind `octavo bench`."""
