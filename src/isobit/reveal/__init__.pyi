from isobit.reveal import targets as targets
from isobit.reveal.api import certify as certify
from isobit.reveal.api import order as order
from isobit.reveal.certificate import Certificate as Certificate
from isobit.reveal.tree import Tree as Tree
