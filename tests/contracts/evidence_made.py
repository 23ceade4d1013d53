"""Evidence for tests: a contract of five claims, records that earn a level, findings, and the way they are read."""

from pathlib import Path

from isobit.contracts.language.contract import Claim, Contract, Obligation, ProofPlan
from isobit.contracts.store.evidence import Evidence, JudgedContract
from isobit.foundation.records import ClaimRecord, Planted, Proof

DIGEST = "0123456789abcdef" * 2
PLANTED = "one ulp off"
CLAIMS = {
    "rows": ("parity", "L3"),
    "odd": ("parity", "L3"),
    "other": ("parity", "L2"),
    "proved": ("algebra", "L4"),
    "refused": ("refuses", "L2"),
}
CONTRACT = Contract(
    "softmax-kernel-v1",
    "1.0.0",
    "t",
    (Obligation("O-1", "it holds"),),
    claims=tuple(
        Claim(
            id,
            ("O-1",),
            relation,
            level,
            sabotage=(PLANTED,),
            proof=ProofPlan("z3", "wrong") if level == "L4" else None,
        )
        for id, (relation, level) in CLAIMS.items()
    ),
)


def record(claim: str = "rows", verdict: str = "kept", level: int = 3, **rest) -> ClaimRecord:
    """As a judge makes it: what is counted earns the level."""
    relation, asked = CLAIMS[claim]
    planted = (Planted(PLANTED, True, "1 of 2 differ"), Planted("proof: wrong", True, "no"))[
        : 1 + (level == 4)
    ]
    known = {
        "cases": 7,
        "inputs": 10_000,
        "compared": 5,
        "differing": int(verdict == "broken"),
        "planted": planted if level > 1 else (),
        "proof": Proof("z3", "all integers", 3) if level == 4 else None,
        "seconds": 0.25,
        "drawn": 10_000 if level > 2 else 0,
    }
    return ClaimRecord(claim, relation, verdict, level, int(asked[1]), **known | rest)


def finding(
    *records: ClaimRecord, digest: str = DIGEST, date: str = "2027-01-01", **rest
) -> JudgedContract:
    return JudgedContract(
        CONTRACT.id, digest, "", 3, records or (record(),), date, "x86_64 linux avx2", **rest
    )


def read(home: Path, digest: str = DIGEST) -> tuple[list[JudgedContract], dict[str, str]]:
    evidence = Evidence(home)
    return evidence.read(digest, CONTRACT), evidence.refused
