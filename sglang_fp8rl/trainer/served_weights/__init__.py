"""Train what is served: a model that computes with the weights as its FP8 server has them.

```
compute_as_served(model, plan)
...  # train; parameters, names and gradients are the model's own
check_as_served(model, client)  # what it computes with is what the server holds
compute_as_stored(model)
```
"""

from .proof import check_as_served, fingerprint_of_served
from .swap import compute_as_served, compute_as_stored, plan_of, served_modules

__all__ = [
    "check_as_served",
    "compute_as_served",
    "compute_as_stored",
    "fingerprint_of_served",
    "plan_of",
    "served_modules",
]
