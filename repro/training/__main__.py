"""``python -m repro.training --out DIR [--steps N] [--seed S]``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

from engines.errors import UserError
from repro.training.config import TrainConfig
from repro.training.loop import train_tiny


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m repro.training", description="Train the embedded tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the resumable state")
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--threads", type=int, default=TrainConfig.threads)
    parser.add_argument("--fresh", action="store_true", help="ignore an interrupted run in the folder")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        config = dataclasses.replace(
            TrainConfig(), steps=arguments.steps, seed=arguments.seed, threads=arguments.threads
        )
        train_tiny(config, arguments.out, resume=not arguments.fresh)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
