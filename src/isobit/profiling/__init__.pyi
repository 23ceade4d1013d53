from isobit.profiling.api import profile as profile
from isobit.profiling.records import Account as Account
