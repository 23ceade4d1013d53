from isobit.reveal import targets as targets
from isobit.reveal.api import compare_orders as compare_orders
from isobit.reveal.api import order as order
from isobit.reveal.certificate import OrderComparison as OrderComparison
from isobit.reveal.tree import Tree as Tree
