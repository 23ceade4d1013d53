from isobit.compiled.api import Certificate as Certificate
from isobit.compiled.api import certify as certify

HOMES: dict[str, str]
