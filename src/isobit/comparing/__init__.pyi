from isobit.comparing import dumps as dumps
from isobit.comparing.checkpoints.compare import compare_checkpoints as compare_checkpoints
from isobit.comparing.dumps.compare import compare_dumps as compare_dumps
from isobit.comparing.runs.run import run_twice as run_twice
from isobit.comparing.scores import compare_scores as compare_scores
from isobit.comparing.server.running import audit_server as audit_server
