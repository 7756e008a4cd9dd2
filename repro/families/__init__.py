"""The systems a cell can name, the platforms they run on, and the calibration of simulated cards."""
