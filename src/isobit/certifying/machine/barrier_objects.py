"""Barrier objects (mbarrier), elect.sync and the fences between threads and asynchronous work."""

from __future__ import annotations

import numpy as np

from isobit.certifying.machine.mbarriers import Arrival, Mbarriers
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.races import AsynchronousRaces
from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array
from isobit.certifying.ptx import Immediate, Instruction, Operand, Pair, Sink
from isobit.certifying.running.refusals import (
    BarrierWaitError,
    DivergentBranchError,
    OpcodeError,
    refuse,
    unknown,
)


def barriers(machine: State) -> Mbarriers:
    """Return the barrier objects of the CTA."""
    if "mbarriers" not in machine.state:

        def fail(received: str) -> Exception:
            return refuse(
                BarrierWaitError,
                machine.current,
                expected="each phase of a barrier object to be completed before it is waited for",
                received=received,
                remedy="check mbarrier.init, the arrivals and the parity that is waited for",
            )

        machine.state["mbarriers"] = Mbarriers(fail)
        if isinstance(machine.races, AsynchronousRaces):
            machine.races.barriers = machine.state["mbarriers"]
    found: Mbarriers = machine.state["mbarriers"]
    return found


def value_at(machine: State, operand: Operand, width: int, thread: int) -> int:
    """Return an operand of one thread; refuse one that depends on data."""
    if machine.tainted(operand):
        raise unknown(machine.current, "an operand that depends on float data in")
    return int(machine.bits(operand, width)[thread])


def issuing_thread(machine: State, mask: Array | None) -> int | None:
    """Return the one thread that executes an instruction, or None if none does."""
    threads = np.arange(machine.threads) if mask is None else np.flatnonzero(mask)
    if len(threads) > 1:
        raise refuse(
            DivergentBranchError,
            machine.current,
            expected="one thread, chosen by elect.sync",
            received=f"{len(threads)} threads that execute it",
            remedy="check the guard of the instruction",
        )
    return int(threads[0]) if len(threads) else None


@decoder("elect.sync")
def elect(instruction: Instruction) -> Step:
    """Choose one thread of each warp: the first."""
    pair, members = (*instruction.operands, None, None)[:2]
    if not isinstance(pair, Pair) or not isinstance(members, Immediate):
        raise unknown(instruction, "operands of")
    if members.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise unknown(instruction, "a part of a warp in")

    def step(machine: State, mask: Array | None) -> None:
        if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
            raise unknown(instruction, "a part of a warp in")
        machine.write(pair.first, np.zeros(machine.threads, np.uint32), mask)
        machine.write(pair.second, np.arange(machine.threads) % 32 == 0, mask)

    return step


@decoder("mbarrier.init", "mbarrier.inval")
def lifetime(instruction: Instruction) -> Step:
    """Make or end a barrier object."""
    makes = instruction.parts[1] == "init"
    if instruction.parts[2:] != ("shared::cta", "b64") or len(instruction.operands) != 1 + makes:
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        thread = issuing_thread(machine, mask)
        if thread is None:
            return
        address = int(machine.address(instruction.operands[0])[thread])
        if makes:
            count = value_at(machine, instruction.operands[1], 32, thread)
            barriers(machine).init(address, count, thread)
        else:
            barriers(machine).invalidate(address, thread)

    return step


@decoder("mbarrier.arrive")
def arrive(instruction: Instruction) -> Step:
    """Count an arrival; `expect_tx` announces bytes of bulk copies too."""
    announces = instruction.parts[2] == "expect_tx"
    rest = instruction.parts[3:] if announces else instruction.parts[2:]
    if rest != ("shared::cta", "b64") or not isinstance(instruction.operands[0], Sink):
        raise unknown(instruction)
    if len(instruction.operands) not in ((3,) if announces else (2, 3)):
        raise unknown(instruction, "number of operands of")

    def step(machine: State, mask: Array | None) -> None:
        threads = np.arange(machine.threads) if mask is None else np.flatnonzero(mask)
        addresses = machine.address(instruction.operands[1])
        for thread in threads.tolist():
            number = 1
            if len(instruction.operands) == 3:
                number = value_at(machine, instruction.operands[2], 32, thread)
            barrier = barriers(machine).get(int(addresses[thread]), thread)
            barrier.arrive(1 if announces else number, number if announces else 0)

    return step


@decoder("mbarrier.try_wait")
def try_wait(instruction: Instruction) -> Step:
    """Wait for a phase: asynchronous work that completes it ends now, or the wait is refused."""
    if instruction.parts[2:] != ("parity", "shared::cta", "b64") or len(instruction.operands) != 3:
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        threads = np.ones(machine.threads, bool) if mask is None else mask
        target, where, parity = instruction.operands
        if machine.tainted(parity):
            raise unknown(instruction, "a parity that depends on float data in")
        addresses, parities = machine.address(where), machine.bits(parity, 32) & np.uint32(1)
        for address in np.unique(addresses[threads]).tolist():
            for one in (0, 1):
                waiting = threads & (addresses == address) & (parities == one)
                if waiting.any():
                    first = int(np.flatnonzero(waiting)[0])
                    barrier = barriers(machine).get(address, first)
                    end_work(machine, barrier.wait(one), waiting)
                    barriers(machine).waited.setdefault(address, set()).update(
                        np.flatnonzero(waiting).tolist()
                    )
                    if waiting.all():
                        barrier.ended.clear()
        machine.write(target, np.ones(machine.threads, bool), mask)

    return step


def end_work(machine: State, arrivals: list[Arrival], threads: Array) -> None:
    """Let the work behind arrivals end for the threads that waited."""
    order = machine.asynchronous
    if order is None:
        return
    for arrival in arrivals:
        works = [
            each
            for each in order.open.values()
            if each.pipe == arrival.pipe
            and (each.number == arrival.ends or (each.number < arrival.ends and arrival.count))
        ]
        order.end(works, threads)
        for work in works:
            if work.box is None or work.number in order.open:
                continue
            if isinstance(machine.races, AsynchronousRaces):
                machine.races.forget(machine.shared, *work.box)


@decoder("fence.proxy.async", "fence.mbarrier_init")
def fence(instruction: Instruction) -> Step:
    """Order writes of threads before asynchronous work that follows."""
    proxy = instruction.parts[1] == "proxy"
    known = (("async",), ("async", "shared::cta")) if proxy else (("release", "cluster"),)
    if instruction.parts[2:] not in known or instruction.operands:
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        if proxy and machine.asynchronous is not None:
            everyone = np.ones(machine.threads, bool)
            machine.asynchronous.fence_proxy(everyone if mask is None else mask)

    return step


@decoder("setmaxnreg", "brx.idx", "barrier.cluster", "mapa", "clusterlaunchcontrol")
def refused(instruction: Instruction) -> Step:
    """Refuse by name what Triton emits for warp specialisation and for clusters of CTAs."""
    specialised = instruction.parts[0] in ("setmaxnreg", "brx")
    raise refuse(
        OpcodeError,
        instruction,
        expected="warps that run the same code" if specialised else "CTAs that run by themselves",
        received="warp specialisation" if specialised else "a cluster of CTAs",
        remedy="compile with warp_specialize=False" if specialised else "compile with num_ctas=1",
    )
