"""One file of what a card did: attestations, contracts, machine code and times, sealed, signed and read again."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from isobit.contracts.judge.run import judge_contract
from isobit.contracts.options import Options
from isobit.contracts.store.evidence import is_signed, read_private, read_public, sign
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation import files
from isobit.foundation.records import to_json
from isobit.library.on_gpu.devices import Device
from isobit.library.on_gpu.plans import BackendWorkspace
from isobit.ops.attention.op import attention
from isobit.ops.linear.op import linear
from isobit.ops.logprob.op import linear_logprob

FORM = 1
LARGEST = 64 << 20
PURPOSE = "record of a card"  # of a signature, so that it is not one of evidence
RUNS, WARM = 20, 3

# Times of each form, next to torch's own. They are facts of a record, and no claim.


@dataclass(frozen=True)
class Timing:
    """The median time of a form, and of what stock torch calls instead; None where a call raised.

    `detail` says why.
    """

    form: str
    stock: str
    isobit_us: float | None
    stock_us: float | None
    detail: str = ""


Pair = tuple[Callable[[], Any], Callable[[], Any]]


def forms_to_time(place: torch.device, size: int) -> Iterator[tuple[str, str, Pair]]:
    """Yield (form, stock, calls): products of few and of many rows, attention and log-probabilities in bf16."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cpu").to(torch.bfloat16).to(place)

    weight = made(size, size)
    for rows in (1, 32, 512):
        x = made(rows, size)
        yield (
            f"linear {rows} × {size} × {size}",
            "torch.mm",
            pair(linear, torch.mm, x, weight, weight.t()),
        )
    depth = 128 if size >= 1024 else 16
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for queries in (1, size):
        q, k = made(1, queries, 8, depth), made(1, size, 8, depth)

        def ours(q: Tensor = q, k: Tensor = k) -> Tensor:
            return attention(q, k, k, is_causal=True)

        def stock(q: Tensor = q, k: Tensor = k) -> Tensor:
            causal = q.shape[1] == k.shape[1]
            keys = k.transpose(1, 2)
            return sdpa(q.transpose(1, 2), keys, keys, is_causal=causal)

        yield f"attention {queries} queries, {size} keys, 8 heads of {depth}", "SDPA", (ours, stock)
    ids = torch.zeros(512, dtype=torch.int64, device=place)
    x = made(512, size)

    def probabilities() -> Tensor:
        return linear_logprob(x, weight, ids)

    def gathered() -> Tensor:
        return torch.log_softmax(torch.mm(x, weight.t()).float(), -1).gather(1, ids[:, None])

    yield f"logprob 512 × {size} × {size}", "mm, log_softmax, gather", (probabilities, gathered)


def pair(
    ours: Callable[..., Any], stock: Callable[..., Any], x: Tensor, a: Tensor, b: Tensor
) -> Pair:
    """Return both calls of a product."""
    return lambda: ours(x, a), lambda: stock(x, b)


def time_forms(place: torch.device, size: int = 4096) -> list[Timing]:
    """Return the median times of forms on a device, in microseconds."""
    found = []
    with torch.no_grad():
        for form, stock, calls in forms_to_time(place, size):
            times: list[float | None] = []
            detail = ""
            for call in calls:
                try:
                    times.append(microseconds(call, place))
                except Exception as error:
                    times.append(None)
                    detail = detail or in_one_line(error)
            found.append(Timing(form, stock, times[0], times[1], detail))
    return found


def microseconds(call: Callable[[], Any], place: torch.device) -> float:
    """Return the median time of a call, by the device's own clock."""
    for _ in range(WARM):
        call()
    if place.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(RUNS):
            call()
            marks.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(marks)) * 1e6
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(place)
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return float(statistics.median(times)) * 1e3


# Contracts at L2, on the executors of a device.


def judge_contracts(
    device: Device, names: tuple[str, ...] | None, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Judge the contracts that have a meaning on a GPU at L2; call this while the device's backend is chosen.

    Args:
        device: Where kernels run.
        names: Contracts; by default all.
        progress: Called after each with its name.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        workspace = BackendWorkspace([library()], Path(home), "card", device.target)
        for name in names if names is not None else tuple(workspace.tree.entries):
            contract = workspace.tree.load(name)
            options = Options(level=2, device=str(device.place))
            for record in judge_contract(contract, options):
                found.append(
                    {
                        "contract": name,
                        "claim": record.claim,
                        "verdict": record.verdict,
                        "cases": record.cases,
                        "compared": record.compared,
                        "differing": record.differing,
                        "detail": record.detail,
                    }
                )
            progress(name)
    return found


def contracts_kept(records: list[dict[str, Any]]) -> bool:
    """Return whether claims were judged, and every one is kept."""
    return bool(records) and all(one.get("verdict") == "kept" for one in records)


# Seal, sign and read.


def canonical(record: dict[str, Any]) -> str:
    """Return the digest of a record, whatever the order of its keys; without what `seal` adds."""
    plain = {name: value for name, value in record.items() if name not in ("digest", "signature")}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3(text.encode()).hexdigest()


def seal(record: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Return a record with its form and digest, signed by the Ed25519 key in a file if one is given."""
    plain: dict[str, Any] = json.loads(to_json({"form": FORM, **record}))
    plain["digest"] = canonical(plain)
    if key:
        private = read_private(key)
        public = private.public_key().public_bytes_raw().hex()
        plain["signature"] = {"key": public, "ed25519": sign(private, PURPOSE, plain["digest"])}
    return plain


def read(path: str, key: str | None) -> dict[str, Any]:
    """Read a record, and check its digest and its signature.

    Args:
        path: The file.
        key: A file with the public key that must have signed it; by default a signature need only be a true one.

    Raises:
        ArgumentError: If it is no record, was changed, or is not signed as it should be.
    """
    try:
        record: dict[str, Any] = json.loads(files.read_bytes(Path(path), LARGEST))
        known = isinstance(record, dict) and record.get("form") == FORM
        digest = canonical(record) if known else ""
    except (OSError, ValueError, RecursionError) as error:
        raise no_record(path, in_one_line(error)) from None
    if not known or not isinstance(record.get("kept"), bool):
        raise no_record(path, "JSON of another kind")
    if record.get("digest") != digest:
        raise no_record(path, "a record that was changed after it was written")
    signature = record.get("signature")
    if signature is None and key is None:
        return record
    wanted = read_public(key).public_bytes_raw().hex() if key else None
    if not isinstance(signature, dict) or not is_true(signature, digest):
        raise no_record(path, "a record without a true signature")
    if wanted not in (None, signature["key"]):
        raise no_record(path, f"a record that key {str(signature['key'])[:16]}… signed")
    return record


def is_true(signature: dict[str, Any], digest: str) -> bool:
    """Return whether a signature is that of its own key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    made, public = signature.get("ed25519"), signature.get("key")
    if not isinstance(made, str) or not isinstance(public, str):
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    except ValueError:
        return False
    return is_signed(key, PURPOSE, digest, made)


def no_record(path: str, received: str) -> ArgumentError:
    """Return the error for a file that cannot be taken."""
    return ArgumentError(
        expected=f"a record of `isobit doctor --device cuda --record FILE` in {path}",
        received=received,
        remedy="ask for the file again, as the command wrote it; --key FILE names the public key that signed it",
    )


def timings_as_json(timings: list[Timing]) -> list[dict[str, Any]]:
    """Return what a JSON record has of times."""
    return [asdict(one) for one in timings]
