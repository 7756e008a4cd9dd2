"""Other projects' servers: we install, start, wait for and stop each in an environment and processes of its own."""
