# SPDX-License-Identifier: Apache-2.0
"""A child against its parent in llama.cpp on the CPU, both also checked against transformers.

    pip install xllamacpp
    python benchmarks/llama_cpp.py [CHILD] [--parent PARENT] [--quant f32 --quant q8_0] [--tokens 128] [--threads 2]

Each model is exported to GGUF and measured in turns with the other: prefill and decode speed, perplexity on a text in
both runtimes, greedy tokens and next-token log-probabilities. In f32 the greedy tokens must be the same. Without CHILD
one is cut from the parent without any training, with every kind of layer that llama.cpp runs: its perplexity says
nothing about Puzzle, only whether both runtimes compute the same. `ratio` is the child's decode speed over the
parent's, in the last format.
"""

import argparse
import json
import math
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from puzzle.architecture import AttentionConfig, BlockConfig, FFNConfig
from puzzle.checkpoint import Checkpoint, find
from puzzle.child.gguf import export
from puzzle.corpus import python_docs
from puzzle.modeling import DeciLMForCausalLM
from puzzle.parents import cached

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in 1923,")
GREEDY, GENERATED, REPEATS = 24, 48, 3
KV1, LINEAR, NONE = AttentionConfig(1), AttentionConfig(linear=True), AttentionConfig(no_op=True)


