"""What feeds requests to an engine and stamps their times."""
