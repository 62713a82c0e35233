"""The queue before an engine: admission, fairness, deadlines."""
