"""Model shapes (plain arithmetic), torch modules and loaders."""
