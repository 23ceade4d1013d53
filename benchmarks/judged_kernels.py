"""The records of a kernel, as `isobit check` makes them; one that cannot be called is a row of its own."""

from isobit.contracts.judge.verify import verify_contract
from isobit.errors import IsobitError, in_one_line
from isobit.foundation.records import ClaimRecord
from isobit.library.any_kernel.kernel_call import first_call


def records_of(contract, options, like):
    """Return the records of the first call and of every claim; if the first has a fault, of that alone."""
    try:
        first = first_call(contract, options, like, False)
        return [first, *(verify_contract(contract, options) if first.verdict == "kept" else ())]
    except IsobitError as error:
        return [ClaimRecord("call", "holds", "could-not-run", 0, 2, detail=in_one_line(error))]
