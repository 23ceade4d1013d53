"""Contract files and records of evidence for tests of folders of contracts."""

from isobit.foundation.records import ClaimRecord, Planted


def text_of(id: str, depends_on=(), subject="json:f", title="t", claims=("c",)) -> str:
    rest = 'obligations: [O-1], relation: refuses, error: "json:E", calls: "json:c", level: L2'
    return f"""id: {id}
version: 1.0.0
title: {title}
subject: {subject}
depends_on: [{", ".join(depends_on)}]
obligations: [{{id: O-1, text: holds}}]
claims: [{", ".join(f"{{id: {claim}, {rest}}}" for claim in claims)}]
"""


def write(folder, id, **given):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{id}.contract.yaml").write_text(text_of(id, **given))


def record_of(verdict: str = "kept", detail: str = "", claim: str = "c") -> ClaimRecord:
    planted = (Planted("accepts everything", True, "accepted"),)
    return ClaimRecord(
        claim, "refuses", verdict, 2, 2, 1, 1, 1, int(verdict != "kept"), detail, planted=planted
    )
