from isobit.guards import sinks as sinks
from isobit.guards import training_config as training_config
from isobit.guards.agreement import Agreement as Agreement
from isobit.guards.agreement import Disagreement as Disagreement
from isobit.guards.agreement import rank_agreement as rank_agreement
from isobit.guards.emitter import Emitter as Emitter
from isobit.guards.events import Event as Event
