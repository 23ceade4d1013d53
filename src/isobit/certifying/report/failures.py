"""What a certificate found broken or could not run: one record per reason, over all targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from isobit.certifying.records import FAILED, Certified, Outcome
from isobit.certifying.report.words import describe_members


@dataclass
class Failure:
    """One reason, with the targets (and, of some, the configurations) and the places where it was found."""

    verdict: str
    reason: str
    remedy: str
    labels: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The first place; how many others there are."""
        more = len(self.places) - 1
        others = f" (and {more} more {'place' if more == 1 else 'places'})" if more > 0 else ""
        return f"{self.places[0]}{others}" if self.places else ""


def gather_failures(found: Certified) -> list[Failure]:
    """Return what went wrong by reason, in the sequence in which it was found."""
    failures: dict[tuple[str, str, str], Failure] = {}
    for target in found.targets:
        among = [one.configuration for one in target.outcomes]
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for one in target.outcomes:
            if one.verdict in FAILED:
                groups.setdefault((one.verdict, one.reason, one.remedy), []).append(one)
        for key, outcomes in groups.items():
            failure = failures.setdefault(key, Failure(*key))
            named = describe_members([one.configuration for one in outcomes], among)
            failure.labels.append(
                target.target if named in ("all", "as it is") else f"{target.target} ({named})"
            )
            failure.places += [
                one.where for one in outcomes if one.where and one.where not in failure.places
            ]
    return list(failures.values())
