"""What raymoe reports of itself: log lines, progress bars, metrics."""
