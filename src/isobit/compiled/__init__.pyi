from isobit.compiled.api import Certificate as Certificate
from isobit.compiled.api import certify as certify
from isobit.compiled.backends import executing as executing
from isobit.compiled.interpreter import interpret as interpret
from isobit.compiled.interpreter import interpreted as interpreted

HOMES: dict[str, str]
