"""What each request leaves behind: metrics, log lines, traces."""
