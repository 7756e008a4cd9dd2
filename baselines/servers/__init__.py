"""Other projects' servers, each in an environment and processes of its own: installed, started, waited for, and stopped."""
