"""Is k3 what `sglang-fp8rl mismatch` says? By code that shares nothing with this package.

`sglang-fp8rl mismatch`, plain and `--as-served`, measures a running server through a proxy that writes down
what the server answers. The same tokens are then scored here: `transformers` in BF16, with a cast to blocks
and rows and back that is written from its definition, and, as a control, with casts that are not the server's.

    PYTHONPATH=benchmarks python -m studies.real_model.independent_gap --json benchmarks/results/independent_gap.jsonl
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

E4M3_MAX = 448.0
NEAR = 1e-3  # of k3, relative
Cast = Callable[[torch.Tensor], torch.Tensor]
Answer = tuple[list[int], list[int], list[float]]


def there_and_back(
    weight: torch.Tensor, rows: int, columns: int, pow2: bool = False
) -> torch.Tensor:
    """`[N, K]` in BF16 with one scale for each box: amax / 448, codes in e4m3, codes times scale in BF16."""
    height, width = weight.shape
    padded = torch.nn.functional.pad(
        weight.to(torch.bfloat16).float(), (0, -width % columns, 0, -height % rows)
    )
    boxes = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [n, rows, k, columns]
    scales = boxes.abs().amax((1, 3), keepdim=True) / E4M3_MAX
    if pow2:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (boxes / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    dequantized = (codes.float() * scales).reshape(padded.shape)
    return dequantized[:height, :width].to(torch.bfloat16)


def as_the_server(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 128; a scale a row where 128 does not divide the columns."""
    columns = weight.shape[1]
    return there_and_back(weight, 1, columns) if columns % 128 else there_and_back(weight, 128, 128)


def other_block(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 64, which divides everything here."""
    return there_and_back(weight, 64, 64)


def other_rounding(weight: torch.Tensor) -> torch.Tensor:
    """The server's blocks, with scales that are powers of two."""
    rows, columns = (1, weight.shape[1]) if weight.shape[1] % 128 else (128, 128)
    return there_and_back(weight, rows, columns, pow2=True)


TRAINERS: dict[str, Cast | None] = {
    "BF16": None,
    "weights as served": as_the_server,
    "blocks of 64": other_block,
    "scales 2^n": other_rounding,
}


def k3(folder: Path, cast: Cast | None, answers: list[Answer]) -> float:
    """Mean of r - 1 - log r over all tokens; r: `transformers` in BF16 over the server."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if cast is not None and name.endswith("_proj.weight"):
                parameter.copy_(cast(parameter))
        for prompt, output, said in answers:
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
            mine = logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]
            log_ratio = mine.double() - torch.tensor(said).double()
            total += float((log_ratio.expm1() - log_ratio).sum())
            tokens += len(output)
    return total / tokens


class Recorder(ThreadingHTTPServer):
    """Hands every request on to `url`, and keeps what `/generate` was asked and said."""

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.answers = url, list[Answer]()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._hand_on(None)

    def do_POST(self) -> None:
        self._hand_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _hand_on(self, body: bytes | None) -> None:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.url + self.path, data=body, headers=kind)
        with urllib.request.urlopen(request, timeout=3600) as reply:
            said = reply.read()
        if self.path == "/generate" and body is not None:
            asked = json.loads(body)["input_ids"]
            for prompt, one in zip(asked, json.loads(said), strict=True):
                pairs = one["meta_info"]["output_token_logprobs"]
                answer = (prompt, [pair[1] for pair in pairs], [pair[0] for pair in pairs])
                self.server.answers.append(answer)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def main(
    answers: Annotated[int, typer.Option(min=2, help="of each measurement")] = 24,
    answer_tokens: Annotated[int, typer.Option(min=1)] = 32,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line per row")] = None,
) -> None:
    """Exit status 1: the numbers differ by more than a thousandth, or a wrong cast is as near."""
    import measured
    from rich.console import Console
    from transformers import AutoTokenizer

    from . import texts
    from .arms import ARMS, DEFAULT
    from .fetch import fetch
    from .serving import ArmServer

    torch.set_num_threads(threads)
    folder = fetch("smollm2", Console(stderr=True))
    prompts = texts.prompts(texts.PROMPTS, AutoTokenizer.from_pretrained(folder), answers)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "prompts.jsonl"
        asked.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in prompts))
        log = Path(scratch) / "server.log"
        with ArmServer(ARMS[DEFAULT], folder, threads, 1, log) as server:
            for name, flags in (("BF16", []), ("weights as served", ["--as-served"])):
                recorder = Recorder(server.url)
                url = f"http://127.0.0.1:{recorder.server_port}"
                command = [sys.executable, "-c", "from sglang_fp8rl.lab.cli import app; app()"]
                command += ["mismatch", "--url", url, "--model", str(folder), "--json"]
                command += ["--prompts", str(asked), "--max-new-tokens", str(answer_tokens), *flags]
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                recorder.shutdown()
                theirs = json.loads(said)["metrics"]
                own = {one: k3(folder, cast, recorder.answers) for one, cast in TRAINERS.items()}
                rows.append(
                    {"trainer": name, "tokens": theirs["tokens"], "mismatch": theirs["kl_k3"]}
                )
                rows[-1]["independent"] = own
                print(json.dumps(rows[-1]), flush=True)
    measured.append(
        json_path,
        rows,
        benchmark="independent_gap",
        model="smollm2",
        answers=answers,
        answer_tokens=answer_tokens,
        **measured.versions("sglang", "torch", "transformers"),
    )
    raise typer.Exit(int(not all(_holds(row) for row in rows)))


def _holds(row: dict[str, Any]) -> bool:
    own = row["independent"]
    same = abs(own[row["trainer"]] / row["mismatch"] - 1) <= NEAR
    others = [value for name, value in own.items() if name != "weights as served"]
    return same and own["weights as served"] < min(others)


if __name__ == "__main__":
    typer.run(main)
