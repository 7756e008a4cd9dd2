"""The serving systems this project implements. Policies here never import torch; executors may."""
