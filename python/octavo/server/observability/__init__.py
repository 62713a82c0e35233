"""Metrics, logs, traces and health probes."""
