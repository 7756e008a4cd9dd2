"""Platforms of the package by the names that tests have for them."""

from repro.systems.platforms import platform

CPU_TINY = platform("cpu-tiny")
RTX4090 = platform("rtx4090")
L40S = platform("l40s")
H200 = platform("h200")
H20_LLADA2_MINI = platform("h20-llada2-mini")
H200_LLADA2_MINI = platform("h200-llada2-mini")
H200_SDAR_8B = platform("h200-sdar-8b")
