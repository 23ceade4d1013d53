from isobit.gates import model as model
from isobit.gates import training as training