class LlamaCpp:
    """A GGUF file in llama.cpp's server, with its own defaults."""

    def __init__(self, file: Path, context: int, threads: int):
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.verbosity = 1
        self._server = xllamacpp.Server(parameters)

    def complete(self, prompt: list[int], count: int, **settings: Any) -> dict[str, Any]:
        question = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps({**question, **settings}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def log_prob(self, prompt: list[int], token: int) -> float:
        """The log-probability of a token after a prompt. The server tells that of its choice, so it must choose it."""
        answer = self.complete(prompt, 1, n_probs=1, logit_bias=[[token, 1000]], cache_prompt=True)
        return answer["completion_probabilities"][0]["logprob"]


def cut_child(parent: Checkpoint, out: Path) -> Path:
    """A child with every kind of layer that llama.cpp runs, cut from the parent without training."""
    layers, width = parent.shape.num_layers, parent.shape.intermediate_size
    blocks = [parent.parent_block] * layers
    attention, ffn = blocks[0].attention, blocks[0].ffn
    changes = {0: (NONE, ffn), 4: (KV1, FFNConfig(width * 3 // 4)), 8: (attention, FFNConfig(width // 2))}
    changes |= {12: (LINEAR, ffn), 15: (KV1, FFNConfig(no_op=True)), 18: (NONE, FFNConfig(width // 4))}
    changes |= {21: (NONE, FFNConfig(no_op=True)), 29: (KV1, FFNConfig(width * 3 // 4))}
    for layer, block in changes.items():  # as in 30 layers
        blocks[layer * layers // 30] = BlockConfig(*block)
    model = DeciLMForCausalLM(parent.child_config_with(blocks))
    weights = AutoModelForCausalLM.from_pretrained(parent.path, dtype=torch.float32).state_dict()
    heads, size = parent.shape.num_kv_heads, parent.shape.head_dim
    state = {}
    for name, wanted in model.state_dict().items():
        if name.endswith("linear_attn.weight"):  # each token attends to itself alone
            start = name.removesuffix("linear_attn.weight")
            value = weights[f"{start}v_proj.weight"].unflatten(0, (heads, size))
            value = value.repeat_interleave(parent.shape.num_heads // heads, 0).flatten(0, 1)
            state[name] = weights[f"{start}o_proj.weight"] @ value
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            kept = len(wanted) // size
            state[name] = weights[name].unflatten(0, (kept, heads // kept, size)).mean(1).flatten(0, 1)
        else:
            state[name] = weights[name][tuple(slice(count) for count in wanted.shape)]
    model.load_state_dict(state)
    model.save_pretrained(out)
    parent.tokenizer().save_pretrained(out)
    return out


def short_text(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The first tokens of the first document that has enough, in ASCII: each token is whole letters then."""
    texts = (tokenizer(text, add_special_tokens=False).input_ids for text in python_docs() if text.isascii())
    return next(tokens for tokens in texts if len(tokens) >= count)[:count]


@torch.no_grad()
def check(model: PreTrainedModel, runtime: LlamaCpp, prompts: list[list[int]], text: list[int]) -> dict[str, Any]:
    """What both runtimes say: greedy tokens, the log-probability of the first of them, perplexity."""
    same, difference = 0, 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        wanted = model.generate(tokens, max_new_tokens=GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0)
        continuation = wanted[0, len(prompt) :].tolist()
        found = runtime.complete(prompt, GREEDY)["tokens"]
        same += next((i for i, pair in enumerate(zip(continuation, found, strict=True)) if pair[0] != pair[1]), GREEDY)
        log_prob = float(model(tokens).logits[0, -1].log_softmax(-1)[continuation[0]])
        difference = max(difference, abs(log_prob - runtime.log_prob(prompt, continuation[0])))
    log_probs = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    torch_loss = -float(log_probs.gather(1, torch.tensor(text)[1:, None]).mean())
    losses = [-runtime.log_prob(text[:i], text[i]) for i in range(1, len(text))]
    return {
        "same_tokens": same,
        "log_prob_difference": difference,
        "perplexity": math.exp(statistics.mean(losses)),
        "perplexity_transformers": math.exp(torch_loss),
    }


def speeds(runtimes: dict[str, LlamaCpp], prompt: list[int]) -> dict[str, dict[str, float]]:
    """Median tokens per second of each model, in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runtimes}
    for _ in range(REPEATS + 1):
        for name, runtime in runtimes.items():
            found[name].append(runtime.complete(prompt, GENERATED, cache_prompt=False)["timings"])
    keys = {"prefill": "prompt_per_second", "decode": "predicted_per_second"}
    return {  # without the first turn
        name: {ours: statistics.median(turn[theirs] for turn in turns[1:]) for ours, theirs in keys.items()}
        for name, turns in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("child", nargs="?", type=Path)
    parser.add_argument("--parent")
    parser.add_argument("--quant", action="append")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    parent = Checkpoint(find(options.parent) if options.parent else cached("smollm2-135m"))
    tokenizer = parent.tokenizer()
    text, prompts = short_text(tokenizer, options.tokens), [tokenizer(prompt).input_ids for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"parent": parent.path, "child": options.child or cut_child(parent, Path(scratch) / "child")}
        models = {n: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for n, f in folders.items()}
        results: dict[str, dict[str, Any]] = {}
        for quant in options.quant or ["f32", "q8_0"]:
            files = {name: export(folder, Path(scratch) / f"{name}.gguf", quant) for name, folder in folders.items()}
            context = options.tokens + GENERATED
            runtimes = {name: LlamaCpp(file, context, options.threads) for name, file in files.items()}
            measured = speeds(runtimes, text)
            for name, runtime in runtimes.items():
                size = {"mib": files[name].stat().st_size / 2**20}
                results[f"{name} {quant}"] = size | measured[name] | check(models[name], runtime, prompts, text)
                if quant == "f32" and results[f"{name} {quant}"]["same_tokens"] < GREEDY * len(prompts):
                    raise SystemExit(f"llama.cpp and transformers do not agree on the {name}: {results}")
    report(results)


def report(results: dict[str, dict[str, Any]]) -> None:
    total = GREEDY * len(PROMPTS)
    print("tokens/s in llama.cpp, and what it computes against transformers in float32")
    print(
        f"{'':14s}{'MiB':>7s}{'prefill':>9s}{'decode':>8s}{'same tokens':>13s}{'log-prob off':>14s}{'perplexity':>24s}"
    )
    for name, row in results.items():
        both = f"{row['perplexity']:.3f} / {row['perplexity_transformers']:.3f}"
        print(
            f"{name:14s}{row['mib']:7.1f}{row['prefill']:9.1f}{row['decode']:8.1f}"
            f"{row['same_tokens']:8d} of {total}{row['log_prob_difference']:13.1e} {both:>24s}"
        )
    quant = list(results)[-1].split()[1]
    ratio = results[f"child {quant}"]["decode"] / results[f"parent {quant}"]["decode"]
    print(json.dumps({"ratio": round(ratio, 3), "quant": quant, "results": results}))


if __name__ == "__main__":
    main()
