from isobit.profiling.api import compare as compare
from isobit.profiling.api import profile as profile
from isobit.profiling.records import Account as Account
