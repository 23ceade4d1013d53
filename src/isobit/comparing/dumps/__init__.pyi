from isobit.comparing.dumps.compare import compare_dumps as compare_dumps
from isobit.comparing.dumps.debug_log import save_debug_log as save_debug_log
from isobit.comparing.dumps.records import DumpComparison as DumpComparison
from isobit.comparing.dumps.records import Entry as Entry
from isobit.comparing.dumps.records import NotCompared as NotCompared
from isobit.comparing.dumps.records import PlaceDifference as PlaceDifference
from isobit.comparing.dumps.records import Unreadable as Unreadable
