"""Plans that write themselves: linear layers are paired by the flow of the data, and the compiler is the judge."""

from tpplan.suggest.import_hf import import_plan
from tpplan.suggest.search import Suggestion, search
from tpplan.suggest.write import write_plan

__all__ = ["Suggestion", "import_plan", "search", "write_plan"]
