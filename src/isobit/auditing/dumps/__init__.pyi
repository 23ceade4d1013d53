from isobit.auditing.dumps.compare import compare_dumps as compare_dumps
from isobit.auditing.dumps.debug_log import save_debug_log as save_debug_log
from isobit.auditing.dumps.records import DumpComparison as DumpComparison
from isobit.auditing.dumps.records import Entry as Entry
from isobit.auditing.dumps.records import NotCompared as NotCompared
from isobit.auditing.dumps.records import PlaceDifference as PlaceDifference
from isobit.auditing.dumps.records import Unreadable as Unreadable
