"""Payloads that are not what they should be: no pickle, a foreign one, memory that is gone."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import torch

from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.handles import serialize
from sglang_fp8rl.wire.staging import StagingBuffers

from .fault import Group
from .trainer import DOWN, UP, Answer, Trainer, encoded

GROUP = Group("Payloads")
row = GROUP.row
READ = ("update_weights_from_tensor", "as SGLang's serializer writes it")


def unreadable(word: str, content: bytes, *told: str) -> None:
    """A row for bytes in the place of a pickle of pairs."""
    row(*READ, *told, word=word)(lambda trainer: trainer.payload([encoded(content)]))


unreadable("no_pickle_at_all", b"not a pickle", "invalid load key")
unreadable("nothing_between_the_brackets", b"", "Ran out of input")


@row(*READ, "truncated")
def half_of_a_pickle(trainer: Trainer) -> Answer:
    trainer.memory.append(trainer.new[DOWN])
    content = base64.b64decode(serialize([trainer.fresh(DOWN)]))
    return trainer.payload([encoded(content[: len(content) // 2])])


class RunsSomething:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@row(*READ, "unsafe")
def a_pickle_that_runs_a_command(trainer: Trainer) -> Answer:
    trace = trainer.directory / "ran"
    answer = trainer.payload([encoded(pickle.dumps(RunsSomething(str(trace))))])
    assert not trace.exists()
    return answer


unreadable(
    "a_pickle_of_a_class_that_nobody_has",
    pickle.dumps(torch.Size([1])).replace(b"torch", b"porch"),
    "unsafe",
)
unreadable("a_dictionary_instead_of_pairs", pickle.dumps({"no": "tensors"}))
unreadable("a_number_instead_of_pairs", pickle.dumps(7))
unreadable("names_without_tensors", pickle.dumps([DOWN, UP]))


@row("7", "no text", "a name of the checkpoint")
def a_name_that_is_a_number(trainer: Trainer) -> Answer:
    return trainer.pickled([(7, trainer.new[DOWN])])


@row(*READ)
def a_number_instead_of_a_tensor(trainer: Trainer) -> Answer:
    return trainer.pickled([(DOWN, 1.5)])


@row("empty list")
def an_empty_list_of_tensors(trainer: Trainer) -> Answer:
    return trainer.send()


@row("serialized_named_tensors", "0 payload(s)")
def no_payload_for_the_rank(trainer: Trainer) -> Answer:
    return trainer.payload([])


@row("serialized_named_tensors", "2 payload(s)", needs_server=True)
def two_payloads_for_one_rank(trainer: Trainer) -> Answer:
    trainer.memory.append(trainer.new[DOWN])
    return trainer.payload([serialize([trainer.fresh(DOWN)])] * 2)


def shared(trainer: Trainer) -> tuple[bytes, bytes]:
    """A pickle of one tensor, and the name of its file of shared memory."""
    tensor = trainer.new[DOWN].clone()
    trainer.memory.append(tensor)
    content = base64.b64decode(serialize([(DOWN, tensor)]))
    return content, tensor.untyped_storage()._share_filename_cpu_()[1]


@row("shared memory")
def shared_memory_that_is_gone(trainer: Trainer) -> Answer:
    content, handle = shared(trainer)
    answer = trainer.payload([encoded(content.replace(handle, handle[:-4] + b"gone"))])
    os.unlink("/dev/shm" + handle.decode())  # it waits for a reader who never comes
    return answer


@row("shared memory")
def shared_memory_that_was_cut_to_a_page(trainer: Trainer) -> Answer:
    content, handle = shared(trainer)
    os.truncate("/dev/shm" + handle.decode(), 4096)
    return trainer.payload([encoded(content)])


def staged(trainer: Trainer) -> dict[str, Any]:
    """What `RefitClient` sends first, in buffers of its own."""
    payload = Bucket.of([trainer.fresh(DOWN)], StagingBuffers()).payload(1, True)
    trainer.memory.append(payload)
    return payload.content


@row("buffer", "not open here")
def a_buffer_whose_handle_never_came(trainer: Trainer) -> Answer:
    content = staged(trainer)
    del content["flattened_tensor"]
    return trainer.pickled(content, "flattened_bucket")


@row("buffer", "its handle came before", "opened once", serves=[DOWN])
def a_handle_that_comes_twice(trainer: Trainer) -> Answer:
    content = staged(trainer)
    trainer.pickled(content, "flattened_bucket", flush=False)
    return trainer.pickled(content, "flattened_bucket", flush=False)


@row("direct", "leave FP8 scales behind")
def load_format_direct(trainer: Trainer) -> Answer:
    return trainer.pickled([trainer.fresh(DOWN)], "direct")


@row("load_format", "upside_down")
def a_load_format_that_nobody_knows(trainer: Trainer) -> Answer:
    return trainer.pickled([trainer.fresh(DOWN)], "upside_down")


@row(*READ)
def a_list_that_is_called_a_flattened_bucket(trainer: Trainer) -> Answer:
    return trainer.pickled([trainer.fresh(DOWN)], "flattened_bucket")


@row(*READ)
def a_flattened_bucket_that_is_called_a_list(trainer: Trainer) -> Answer:
    flat = trainer.new[DOWN].reshape(-1).view(torch.uint8)
    return trainer.pickled({"flattened_tensor": flat, "metadata": []})


@row(*READ)
def a_flattened_bucket_without_its_layout(trainer: Trainer) -> Answer:
    flat = trainer.new[DOWN].reshape(-1).view(torch.uint8)
    return trainer.pickled({"flattened_tensor": flat}, "flattened_bucket")


@row(*READ, "meta tensor")
def a_tensor_without_memory(trainer: Trainer) -> Answer:
    return trainer.send((DOWN, torch.empty(256, 512, device="meta")))
