"""Devices: ranks that use a device that another rank uses too."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.errors import DeviceError
from isobit.foundation.majority import name_ranks
from isobit.simulator.rank import Rank


def shared_devices(ranks: Sequence[Rank]) -> list[DeviceError]:
    """Report ranks that have put tensors on the device of another rank, if devices are watched.

    The device of a rank is the one of its LOCAL_RANK. A rank that is alone on another device, as in a program that
    numbers devices in its own way, is not reported.
    """
    guests: dict[int, list[str]] = {}
    devices: set[int] = set()
    for device in {index for rank in ranks for index in rank.devices_used}:
        users = [rank for rank in ranks if device in rank.devices_used]
        if len(users) > 1 and "devices" in ranks[0].watch:
            strangers = [rank for rank in users if rank.index != device]
            guests.update({rank.index: rank.devices_used[device] for rank in strangers})
            devices.add(device)
    if not guests:
        return []
    kind = ranks[0].accelerator
    named = ", ".join(f"{kind}:{device}" for device in sorted(devices))
    return [
        DeviceError(
            expected=f"each rank to use its own device, {kind}:LOCAL_RANK",
            received=f"{name_ranks(sorted(guests))} on {named}, which another rank uses",
            remedy="call set_device(LOCAL_RANK) before the first tensor, or make TrainingArguments, Accelerator or "
            "Trainer first, which do; and pass map_location to torch.load",
            ranks=sorted(guests),
            stacks=guests,
        )
    ]
