# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, from the wheel of xllamacpp; tests that need it are skipped without it."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


class LlamaCpp:
    """A GGUF file in llama.cpp's server, with attention and KV cache in float32."""

    def __init__(self, file: Path):
        xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp runs by xllamacpp, which is not installed")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = 256
        parameters.n_parallel = parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.verbosity = 1
        parameters.warmup = False
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server = xllamacpp.Server(parameters)
        self.continuation([0], 1)  # a server that is closed before its loop has answered anything never ends

    def _ask(self, path: str, **question: Any) -> dict[str, Any]:
        address = self._server.listening_address + path
        request = urllib.request.Request(address, json.dumps(question).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants around it."""
        return self._ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens after a prompt."""
        return self._ask(
            "/completion", prompt=prompt, n_predict=count, temperature=0, ignore_eos=True, return_tokens=True
        )["tokens"]

    def log_probs(self, prompt: list[int], vocab_size: int, printable: int) -> Tensor:
        """Log-probabilities of all next tokens: [vocab].

        They come with a sampled token that has a text, so `printable` is made the sampled one.
        """
        answer = self._ask(
            "/completion", prompt=prompt, n_predict=1, n_probs=vocab_size, logit_bias=[[printable, 1000]]
        )
        entries = answer["completion_probabilities"][0]["top_logprobs"]
        found = torch.full((vocab_size,), torch.nan)
        found[[entry["id"] for entry in entries]] = torch.tensor([entry["logprob"] for entry in entries])
        return found
