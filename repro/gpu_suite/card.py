"""The card of this machine, told before anything heavy is loaded, and the platform that stands for it."""

import os
import subprocess

from engines.cost.roofline import GPUS, gpu_of_device
from engines.errors import UserError
from repro.checks.doctor import FoundGpu, torch_and_cards
from repro.families.platforms import MIB, PLATFORMS, platform

ASK_S = 30.0


def driver_card() -> FoundGpu | None:
    """The first card that this process may use, asked of nvidia-smi; None where that cannot tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    command = ["nvidia-smi", "-i", visible, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
        name, _, mebibytes = done.stdout.splitlines()[0].rpartition(",")
        return FoundGpu(name=name.strip(), memory_bytes=int(mebibytes) * MIB) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None


def torch_card() -> FoundGpu | str:
    """The card that torch runs on, or why there is none. It knows of parts of a card that nvidia-smi does not."""
    torch, error, cards = torch_and_cards()
    if torch is None:
        return f"torch cannot be loaded ({error})"
    return cards[0] if cards else "torch sees no CUDA device"


def platform_on(card: FoundGpu | None, asked: str | None) -> str:
    """The platform that is measured: that of the card, which ``asked`` has to be where it is given. Refuses a card that no
    platform stands for, and another platform than the card's."""
    known = None if card is None else gpu_of_device(card.name)
    able = [each.name for each in GPUS if each.name in PLATFORMS and platform(each.name).default_system == "dllm-serve"]
    if asked is None:
        if card is None:
            raise UserError("platform is not given and this machine has no NVIDIA card that tells it: give --platform")
        if known is None or known.name not in able:
            raise UserError(
                f"this machine's card {card.name!r} is none that a platform stands for ({', '.join(able)}): give --platform "
                "module:NAME"
            )
        return known.name
    where = platform(asked)
    if card is None or where.gpu is None or (known is None and where.name not in PLATFORMS):
        return asked
    if known is None or known.name != str(where.gpu):
        fix = "module:NAME of your own" if known is None or known.name not in able else known.name
        raise UserError(
            f"platform={asked!r} is a {where.title}, and this machine has {card.name!r}: give --platform {fix}"
        )
    return asked
