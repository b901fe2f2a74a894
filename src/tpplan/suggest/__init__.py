"""Plans that write themselves: linear layers are paired by the flow of the data, and the compiler is the judge."""

from tpplan.suggest.export_hf import Exported, export_program
from tpplan.suggest.export_text import export_rules
from tpplan.suggest.import_deepspeed import import_deepspeed
from tpplan.suggest.import_hf import import_plan
from tpplan.suggest.settings import Suggestion, search
from tpplan.suggest.write import write_plan

__all__ = [
    "Exported",
    "Suggestion",
    "export_program",
    "export_rules",
    "import_deepspeed",
    "import_plan",
    "search",
    "write_plan",
]
