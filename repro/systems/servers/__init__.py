"""Other projects' servers as systems: started for a run, or attached to, driven over HTTP and measured at the client."""
