"""In the place of Hugging Face's `datasets`, which takes 30 MiB of the archive and wants a network.

`sglang.benchmark` imports the name below for one of its data sets, whichever is asked for.
"""


def load_dataset(*_, **__):
    raise ModuleNotFoundError(
        "This bundle has no `datasets`: nothing could be downloaded. Take --dataset-name random, or "
        "install datasets, pandas and pyarrow into the host's Python and remove this file.",
        name="datasets",
    )
