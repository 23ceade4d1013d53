from isobit.certifying.api import Certificate as Certificate
from isobit.certifying.api import certify as certify
from isobit.certifying.running.backends import executing as executing
from isobit.certifying.running.interpreter import interpret as interpret
from isobit.certifying.running.interpreter import interpreted as interpreted

HOMES: dict[str, str]
