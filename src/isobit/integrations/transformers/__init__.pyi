from isobit.integrations.transformers.adapters import merged_copy as merged_copy
from isobit.integrations.transformers.coverage import Coverage as Coverage
from isobit.integrations.transformers.distilling import distil as distil
from isobit.integrations.transformers.distilling import most_likely as most_likely
from isobit.integrations.transformers.enabling import disable as disable
from isobit.integrations.transformers.enabling import enable as enable
from isobit.integrations.transformers.enabling import enabled as enabled
from isobit.integrations.transformers.perplexity import perplexity as perplexity
from isobit.integrations.transformers.sampling import KeyedSampling as KeyedSampling
from isobit.integrations.transformers.scoring import logprobs as logprobs
from isobit.integrations.transformers.scoring import logprobs_and_entropy as logprobs_and_entropy
from isobit.integrations.transformers.strictness import coverage_report as coverage_report
from isobit.integrations.transformers.teacher_store import TeacherStore as TeacherStore
from isobit.integrations.transformers.teacher_store import (
    verify_teacher_store as verify_teacher_store,
)
from isobit.integrations.transformers.teacher_store import (
    write_teacher_store as write_teacher_store,
)
from isobit.integrations.transformers.tensor_parallel import shard as shard
from isobit.integrations.transformers.tensor_parallel import unshard as unshard
from isobit.integrations.transformers.trainer import OrderedTrainer as OrderedTrainer
from isobit.integrations.transformers.watch_callback import WatchCallback as WatchCallback
