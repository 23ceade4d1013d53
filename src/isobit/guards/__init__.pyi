from isobit.guards import training_config as training_config
from isobit.guards.agreement import Agreement as Agreement
from isobit.guards.agreement import Disagreement as Disagreement
from isobit.guards.agreement import rank_agreement as rank_agreement
