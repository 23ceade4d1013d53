"""Every exception isobit raises; each says what was expected, what was received, and the remedy.

IsobitError
├── ArgumentError        a shape, dtype, device or layout that no kernel takes (also a ValueError)
├── CutError             a split that does not fall on segment edges (also a ValueError)
├── UnsupportedError     a transformation that has no bit-exact meaning here (also a RuntimeError)
├── EngineError          kernels that are missing, disabled or not attested (also a RuntimeError)
├── RevealError          a target whose order of addition cannot be shown (also a RuntimeError)
├── AgreementError       ranks that should hold the same bits, and do not (also a RuntimeError)
└── ContractError        a contract that says nothing checkable, or names what may not be named (also a ValueError)
"""


class IsobitError(Exception):
    """A refusal, in three parts."""

    def __init__(self, *, expected: str, received: str, remedy: str) -> None:
        self.expected, self.received, self.remedy = expected, received, remedy
        super().__init__(f"expected {expected}; received {received}; remedy: {remedy}")


class ArgumentError(IsobitError, ValueError):
    """A shape, dtype, device or layout that no kernel takes."""


class CutError(IsobitError, ValueError):
    """A split of a sum that does not fall on segment edges."""


class UnsupportedError(IsobitError, RuntimeError):
    """A transformation that has no bit-exact meaning here."""


class EngineError(IsobitError, RuntimeError):
    """Kernels that are missing, disabled or not attested."""


class RevealError(IsobitError, RuntimeError):
    """A target whose order of addition cannot be shown: not a sum, not repeatable, or not a plain tree."""


class AgreementError(IsobitError, RuntimeError):
    """Ranks that should hold the same bits, and do not; `agreement` is the record of the check."""

    agreement: object = None


class ContractError(IsobitError, ValueError):
    """A contract that is not well-formed, names code that is not trusted, or asks for what cannot be checked."""

    def __init__(self, *, expected: str, received: str, remedy: str, where: str = "", line: int = 0) -> None:
        super().__init__(expected=expected, received=received, remedy=remedy)
        self.where, self.line = where, line

    def __str__(self) -> str:
        said = super().__str__()
        place = f"{self.where}:{self.line}" if self.line else self.where
        return f"{place}: {said}" if place else said
