"""Training of the embedded tiny model."""
