from isobit.compiled.interpreter import interpret as interpret
from isobit.compiled.interpreter import interpreted as interpreted
